"""What a request most likely does not mean, as warnings; it is carried out all the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from canvax import settings
from canvax.errors import HintWarning, InputError, warn
from canvax.families.base import Model
from canvax.pipelines.given import Given
from canvax.pipelines.hires import larger_side
from canvax.pipelines.request import Request
from canvax.pipelines.text_to_image import sampler_table, work
from canvax.prompts import words_of
from canvax.samplers import find
from canvax.samplers.options import SPACINGS
from canvax.samplers.table import NOISE

FAR = 2.0
"""Times as many pixels as a model was trained for, or as few, from which images suffer."""

ODD = 5.0
"""Times as much spread as noise has, or as little, that it has not even where an inversion of few steps made it."""

BURNT = 50
"""A guidance scale beyond all use."""

LISTED = 5
OF_NOISE = {"s_noise", "s_tmin", "s_tmax"}
"""Settings of a sampler that say how much of the noise that it adds, and when."""

_WEIGHT = re.compile(r"\([^()]{1,80}:[0-9.]{1,8}\)")
_WORDS = re.compile(
    r"\b(?:AND|BREAK)\b|\(\([^()]{1,80}\)\)|\[\[[^][]{1,80}\]\]|\[[^][|]{0,80}:\d*\.?\d+\]|\[[^][|]{1,80}(?:\|[^][|]{1,80})+\]"
)
"""What A1111 reads as more than words, beside weights."""
_COMPEL = re.compile(r"(?<![\w+-])[^\W\d_]{2,40}(?:\+\+|--)+(?=[\s,.)]|$)")
_NETWORK = re.compile(r"<(?:lora|lyco|hypernet):[^<>]{1,80}>", re.IGNORECASE)
_WORD = re.compile(r"<[^\s<>:|=-][^\s<>:|]{0,40}>|\bembedding:[^\s,()<>\[\]:]{1,80}", re.IGNORECASE)
"""How the words of textual inversions are mostly written, and ComfyUI's way to name their files."""


def give_hints(model: Model, request: Request) -> None:
    """Warn of what ``hints`` finds."""
    for hint in hints(model, request):
        warn(hint, HintWarning)


def _there(model: Model, request: Request) -> dict[str, tuple[bool, str]]:
    """Whether the conditions that options need hold, with words for each."""
    options, given, again = request.options, request.given, request.options.hires > 1
    again = again and options.hires_method == "pixel"  # the second pass encodes the first one's image
    own = options.settings.get("timesteps") is not None or isinstance(options.sigmas, tuple)
    placing = "the curve of sigmas" if options.sigmas or _has_curve(request) else "the sampler"
    placed = "sigmas or timesteps already fix" if own else f"{placing} already fixes"
    texts = not all(embeds is not None for embeds in request.embeds[: 1 + request.guided])
    anew = given is not None and given.from_noise and options.mask_fill in ("noise", "nothing")
    return {
        "free spacing": (not own and not _is_placed(model, request), f"steps to place, which {placed}"),
        "seed's noise": (request.latents is None, "a seed's noise, in place of which there are latents"),
        "text": (texts, "a prompt as text"),
        "prompt as text": (request.embeds[0] is None, "a prompt as text"),
        "negative prompt as text": (request.embeds[1] is None, "a negative prompt as text"),
        "guidance": (request.guided, "a guidance scale above 1"),
        "image": (given is not None, "an image"),
        "encoded image": (given is not None or again, "an image"),
        "strength below 1": (given is None or given.strength < 1, "a strength below 1"),
        "kept image": (again or not _forgets(given), "a strength below 1 or a mask"),
        "mask": (bool(given and given.masks), "a mask"),
        "mask over the image": (not anew, "a strength below 1, since the masked part begins from noise alone"),
    }


def _forgets(given: Given | None) -> bool:
    """Whether the run owes nothing to the image: it begins from noise, and no mask keeps a part."""
    return given is not None and given.strength == 1 and not given.masks


def _has_curve(request: Request) -> bool:
    """Whether the sampler's name says a curve of sigmas."""
    return request.sampler is not None and "sigmas" in find(request.sampler)[1]


def _is_placed(model: Model, request: Request) -> bool:
    """Whether a curve of sigmas or the sampler leaves ``spacing`` nothing to do; of some a curve has the two ends."""
    options = request.options
    if options.spacing is None:
        return False
    each = (replace(request, options=replace(options, spacing=spacing)) for spacing in SPACINGS)
    try:
        one, *others = (sampler_table(model, call) for call in each)
    except InputError:  # of a spacing that nobody asked for
        return False
    return all(np.array_equal(one.timestep, other.timestep) and np.array_equal(one.M, other.M) for other in others)


def _odd_spread(request: Request) -> float | None:
    """The standard deviation of noise that is none, such as that of diffusers' Euler, times its first sigma."""
    inverts = request.sampler is not None and find(request.sampler)[0].name == "ddim_inverse"
    if request.latents is None or inverts or request.options.denoising_start > 0:
        return None
    spreads = [float(np.std(one)) for one in request.latents]
    return next((one for one in spreads if not 1 / ODD <= one <= ODD), None)


def idle(model: Model, request: Request) -> Iterator[tuple[str, list[str]]]:
    """Options that change nothing, beside what they would need."""
    there = _there(model, request)
    found: dict[str, list[str]] = {}
    for name, needed in settings.idle(request.options, {name: holds for name, (holds, _) in there.items()}):
        found.setdefault(there[needed][1] if needed in there else needed, []).append(name)
    yield from found.items()
    of_noise = sorted(request.options.settings.keys() & OF_NOISE)
    if of_noise and not sampler_table(model, request).M[:, :, NOISE].any():
        yield "noise that the sampler adds, as s_churn or eta tell it", [f"sampler_settings: {', '.join(of_noise)}"]


def hints(model: Model, request: Request) -> Iterator[str]:
    """One sentence for each kind of thing."""
    prompts, syntax = dict.fromkeys(request.prompts), request.options.prompt_syntax
    words = (words_of(prompt, syntax) for prompt in prompts)
    added = {name for tokenizer in model.tokenizers.values() for name in tokenizer.added}
    strange = dict.fromkeys(word for text in words for word in model.concepts.unknown(text))
    known = {part for name in added for part in name.lower().split()}
    if unknown := [word for word in strange if word not in known]:
        more = f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
        yield (
            f"{model.name} has never seen: {', '.join(unknown[:LISTED])}{more}; "
            f"canvax info {model.name} --prompts lists what it knows"
        )
    (tall, wide), pixels = model.native_size, request.height * request.width
    if not tall * wide / FAR <= pixels <= tall * wide * FAR:
        wrong = "repeat themselves" if pixels > tall * wide else "are poor"
        yield (
            f"{model.name} was trained for {wide} x {tall} pixels; images of {request.width} x {request.height} {wrong}"
        )
    if request.options.reuse > 1 and work(model, request)[1] is None:
        yield f"reuse={request.options.reuse} in so few steps: the first two compute everything, so it changes nothing"
    for needed, names in idle(model, request):
        yield f"{', '.join(names)} without {needed}: changes nothing"
    wording = sorted(request.options.changed().keys() & {"prompt_syntax", "clip_skip"})
    if wording and request.embeds[0] is not None and request.embeds[1] is None and request.guided:
        yield f"{', '.join(wording)} beside an encoded prompt: acts on the negative prompt alone"
    if request.guidance < 0 and not (request.guided or request.embedded or request.options.guidance_steps):
        yield f"a guidance scale of {request.guidance:g} switches guidance off, as 1 does; {_usual(model)} is usual"
    if request.guidance > BURNT and not request.options.guidance_steps:
        yield f"a guidance scale of {request.guidance:g} burns the image; {_usual(model)} is usual"
    if request.options.guidance_steps and request.guidance != model.defaults.guidance_scale:
        yield f"guidance_scale={request.guidance:g} beside guidance_steps, which replace it: changes nothing"
    if _forgets(request.given):
        yield "a strength of 1 begins from noise alone, and nothing of the image stays; give less, such as 0.6"
    least = 128 if request.options.mask_mode == "hard" else 1
    if any(np.asarray(mask).max() < least for mask in (request.given.masks if request.given else ())):
        yield "the mask is black, so that nothing is generated and the image stays as it is; what is white is generated"
    if (spread := _odd_spread(request)) is not None:
        yield (
            f"latents have a standard deviation of {spread:.3g}, and the noise a run begins with has 1; give "
            "such noise, or with denoising_start= latents of a run that stopped"
        )
    if not request.guided and not request.embedded and any(request.negatives):
        scale = "guidance_steps" if request.options.guidance_steps else f"a guidance scale of {request.guidance:g}"
        yield f"{scale} reads no negative prompt; give more than 1, or leave it out"
    if request.embedded and any(request.negatives):
        yield f"{model.name} takes the guidance scale as an input and reads no negative prompt"
    times, side = request.options.hires, request.height
    if times > 1 and side * times != (larger := larger_side(model, side, times)):
        yield f"hires={times:g} of {side} pixels makes {larger}: sizes are multiples of {max(8, model.vae.factor)}"
    yield from _of_words(list(prompts), list(filter(None, dict.fromkeys(request.negatives))), syntax, added)


def _of_words(prompts: list[str], negatives: list[str], syntax: str, added: set[str]) -> Iterator[str]:
    """What of the prompts is read as text and hardly meant so; ``added`` are words of textual inversions."""
    if network := _first(_NETWORK, prompts):
        yield (
            f"{network} is read as text: give a folder of adapters, pipe.adapters.folder or --lora-dir, or load "
            "it with pipe.adapters.load"
        )
    texts = [*prompts, *negatives]
    found = dict.fromkeys(match[0] for text in texts for match in _WORD.finditer(text))
    bare = {one: one.lower().removeprefix("embedding:") for one in found}
    if free := [one for one in found if not {bare[one], bare[one].rpartition(".")[0]} & added]:
        yield (
            f"{free[0]} is read as text: no textual inversion of this name is loaded; "
            "pipe.adapters.load_embedding or --embedding loads one"
        )
    if network := _first(_NETWORK, negatives):
        yield f"{network} in the negative prompt is read as text; name adapters in the prompt"
    if syntax == "plain" and (weight := _first(_WEIGHT, texts)):
        yield f"{weight} is read as text; prompt_syntax='a1111' reads it as a weight"
    elif syntax == "plain" and (words := _first(_WORDS, (text for text in texts if not text.isupper()))):
        yield f"{words} is read as text; prompt_syntax='a1111' reads it as A1111 does"
    elif syntax == "plain" and (weight := _first(_COMPEL, texts)):
        yield f"{weight} is read as text; prompt_syntax='compel' reads it as a weight"


def _usual(model: Model) -> str:
    return f"{model.defaults.guidance_scale:g}"


def _first(pattern: re.Pattern[str], texts: Iterable[str]) -> str | None:
    """What matches in the first of the texts in which something does."""
    return next((match[0] for text in texts if (match := pattern.search(text))), None)
