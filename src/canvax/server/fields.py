"""The limits of settings as msgspec checks them in the bodies of all APIs: those of ``canvax.call``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from canvax.call import MAX_SIDE, MOST_GUIDANCE, Call
from canvax.settings import declared

_STRENGTH = declared(Call)["strength"].setting

Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]
SideOrNone = Annotated[int, Meta(ge=-1, le=MAX_SIDE)]
"""0 and -1 are A1111's words for none."""
Steps = Annotated[int, Meta(ge=1, le=10_000)]
"""``work.check`` refuses more than a job may have."""
Scale = Annotated[float, Meta(ge=0, le=MOST_GUIDANCE)]
Fraction = Annotated[float, Meta(ge=_STRENGTH.low, le=_STRENGTH.high)]
Seed = Annotated[int, Meta(ge=-1)]
