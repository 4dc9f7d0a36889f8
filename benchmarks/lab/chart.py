"""Line charts, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

from matplotlib.figure import Figure
from PIL import Image

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points of each line by its name."""


def line_chart(
    series: Series,
    *,
    title: str,
    x_label: str,
    y_label: str,
    size: tuple[int, int] = (720, 480),
    log_x: bool = False,
    log_y: bool = False,
) -> Image.Image:
    """A chart of lines with points, axes and a legend. Logarithmic axes omit values that are not positive."""
    figure = Figure(figsize=(size[0] / 100, size[1] / 100), dpi=100, layout="constrained")
    axes = figure.subplots()
    for i, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*points, strict=True), label=name, marker="osD"[i % 3], markersize=4)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if log_x:
        axes.set_xscale("log", nonpositive="mask")
    if log_y:
        axes.set_yscale("log", nonpositive="mask")
    axes.grid(alpha=0.4)
    figure.legend(loc="outside right upper")
    file = BytesIO()
    figure.savefig(file, format="png")
    return Image.open(file).convert("RGB")
