"""Buckets of aspect ratios: images of other shapes are trained at sizes of about the same area (NovelAI 2022).

All samples of an update have the size of one bucket. Sizes and the choice of a bucket are those of kohya's trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from canvax.errors import InputError, check_count
from canvax.train.pictures import Size
from canvax.types import HostArray


def bucket_sizes(size: int, step: int = 64, least: int | None = None, most: int | None = None) -> list[Size]:
    """Return the sizes of all buckets: sides divisible by ``step``, of ``size`` x ``size`` pixels at most.

    Args:
        size: side of the square bucket.
        step: divisor of all sides.
        least: the shortest side, by default half of ``size``.
        most: the longest side, by default twice ``size``.

    Raises:
        InputError: no bucket has such sides.
    """
    for name, value in {"size": size, "bucket_step": step}.items():
        check_count(name, value)
    least, most = least or size // 2, most or 2 * size
    square = size - size % step
    if not square or least > square or most < square:
        problem = f"leaves no bucket of {size} x {size} pixels, with sides of {least} to {most} divisible by {step}"
        raise InputError("buckets", problem, cure="give other {bucket_min}, {bucket_max} or {bucket_step}", value=True)
    found = {(square, square)}
    for long in range(-(-least // step) * step, most + 1, step):
        short = min(most, size * size // long)
        short -= short % step
        if short >= least:
            found |= {(short, long), (long, short)}
    return sorted(found)


def nearest_bucket(sides: Size, sizes: Sequence[Size]) -> Size:
    """Return the size whose width / height is nearest to that of an image of ``sides`` (height, width)."""
    if sides in sizes:
        return sides
    height, width = sides
    return min(sizes, key=lambda size: (abs(size[1] / size[0] - width / height), size))


def bucket_of_update(seed: int, update: int, batch: int, counts: Sequence[int]) -> tuple[int, int]:
    """Return the bucket of an update, and how many earlier updates had this bucket.

    An epoch has as many updates of a bucket as its samples fill; samples that are left over count in the next epoch.
    So all samples come equally often. The updates of an epoch are in random order, a function of seed and epoch.

    Args:
        seed: seed of the run.
        update: number of updates before this one.
        batch: samples of an update.
        counts: samples of each bucket in an epoch.
    """
    check_count("batch", batch)
    if not counts or min(counts) < 1 or update < 0 or seed < 0:
        raise InputError("counts", f"with seed={seed}, update={update}: a bucket without samples", value=counts)
    epoch = update * batch // sum(counts)
    while sum((epoch + 1) * count // batch for count in counts) <= update:
        epoch += 1
    done = [epoch * count // batch for count in counts]
    order = _epoch_order(seed, epoch, batch, tuple(counts))
    position = update - sum(done)
    bucket = int(order[position])
    return bucket, done[bucket] + int((order[:position] == bucket).sum())


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, batch: int, counts: tuple[int, ...]) -> HostArray:
    """Return the bucket of each update of an epoch, int32."""
    updates = [(epoch + 1) * count // batch - epoch * count // batch for count in counts]
    random = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 1, 0]))
    return random.permutation(np.repeat(np.arange(len(counts), dtype=np.int32), updates))


def describe_buckets(sizes: Sequence[Size], counts: Sequence[int]) -> str:
    """Return how many images each bucket has: "3 buckets (width x height): 64 x 96 (12), ..."."""
    of_each = ", ".join(f"{width} x {height} ({count})" for (height, width), count in zip(sizes, counts, strict=True))
    return f"{len(sizes)} buckets (width x height): {of_each}"
