"""The OpenAPI description, made from the records that check what is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from canvax._version import __version__
from canvax.call import OptionRecord
from canvax.settings import json_schema

_ERRORS = {
    "400": "An argument cannot be used.",
    "401": "No API key, or a wrong one.",
    "403": "A page of another site.",
    "404": "No such model, job or image.",
    "408": "The body did not come.",
    "409": "The job was cancelled.",
    "413": "The body is too large.",
    "415": "A kind of body that is not read.",
    "421": "Another host's name.",
    "422": "A field is wrong.",
    "429": "The queue is full, or too many requests: see Retry-After.",
    "500": "The server failed.",
    "503": "The server starts, stops or is out of memory: see Retry-After.",
    "504": "The images were not done in time.",
}
_FORMS = ("/v1/images/edits",)
_FILE = {"type": "string", "contentMediaType": "application/octet-stream"}
_FILES = {"type": "object", "properties": {"image": _FILE, "mask": _FILE}, "required": ["image"]}
"""Of a form, beside its fields."""
_BYTES = {
    "/api/inspect": "How an image was made.",
    "/api/control/{kind}": "The control image that `control_from` makes of an image, as PNG.",
}
"""Paths to which a file is posted as it is."""
_ACCEPTED = ("/api/jobs",)
_POSTS = {
    "/api/jobs": "Begin a job.",
    "/v1/images/generations": "Images of a prompt, as OpenAI's clients ask.",
    "/v1/images/edits": "Images of a prompt and an image, as OpenAI's clients ask.",
    "/sdapi/v1/txt2img": "Images of a prompt, as A1111's clients ask.",
    "/sdapi/v1/img2img": "Images of a prompt and an image, as A1111's clients ask.",
    "/sdapi/v1/extra-single-image": "An image made larger, as A1111's clients ask.",
    "/sdapi/v1/options": "Choose the model, as A1111's clients do.",
    "/sdapi/v1/png-info": "How an image was made, as A1111's clients read it.",
}
_BARE = {
    "/sdapi/v1/interrupt": "Cancel the job that runs, as A1111's clients do.",
    "/sdapi/v1/skip": "Cancel the job that runs, as `interrupt` does.",
    "/sdapi/v1/refresh-loras": "Look for new adapters.",
    "/sdapi/v1/refresh-embeddings": "Look for new embeddings.",
}
"""Paths to which nothing is posted."""
_GETS = {
    "/api/models": "Models and samplers.",
    "/api/prompts": "All concepts that a small model knows.",
    "/api/adapters": "Adapters and embeddings of a model.",
    "/api/jobs": "The client's jobs that are not over, oldest first.",
    "/api/jobs/{name}": "A job.",
    "/api/jobs/{name}/events": "Its events, as they happen.",
    "/api/jobs/{name}/images/{index}": "One of its images.",
    "/v1/models": "Models, as OpenAI's clients read them.",
    "/v1/models/{name}": "A model, as OpenAI's clients read it.",
    "/sdapi/v1/progress": "How far A1111's clients are.",
    "/sdapi/v1/options": "Settings, as A1111's clients read them.",
    "/sdapi/v1/samplers": "Samplers, as A1111's clients read them.",
    "/sdapi/v1/schedulers": "Sigma schedules, as A1111's clients read them.",
    "/sdapi/v1/sd-models": "Models, as A1111's clients read them.",
    "/sdapi/v1/loras": "Adapters, as A1111's clients read them.",
    "/sdapi/v1/embeddings": "Embeddings, as A1111's clients read them.",
    "/controlnet/model_list": "ControlNets that requests may name, as A1111's clients read them.",
    "/controlnet/module_list": "Ways to prepare a control image, as A1111's clients read them.",
    "/sdapi/v1/sd-vae": "VAEs that requests may name, as A1111's clients read them.",
    "/health": "Whether the server works: 503 when its engine is dead or makes no progress.",
    "/ready": "Whether it can generate.",
    "/metrics": "Prometheus metrics.",
}
_HISTORY = {
    (
        "/api/images",
        "get",
    ): "Images in the folder of `canvax ui`, 60 at a time, newest first; `after` is `next` of the answer before.",
    ("/api/left-out", "get"): "Files in the folder of models that cannot be used, with the reason and the cure.",
    ("/api/images/{name}", "get"): "One of these images.",
    ("/api/images/{name}", "delete"): "Move it into the folder `deleted`. The answer has its `name` there.",
    ("/api/images/{name}", "post"): "Move it back, by its name in `deleted`. The answer has its `name` then.",
}
"""What a server with a page over a folder of images has as well."""
_NUMBERS = ("index",)


def description(bodies: Mapping[str, type[Struct]], *, history: bool = False) -> dict[str, Any]:
    """An OpenAPI 3.1 document.

    Args:
        bodies: the record that checks what is posted to each path.
        history: whether the server shows a folder of images.
    """
    schemas, components = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    for component in components.values():
        if "options" in component.get("properties", {}):  # a plain table for msgspec: canvax.Options checks it
            component["properties"]["options"] = {"anyOf": [{"$ref": "#/components/schemas/Options"}, {"type": "null"}]}
    components["Options"] = json_schema(OptionRecord, "server")
    paths: dict[str, Any] = {}
    for (path, body), schema in zip(bodies.items(), schemas, strict=True):
        kind = "multipart/form-data" if path in _FORMS else "application/json"
        posted = _operation(
            _POSTS.get(path, (body.__doc__ or "").split("\n")[0]), path, "202" if path in _ACCEPTED else "200"
        )
        schema = {"allOf": [schema, _FILES]} if path in _FORMS else schema
        posted["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
        paths[path] = {"post": posted}
    for path, what in _BYTES.items():
        posted = _operation(what, path, "200")
        posted["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
        paths[path] = {"post": posted}
    for path, what in _BARE.items():
        paths[path] = {"post": _operation(what, path, "200")}
    for path, what in _GETS.items():
        paths.setdefault(path, {})["get"] = _operation(what, path, "200")
    paths["/api/jobs/{name}"]["delete"] = _operation("Cancel a job.", "/api/jobs/{name}", "200")
    for (path, method), what in _HISTORY.items() if history else ():
        paths.setdefault(path, {})[method] = _operation(what, path, "200")
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "canvax", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
        "security": [{"key": []}, {}],
    }


def _operation(what: str, path: str, good: str) -> dict[str, Any]:
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    answers = {good: {"description": "Done."}} | {code: {"description": text} for code, text in _ERRORS.items()}
    return {"summary": what, "parameters": list(_parameters(named)), "responses": answers}


def _parameters(names: Iterable[str]) -> Iterable[dict[str, Any]]:
    for name in names:
        kind = {"type": "integer", "minimum": 0} if name in _NUMBERS else {"type": "string"}
        yield {"name": name, "in": "path", "required": True, "schema": kind}
