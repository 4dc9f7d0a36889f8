"""The limits of settings as msgspec checks them in the bodies of all APIs: those of ``canvax.call``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from canvax.call import MAX_SIDE, Call, Enlarging
from canvax.settings import declared


def _limits(name: str, record: type = Call) -> Meta:
    setting = declared(record)[name].setting
    return Meta(**{"gt" if setting.above else "ge": setting.low, "le": setting.high})  # type: ignore[arg-type]


Side = Annotated[int, _limits("height")]
SideOrNone = Annotated[int, Meta(ge=-1, le=MAX_SIDE)]
"""0 and -1 are A1111's words for none."""
Steps = Annotated[int, _limits("num_inference_steps")]
"""``work.check`` refuses more than a job may have."""
Scale = Annotated[float, _limits("guidance_scale")]
Strength = Annotated[float, _limits("strength")]
Times = Annotated[float, _limits("scale", Enlarging)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=_limits("seed").ge)]
"""Larger ones than JSON's integers are refused by ``check_seed``."""
