"""What tests assert of an error: its type and its argument. Its wording is in ``golden/errors.txt``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from canvax.errors import InputError


@contextmanager
def refused(*arguments: str) -> Iterator[None]:
    """Expect an ``InputError`` about one of these arguments; one about several names them in its sentence."""
    with pytest.raises(InputError) as caught:
        yield
    error = caught.value
    named = error.argument in arguments if error.argument else any(name in str(error) for name in arguments)
    assert named, f"{error.argument}: {error}"
