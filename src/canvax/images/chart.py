"""Line charts drawn with Pillow, which is here anyway: enough for curves of noise levels and of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from canvax.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points of each line by its name."""

COLOURS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#e377c2"),
    *("#7f7f7f", "#bcbd22", "#003f5c", "#ff6361", "#000000", "#b5651d", "#008b8b", "#4b0082"),
)
_INK, _FAINT = "#222222", "#dddddd"


def line_chart(
    series: Series,
    *,
    title: str,
    x_label: str,
    y_label: str,
    size: tuple[int, int] = (720, 480),
    log_x: bool = False,
    log_y: bool = False,
) -> Image:
    """A chart of lines with points, axes and a legend. Logarithmic axes leave out what is not positive.

    Raises:
        InputError: there is nothing to draw.
    """
    from PIL import Image, ImageDraw, ImageFont

    lines = {name: _kept(points, log_x, log_y) for name, points in series.items()}
    everything = [point for points in lines.values() for point in points]
    if not everything:
        raise InputError("series has no points that can be drawn")
    image = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    legend = 30 + max(int(draw.textlength(name, font=font)) for name in lines)
    x = _Axis([point[0] for point in everything], 64, size[0] - legend - 16, log_x)
    y = _Axis([point[1] for point in everything], size[1] - 48, 36, log_y)
    for tick, at in x.ticks():
        draw.line((at, y.low, at, y.high), _FAINT)
        draw.text((at, y.low + 8), tick, _INK, font, anchor="ma")
    for tick, at in y.ticks():
        draw.line((x.low, at, x.high, at), _FAINT)
        draw.text((x.low - 8, at), tick, _INK, font, anchor="rm")
    draw.rectangle((x.low, y.high, x.high, y.low), outline=_INK)
    draw.text(((x.low + x.high) / 2, 12), title, _INK, ImageFont.load_default(15), anchor="ma")
    draw.text(((x.low + x.high) / 2, size[1] - 20), x_label, _INK, font, anchor="ma")
    draw.text((8, 16), y_label, _INK, font, anchor="la")
    for i, (name, points) in enumerate(lines.items()):
        _draw_line(draw, [(x.at(a), y.at(b)) for a, b in points], COLOURS[i % len(COLOURS)], i)
        at = y.high + 10 + 18 * i
        _draw_line(draw, [(x.high + 10, at), (x.high + 26, at)], COLOURS[i % len(COLOURS)], i)
        draw.text((x.high + 32, at), name, _INK, font, anchor="lm")
    return image


class _Axis:
    """Where values lie between two pixels."""

    def __init__(self, values: Sequence[float], low: float, high: float, log: bool) -> None:
        self.low, self.high, self.log = low, high, log
        scaled = [self._scale(value) for value in values]
        first, last = min(scaled), max(scaled)
        margin = 0.03 * (last - first) or 0.5
        self.first, self.last = first - margin, last + margin

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.low + (self._scale(value) - self.first) / (self.last - self.first) * (self.high - self.low)

    def ticks(self) -> list[tuple[str, float]]:
        """Round values with their pixels: about five, or the powers of ten."""
        if self.log:
            exponents = range(math.ceil(self.first), math.floor(self.last) + 1)
            values = [10.0**exponent for exponent in exponents]
            if len(values) < 3:
                first, last = math.floor(self.first), math.ceil(self.last)
                values = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
                values = [value for value in values if self.first <= math.log10(value) <= self.last]
        else:
            step = 10.0 ** math.floor(math.log10((self.last - self.first) / 4))
            step *= next(m for m in (1, 2, 5, 10) if (self.last - self.first) / (m * step) <= 7)
            values = [step * n for n in range(math.ceil(self.first / step), math.floor(self.last / step) + 1)]
        return [(f"{value:.4g}", self.at(value)) for value in values]


def _kept(points: Sequence[tuple[float, float]], log_x: bool, log_y: bool) -> list[tuple[float, float]]:
    return [
        (x, y)
        for x, y in points
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    ]


def _draw_line(draw: Any, points: Sequence[tuple[float, float]], colour: str, kind: int) -> None:
    """A line whose points are discs, squares or diamonds, so that it can be told without its colour."""
    draw.line([tuple(point) for point in points], fill=colour, width=2)
    for x, y in points:
        match kind % 3:
            case 0:
                draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
            case 1:
                draw.rectangle((x - 3, y - 3, x + 3, y + 3), fill=colour)
            case _:
                draw.polygon([(x - 4, y), (x, y - 4), (x + 4, y), (x, y + 4)], fill=colour)
