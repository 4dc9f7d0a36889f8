"""How well a model draws what it was told: the nearest true drawing to each of its pictures.

Pictures are compared at 32 x 32 pixels after a 3 x 3 binomial blur, by squared differences, where the picture may lie a
pixel off, or be mirrored: it is the same drawing. :func:`check_measure` says how far to trust that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from canvax.errors import InputError
from canvax.pipelines.pipeline import Pipeline
from canvax.train.pictures import Pictures
from canvax.types import HostArray
from recipes.emoji.captions import plain_caption
from recipes.emoji.enlarge import reduced
from recipes.emoji.variations import main_colour, places, recoloured

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
    pipe: Pipeline,
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
    return score(draw(pipe, prompts, seed=seed, batch=batch, progress=progress, **keywords), asked, drawings)


def draw(
    pipe: Pipeline,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    batch: int = 16,
    progress: Callable[[str], None] = lambda _: None,
    **keywords: object,
) -> HostArray:
    """A picture of each prompt, [N, H, W, 3] float32 in 0..1; picture i has seed ``seed + i``."""
    parts = []
    for start in range(0, len(prompts), batch):
        texts = prompts[start : start + batch]
        seeds = list(range(seed + start, seed + start + len(texts)))
        missing = batch - len(texts)  # one size of batch is one compilation
        result = pipe(texts + texts[-1:] * missing, seed=seeds + seeds[-1:] * missing, **keywords)  # type: ignore[arg-type]
        parts.append(result.pixels[: len(texts)])
        progress(f"{start + len(texts)} of {len(prompts)} pictures")
    return np.concatenate(parts)


def score(pictures: HostArray, asked: Sequence[int], drawings: Pictures) -> Score:
    """Compare pictures [N, H, W, 3] in 0..1 with what was asked for."""
    found = nearest(pictures, drawings.pixels)
    labels = np.asarray([row["label"] for row in drawings.rows])
    wanted = np.asarray(asked)
    concepts = (labels[found] == labels[wanted]).mean()
    return Score(wanted, found, float(concepts), float((found == wanted).mean()), pictures)


def nearest(pictures: HostArray, drawings: HostArray) -> HostArray:
    """Index of the nearest of ``drawings`` [M, H, W, 3] uint8 to each of ``pictures`` [N, H, W, 3] in 0..1."""
    parts = np.array_split(drawings, -(-len(drawings) // 256))
    true = np.concatenate([_features(part.astype(np.float32) / 255, (0, 0)) for part in parts])
    lengths = np.square(true).sum(1)
    distances = np.full((len(pictures), len(true)), np.inf, np.float32)
    for i in range(-REACH, REACH + 1):
        for j in range(-REACH, REACH + 1):
            for form in (pictures, pictures[:, :, ::-1]):
                drawn = _features(form, (i, j))
                distance = np.square(drawn).sum(1)[:, None] + lengths - 2 * drawn @ true.T
                distances = np.minimum(distances, distance)
    return distances.argmin(1)


def score_colours(pictures: HostArray, asked: Sequence[tuple[int, str]], drawings: Pictures) -> tuple[float, float]:
    """Shares of pictures in the colour that was asked for, and of those that also show the right thing.

    Args:
        pictures: [N, H, W, 3] float32 in 0..1.
        asked: the drawing and the colour of each.
        drawings: all true drawings. They are compared in the colour that was asked for, if they can have it.
    """
    mains = [main_colour(pixels) for pixels in drawings.pixels]
    small = reduced(drawings.pixels, max(1, drawings.pixels.shape[1] // 64))
    in_colour = np.zeros(len(asked), bool)
    right = np.zeros(len(asked), bool)
    for colour in {colour for _, colour in asked}:
        coloured = [
            pixels if main is None or main.name == colour else recoloured(pixels, main, colour)
            for pixels, main in zip(small, mains, strict=True)
        ]
        which = [i for i, (_, wanted) in enumerate(asked) if wanted == colour]
        found = nearest(pictures[which], np.stack(coloured))
        for i, index in zip(which, found, strict=True):
            main = main_colour((255 * pictures[i] + 0.5).astype(np.uint8))
            in_colour[i] = main is not None and main.name == colour
            right[i] = in_colour[i] and _label(drawings, index) == _label(drawings, asked[i][0])
    return float(in_colour.mean()), float(right.mean())


def score_places(pictures: HostArray, asked: Sequence[Sequence[int]], drawings: Pictures) -> tuple[float, float]:
    """Shares of places where the right thing is, and of pictures where it is at all places.

    Args:
        pictures: [N, H, W, 3] float32 in 0..1.
        asked: the drawings of each picture, as :func:`~recipes.emoji.variations.side_by_side` places them.
        drawings: all true drawings.
    """
    half = pictures.shape[1] // 2
    corners = [(i, place) for i, wanted in enumerate(asked) for place in places(len(wanted), 2 * half)]
    parts = [pictures[i, top : top + half, left : left + half] for i, (top, left) in corners]
    found = nearest(np.stack(parts), drawings.pixels)
    wanted = [index for of_one in asked for index in of_one]
    right = np.array([_label(drawings, a) == _label(drawings, b) for a, b in zip(found, wanted, strict=True)])
    owner = np.array([i for i, _ in corners])
    return float(right.mean()), float(np.mean([right[owner == i].all() for i in range(len(asked))]))


def spread(pictures: HostArray) -> float:
    """Mean distance between pictures of a prompt with other seeds [P, S, H, W, 3], in the metric of :func:`nearest`."""
    distances = []
    for of_prompt in pictures:
        features = _features(of_prompt, (0, 0))
        apart = np.sqrt(np.square(features[:, None] - features).mean(-1))
        distances.append(apart[np.triu_indices(len(apart), 1)].mean())
    return float(np.mean(distances))


def _label(drawings: Pictures, index: int) -> str:
    return str(drawings.rows[index]["label"])


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
