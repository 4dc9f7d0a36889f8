"""How well a model draws what it was told: the nearest true drawing to each of its pictures.

Pictures are compared at 32 x 32 pixels after a 3 x 3 binomial blur, by squared differences, where the picture may lie a
pixel off: a drawing is the same drawing a little to the side. :func:`check_measure` says how far to trust that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from canvax.errors import InputError
from canvax.pipelines.pipeline import StableDiffusion
from canvax.train.pictures import Pictures
from canvax.types import HostArray
from recipes.emoji.captions import plain_caption

SIDE = 32
REACH = 1


@dataclass(frozen=True)
class Score:
    """How many of a set of pictures came nearest to what was asked for.

    Attributes:
        asked: indices of the drawings that were asked for.
        found: index of the drawing that each picture came nearest to.
        concepts: share of right concepts, in whatever style.
        both: share of right concepts in the right style.
        pictures: [N, H, W, 3] float32 in 0..1, what was drawn.
    """

    asked: HostArray
    found: HostArray
    concepts: float
    both: float
    pictures: HostArray

    def __str__(self) -> str:
        return f"{len(self.asked)} pictures: concept {self.concepts:.1%}, concept and style {self.both:.1%}"


def draw_and_score(
    pipe: StableDiffusion,
    drawings: Pictures,
    asked: Sequence[int],
    *,
    seed: int = 0,
    batch: int = 16,
    progress: Callable[[str], None] = lambda _: None,
    **keywords: object,
) -> Score:
    """Draw the plain caption of each drawing in ``asked``, picture i with seed ``seed + i``, and find the nearest.

    Args:
        pipe: the model.
        drawings: all true drawings, with columns ``label`` and ``style``.
        asked: which of them to ask for.
        seed: of the first picture.
        batch: pictures drawn at once.
        progress: told how far it is.
        keywords: more arguments of the pipeline: steps, guidance, sampler, options.
    """
    prompts = [plain_caption(drawings.rows[i]["label"], drawings.rows[i]["style"]) for i in asked]
    parts = []
    for start in range(0, len(asked), batch):
        texts = prompts[start : start + batch]
        seeds = list(range(seed + start, seed + start + len(texts)))
        missing = batch - len(texts)  # one size of batch is one compilation
        result = pipe(texts + texts[-1:] * missing, seed=seeds + seeds[-1:] * missing, **keywords)  # type: ignore[arg-type]
        parts.append(result.pixels[: len(texts)])
        progress(f"{start + len(texts)} of {len(prompts)} pictures")
    return score(np.concatenate(parts), asked, drawings)


def score(pictures: HostArray, asked: Sequence[int], drawings: Pictures) -> Score:
    """Compare pictures [N, H, W, 3] in 0..1 with what was asked for."""
    found = nearest(pictures, drawings.pixels)
    labels = np.asarray([row["label"] for row in drawings.rows])
    wanted = np.asarray(asked)
    concepts = (labels[found] == labels[wanted]).mean()
    return Score(wanted, found, float(concepts), float((found == wanted).mean()), pictures)


def nearest(pictures: HostArray, drawings: HostArray) -> HostArray:
    """Index of the nearest of ``drawings`` [M, H, W, 3] uint8 to each of ``pictures`` [N, H, W, 3] in 0..1."""
    true = _features(drawings.astype(np.float32) / 255, (0, 0))
    lengths = np.square(true).sum(1)
    distances = np.full((len(pictures), len(true)), np.inf, np.float32)
    for i in range(-REACH, REACH + 1):
        for j in range(-REACH, REACH + 1):
            drawn = _features(pictures, (i, j))
            distance = np.square(drawn).sum(1)[:, None] + lengths - 2 * drawn @ true.T
            distances = np.minimum(distances, distance)
    return distances.argmin(1)


def check_measure(drawings: Pictures, asked: Sequence[int], *, seed: int = 0) -> dict[str, Score]:
    """The measure on true drawings that were spoiled in known ways; a good one finds nearly all of them."""
    pixels = drawings.pixels[list(asked)].astype(np.float32) / 255
    rng = np.random.Generator(np.random.Philox(seed))
    noise = rng.standard_normal(pixels.shape, np.float32)
    unit = pixels.shape[1] // SIDE
    spoiled = {
        "as they are": pixels,
        "noise of 0.1": np.clip(pixels + 0.1 * noise, 0, 1),
        "noise of 0.3": np.clip(pixels + 0.3 * noise, 0, 1),
        "paler by a fifth": 0.2 + 0.8 * pixels,
        "moved by 1/32": np.roll(pixels, (unit, -unit), axis=(1, 2)),
        "moved by 1/16": np.roll(pixels, (2 * unit, -2 * unit), axis=(1, 2)),
    }
    return {name: score(pictures, asked, drawings) for name, pictures in spoiled.items()}


def choose_pairs(drawings: Pictures, trained: int, held_out: int | None = None) -> tuple[list[int], list[int]]:
    """Indices of a fixed random choice of trained pairs, and of the held-out ones (all of them for None)."""
    order = np.random.Generator(np.random.Philox(7)).permutation(len(drawings))
    split = {name: [int(i) for i in order if drawings.rows[i].get("split") == name] for name in ("train", "test")}
    return split["train"][:trained], split["test"][:held_out]


def _features(pictures: HostArray, shift: tuple[int, int]) -> HostArray:
    """[N, 32 * 32 * 3] float32: reduced, blurred, moved by whole small pixels; the rim is repeated."""
    n, height, width, _ = pictures.shape
    if height % SIDE or width % SIDE:
        raise InputError(f"pictures of {height} x {width} pixels cannot be compared; both must be divisible by {SIDE}")
    small = pictures.reshape(n, SIDE, height // SIDE, SIDE, width // SIDE, 3).mean((2, 4))
    pad = REACH + 1
    padded = np.pad(small, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="edge")
    rows = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    blurred = (rows[:, :, :-2] + 2 * rows[:, :, 1:-1] + rows[:, :, 2:]) / 16
    i, j = REACH + shift[0], REACH + shift[1]
    return blurred[:, i : i + SIDE, j : j + SIDE].reshape(n, -1)
