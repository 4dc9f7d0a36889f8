"""The limits of settings as msgspec checks them in the bodies of all APIs: those of ``canvax.call``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from canvax.call import Call
from canvax.settings import declared


def _limits(name: str) -> Meta:
    setting = declared(Call)[name].setting
    return Meta(**{"gt" if setting.above else "ge": setting.low, "le": setting.high})  # type: ignore[arg-type]


Side = Annotated[int, _limits("height")]
SideOrNone = Annotated[int, Meta(ge=-1, le=_limits("height").le)]
"""0 and -1 are A1111's words for none."""
Steps = Annotated[int, Meta(ge=1, le=10_000)]
"""``work.check`` refuses more than a job may have."""
Scale = Annotated[float, _limits("guidance_scale")]
Strength = Annotated[float, _limits("strength")]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=_limits("seed").ge)]
"""Larger ones than JSON's integers are refused by ``check_seed``."""
