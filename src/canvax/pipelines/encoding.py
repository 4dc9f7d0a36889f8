"""Texts on the devices: read by each encoder, encoded in one program, joined, brought to one length.

Long and weighted prompts of CLIP take several passes, whose outputs the host mixes. So no syntax, weight or schedule
compiles the encoders again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np

from canvax.compile.kinds import DENOISERS, Ready
from canvax.compile.programs import Programs
from canvax.denoise import InFlight
from canvax.engine.batch import Prompts, filled
from canvax.families.base import Model
from canvax.models.text import Conditions, Passes, TextEncoders, TextInputs, check_read
from canvax.parallel.mesh import over_batch, padded_batch
from canvax.parallel.place import put
from canvax.params import Params
from canvax.pipelines.request import Request
from canvax.pipelines.texts import Wording
from canvax.samplers import SamplerTable


def passes_of(model: Model, wordings: Sequence[Wording], lengths: Sequence[int]) -> list[Passes]:
    """Return how each text encoder encodes prompts that are brought to ``lengths``."""
    each = zip(model.text.encoders, zip(*wordings, strict=True), lengths, strict=True)
    return [encoder.passes(model.tokenizers[encoder.component], words, length) for encoder, words, length in each]


def is_one_pass(passes: Sequence[Passes]) -> bool:
    """Return True if the denoiser reads the program's output without mixing."""
    return all(each.mix is None for each in passes)


def runs_of(passes: Sequence[Passes]) -> int:
    """Return how often the program of the text encoders runs for some prompts."""
    return max(len(each.inputs) for each in passes)


def inputs_of(text: TextEncoders, passes: Sequence[Passes], number: int = 0) -> TextInputs:
    """Return what the text encoders read in a pass; those with fewer passes repeat their last one."""
    each = zip(text.names, passes, strict=True)
    return {name: mine.inputs[min(number, len(mine.inputs) - 1)] for name, mine in each}


def mixed(
    text: TextEncoders,
    passes: Sequence[Passes],
    encode: Callable[[TextInputs], Sequence[Mapping[str, Any]]],
    rows: Sequence[int],
) -> Mapping[str, Any]:
    """Encode prompts in several passes, mix these, and join the encoders' outputs.

    Args:
        text: the encoders.
        passes: the passes of each encoder.
        encode: returns the outputs of each encoder for the prompts at ``rows``, as arrays of this process.
        rows: indices of prompts.
    """
    outputs = [encode(inputs_of(text, passes, number)) for number in range(runs_of(passes))]
    joined: list[Mapping[str, Any]] = []
    for i, each in enumerate(passes):
        mine = [output[i] for output in outputs[: len(each.inputs)]]
        changed = {"text": each.mix([output["text"] for output in mine], rows)} if each.mix else {}
        joined.append({**mine[0], **changed})
    return text.join(joined)


class Encoded(NamedTuple):
    """The conditions of the images of a call, on the devices.

    Attributes:
        first: at the beginning.
        later: by the row from which they hold.
    """

    first: Prompts
    later: dict[int, Prompts]


def flight_of(ready: Ready) -> InFlight:
    """Return the shapes of a batch's state, as the denoiser reads it."""
    denoiser = next(ready[name] for name in DENOISERS.values() if name in ready)
    return denoiser.program.inputs[0].flight


def encode(
    model: Model, ready: Ready, params: Params, programs: Programs, request: Request, table: SamplerTable
) -> Encoded:
    """Return the conditions of the prompt and of the negative prompt of each image, for each part of the run."""
    split, text, lengths, count = over_batch(programs.mesh), model.text, request.lengths, len(request.prompts)
    batch = padded_batch(count, programs.mesh)
    declared = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ready["text encoder"].program.inputs[0]
    )
    shapes = flight_of(ready).prompts[0]
    shares = () if request.beside is None else ({name: request.beside.weights[name] for name in text.names},)
    numbers = model.size_conditions(request.height, request.width, request.options.changed())
    steps = table.step - (request.init_images.skipped if request.init_images else 0)
    # Of the stages that begin at or before the first row, the last one holds.
    stages = {int(np.argmax(steps >= stage.step)): stage for stage in request.texts.stages if stage.step <= steps[-1]}
    halves = {
        row: [(stage.negatives, True)] * request.guided + [(part, False) for part in stage.parts]
        for row, stage in stages.items()
    }

    def features(texts: Sequence[list[Wording]]) -> Iterator[Mapping[str, Any]]:
        """Yield the features of each text. All are encoded together, and equal ones once."""
        plans = [passes_of(model, wordings, lengths) for wordings in texts]
        inputs = [inputs_of(text, passes, number) for passes in plans for number in range(runs_of(passes))]
        for each in inputs:
            check_read(text, each, declared)
        all_shares = jax.tree.map(lambda array: np.tile(array, (len(inputs), 1)), shares)
        stacked = jax.tree.map(lambda *arrays: np.concatenate(arrays), *inputs)
        rows = iter(programs.features(ready["text encoder"], params, stacked, *all_shares))
        for passes in plans:
            yield mixed(text, passes, lambda _: _stacked([*islice(rows, count)]), range(count))

    def is_read(negative: bool) -> bool:
        return request.embeds[negative] is None and not (negative and request.zeros)

    read = features([wordings for half in halves.values() for wordings, negative in half if is_read(negative)])

    def conditions_for(negative: bool) -> Conditions:
        arrays: Mapping[str, Any]
        if (embeds := request.embeds[negative]) is not None:
            arrays = {name: _padded(array, shapes[name].shape) for name, array in embeds.items() if name != "text"}
            arrays |= {"text": text.lengthened(embeds["text"], lengths)}
        elif not is_read(negative):
            names = text.conditions(1, [np.float32] * len(text.encoders))
            arrays = {name: np.zeros(shapes[name].shape, shapes[name].dtype) for name in names}
        else:
            arrays = next(read)
        conditions = {
            name: put(filled(array.astype(shapes[name].dtype), batch), split) for name, array in arrays.items()
        }
        if model.networks.embeds_guidance:
            conditions["guidance"] = put(np.full(batch, request.guidance, np.float32), split)
        sizes = {name: np.tile(row, (batch, *(1 for _ in row.shape))) for name, row in numbers[negative].items()}
        return conditions | {name: put(array, split) for name, array in sizes.items()}

    made = {row: tuple(conditions_for(negative) for _, negative in half) for row, half in halves.items()}
    return Encoded(made.pop(0), made)


def _padded(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return an array [n, ...] with zeros, or False, up to a shape [B, ...]."""
    return np.pad(array, [(0, 0), *((0, want - size) for size, want in zip(array.shape[1:], shape[1:], strict=True))])


def _stacked(rows: Sequence[tuple[Any, Any]]) -> Any:
    """Return the outputs of each encoder for several texts, from those of the program for each text."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *(outputs for _, outputs in rows))
