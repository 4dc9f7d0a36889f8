"""Declarations of an API's paths. Routes, limits of bodies, error formats and the OpenAPI description come from
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from canvax.server.answers import Endpoint, answering
from canvax.server.jobs import Engine, Rejected

ErrorFormat = Callable[[Rejected, str], Response]
"""Formats a refusal of a request, which has an id, as an API's clients read it."""


@dataclass(frozen=True)
class Operation:
    """A method of a path.

    Attributes:
        endpoint: the function that answers.
        summary: text in the OpenAPI description, which omits operations without a summary.
        body: the record that checks the body; ``bytes`` for a file; None for no body.
        images: the body may contain images, so it may be large.
        form: the fields of ``body`` come in a form, with files for an image and a mask.
        status: HTTP status of a success.
    """

    endpoint: Endpoint
    summary: str = ""
    body: type[Struct] | type[bytes] | None = None
    images: bool = False
    form: bool = False
    status: int = 200


class ApiPath(Route):
    """A path of an API.

    Args:
        path: as Starlette writes it.
        error: formats refusals.
        alias: whether it is another name of a path, which the OpenAPI description has already.
        operations: by their methods, such as ``GET``.
    """

    def __init__(self, path: str, error: ErrorFormat, *, alias: bool = False, **operations: Operation) -> None:
        self.error, self.operations, self.alias = error, operations, alias
        endpoints = {method: answering(error, operation.endpoint) for method, operation in operations.items()}

        async def endpoint(request: Request) -> Response:
            return await endpoints["GET" if request.method == "HEAD" else request.method](request)

        super().__init__(path, endpoint, methods=list(operations))


class Api(Protocol):
    """A module that declares an API: all that ``create_app`` needs of it."""

    @property
    def PREFIXES(self) -> tuple[str, ...]:
        """Beginnings of its paths: other paths there are refused in its form, and metrics count them together."""
        ...

    def error(self, refused: Rejected, request_id: str, /) -> Response:
        """Format a refusal."""
        ...

    def routes(self, engine: Engine, /) -> Sequence[ApiPath]:
        """Return its paths."""
        ...


def takes_images(paths: Sequence[ApiPath]) -> Callable[[str], bool]:
    """Return a predicate: whether bodies sent to a path may hold images, by the beginnings of declared paths."""
    large = [path.path for path in paths if any(operation.images for operation in path.operations.values())]
    prefixes = tuple(path.partition("{")[0] for path in large if path != "/")
    return lambda path: path.startswith(prefixes) or path in large
