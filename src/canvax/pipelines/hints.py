"""Warnings about requests that most likely do not do what was meant; they run all the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from canvax import settings
from canvax.call import STRENGTH
from canvax.errors import HintWarning
from canvax.families.base import Model
from canvax.images.infotext import NETWORK
from canvax.models.clip import clip_configs
from canvax.pipelines.generate import larger_side, sampler_table, work
from canvax.pipelines.request import InitImages, Request, usual_guidance
from canvax.prompts import words_of
from canvax.samplers import find, spec_of
from canvax.samplers.forecast import FEWEST_STEPS, free_slots
from canvax.samplers.solvers import euler
from canvax.samplers.table import NOISE, SamplerTable

FAR = 2.0
"""Images suffer if they have this many times more, or fewer, pixels than the model was trained for."""

ODD = 5.0
"""Latents whose standard deviation differs from 1 by more than this factor are not noise, nor a coarse inversion."""

BURNT = 50
"""A guidance scale above which every image is over-saturated."""

LISTED = 5
OF_NOISE = {"s_noise", "s_tmin", "s_tmax"}
"""Settings of a sampler about the amount and the time of the noise that it adds."""

_WEIGHT = re.compile(r"\([^()]{1,80}:[0-9.]{1,8}\)")
_WORDS = re.compile(
    r"\b(?:AND|BREAK)\b|\(\([^()]{1,80}\)\)|\[\[[^][]{1,80}\]\]|\[[^][|]{0,80}:\d*\.?\d+\]|\[[^][|]{1,80}(?:\|[^][|]{1,80})+\]"
)
"""Syntax of A1111's prompts, except weights."""
_COMPEL = re.compile(r"(?<![\w+-])[^\W\d_]{2,40}(?:\+\+|--)+(?=[\s,.)]|$)")
_LETTERS = re.compile(r"[^\W\d_]+")
_WORD = re.compile(r"<[^\s<>:|=-][^\s<>:|]{0,40}>|\bembedding:[^\s,()<>\[\]:]{1,80}", re.IGNORECASE)
"""The usual spellings of textual inversions in prompts, and ComfyUI's names of their files."""


def _there(model: Model, request: Request) -> dict[str, tuple[bool, str]]:
    """Return whether the conditions of options hold, by name, with the words for those that do not."""
    options, init, again = request.options, request.init_images, request.options.hires > 1
    again = again and options.hires_method == "pixel"  # the second pass encodes the first one's image
    fixed = options.settings.get("timesteps") is not None or isinstance(options.sigmas, tuple)
    texts = not all(embeds is not None for embeds in request.embeds[: 1 + request.guided])
    anew = init is not None and init.from_noise and options.mask_fill in ("noise", "nothing")
    return {
        "free spacing": (not fixed, "without steps to place: sigmas or timesteps fix them"),
        "seed's noise": (request.latents is None, "with latents, which replace a seed's noise"),
        "text": (texts, "without a prompt as text"),
        "prompt as text": (request.embeds[0] is None, "without a prompt as text"),
        "negative prompt as text": (request.embeds[1] is None, "without a negative prompt as text"),
        "guidance": (request.guided, f"without a guidance scale above {request.guidance_off:g}"),
        "image": (init is not None, "without an image"),
        "encoded image": (init is not None or again, "without an image"),
        "strength below 1": (init is None or init.strength < 1, "without a strength below 1"),
        "kept image": (again or not _forgets(init), "without a strength below 1 or a mask"),
        "mask": (bool(init and init.masks), "without a mask"),
        "mask over the image": (not anew, "without a strength below 1, since the masked part begins from noise alone"),
    }


def _forgets(init: InitImages | None) -> bool:
    """Return True if the image has no effect: the run begins from noise alone, and no mask keeps a part."""
    return init is not None and init.strength == 1 and not init.masks


def _odd_spread(request: Request) -> float | None:
    """Return the standard deviation of latents that are not unit noise, such as noise times Euler's first sigma."""
    inverts = isinstance(request.sampler, str) and find(request.sampler)[0].name == "ddim_inverse"
    if request.latents is None or inverts or request.options.denoising_start > 0:
        return None
    spreads = [float(np.std(latent)) for latent in request.latents]
    return next((spread for spread in spreads if not 1 / ODD <= spread <= ODD), None)


def _not_fast(model: Model, request: Request) -> tuple[str, str] | None:
    """Return why no step of a fast request is forecast, with the cure; None if some are."""
    table = sampler_table(model, request)
    if len(table) < len(sampler_table(model, replace(request, options=replace(request.options, quality="full")))):
        return None
    steps, other = request.init_images.steps if request.init_images else request.steps, "try {sampler='dpmpp_2m'}"
    if model.networks.denoiser.facts.flow_map:
        return f"{model.name} was distilled for the length of each step", ""
    if steps < FEWEST_STEPS:
        return f"{steps} steps are fewer than {FEWEST_STEPS}", f"try {{num_inference_steps={FEWEST_STEPS}}}"
    if table.M[:, :, NOISE].any():
        return "the sampler adds noise", other
    if len(np.unique(table.step)) < len(table):
        return "the sampler evaluates twice in a step", other
    if not free_slots(table):
        return "the sampler needs all outputs that it keeps", other
    return "the steps are too few, too long, or the prompt, guidance or control changes too often", ""


def _without_noise(model: Model, request: Request) -> bool:
    """Return True if the sampler adds no noise, and the settings of noise do not change its matrices."""
    rest = {name: value for name, value in request.options.settings.items() if name not in OF_NOISE}
    other = replace(request, options=replace(request.options, sampler_settings=rest))
    rows, before = (sampler_table(model, each).M for each in (request, other))
    return np.array_equal(rows, before) and not rows[:, :, NOISE].any()


def idle(model: Model, request: Request) -> Iterator[HintWarning]:
    """Yield a warning for each option that has no effect, with the condition that is missing."""
    there = _there(model, request)
    for name, needed in settings.idle(request.options, {name: holds for name, (holds, _) in there.items()}):
        needs = there[needed][1] if needed in there else f"without {needed}"
        yield HintWarning(name, f"has no effect {needs}")
    of_noise = sorted(request.options.settings.keys() & OF_NOISE)
    if of_noise and _without_noise(model, request):
        problem = f"has {', '.join(of_noise)}, which has no effect without noise that the sampler adds (s_churn, eta)"
        yield HintWarning("sampler_settings", problem)


def hints(model: Model, request: Request, trained: Iterable[str] = ()) -> Iterator[HintWarning]:
    """Yield one hint for each kind of problem.

    Args:
        model: the model that reads the request.
        request: the request.
        trained: texts that its adapters were trained with.
    """
    prompts, syntax, options = dict.fromkeys(request.prompts), request.options.prompt_syntax, request.options
    words = (words_of(prompt, syntax) for prompt in prompts)
    added = {name for tokenizer in model.tokenizers.values() for name in getattr(tokenizer, "added", ())}
    strange = dict.fromkeys(word for text in words for word in model.concepts.unknown(text))
    known = {part for text in (*added, *(trained if strange else ())) for part in _LETTERS.findall(text.lower())}
    if unknown := [word for word in strange if word not in known]:
        rest = f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
        near = [(word, model.concepts.nearest(word)) for word in unknown[:LISTED]]
        listed = ", ".join(f"{word} (near: {known})" if known else word for word, known in near)
        problem = f"has words that {model.name} has never seen: {listed}{rest}"
        cure = f"canvax info {model.name} --prompts lists what it knows; other pictures need another model"
        yield HintWarning("prompt", problem, cure=cure)
    elif things := next(filter(None, map(model.concepts.things, prompts)), None):
        problem = f"names {' and '.join(things)}, and {model.name} draws one thing in an image"
        yield HintWarning("prompt", problem, cure="name one of them")
    (tall, wide), pixels = model.native_size, request.height * request.width
    if not tall * wide / FAR <= pixels <= tall * wide * FAR:
        wrong = "repeat themselves" if pixels > tall * wide else "are poor"
        yield HintWarning(
            f"{model.name} was trained for {wide} x {tall} pixels; images of {request.width} x {request.height} {wrong}"
        )
    if options.reuse > 1 and work(model, request)[1] is None:
        yield HintWarning(
            "reuse", "has no effect in so few steps: the first two compute everything", value=options.reuse
        )
    if options.quality == "fast" and (problem := _not_fast(model, request)):
        yield HintWarning("quality", f"has no effect: {problem[0]}", cure=problem[1], value="fast")
    yield from idle(model, request)
    if request.embeds[0] is not None and request.embeds[1] is None and request.guided:
        for name in sorted(options.changed().keys() & {"prompt_syntax", "clip_skip"}):
            yield HintWarning(name, "acts on the negative prompt alone, since the prompt is encoded")
    scale, default = request.guidance, usual_guidance(options, model)
    usual = f"{default:g} is usual"
    if scale < 0 and not (request.guided or request.embedded or options.guidance_steps):
        yield HintWarning(
            "guidance_scale", f"switches guidance off, as {request.guidance_off:g} does", cure=usual, value=scale
        )
    if scale > BURNT and not options.guidance_steps:
        yield HintWarning("guidance_scale", "over-saturates the image", cure=usual, value=scale)
    if model.networks.denoiser.facts.distilled and scale > request.guidance_off:
        yield HintWarning(
            "guidance_scale", f"has no effect: {model.name} is distilled and needs no guidance", value=scale
        )
    sampler = model.scheduler.spec if request.sampler is None else request.sampler
    spec = None if isinstance(sampler, SamplerTable) else spec_of(sampler)[0]
    if model.networks.denoiser.facts.flow_map and spec and spec.solver is not euler:
        problem = f"is {spec.label}, and {model.name} was distilled for the steps of Euler"
        yield HintWarning("sampler", problem, cure="leave it out, or take {sampler='flow_euler'}")
    if options.guidance_steps and scale != default:
        yield HintWarning("guidance_scale", "has no effect: guidance_steps replace it", value=scale)
    if _forgets(request.init_images):
        yield HintWarning(
            "strength", "begins from noise alone and keeps nothing of the image", cure="give {strength=0.6}", value=1
        )
    init = request.init_images
    begins = init is not None and init.fingerprints and not init.masks and init.strength == STRENGTH
    if begins and model.networks.controls and request.control is None:
        problem = f"is what the run begins from, at a strength of {STRENGTH:g}; no control network reads it"
        yield HintWarning("image", problem, cure="what such a network reads is {control=image}")
    facts, shown = model.networks.denoiser.facts, bool(init and init.fingerprints) or request.references is not None
    if not shown and (facts.only_edits or model.networks.inpaints):
        task, more = ("edit images", "") if facts.only_edits else ("fill masks in images", " and {mask}")
        yield HintWarning("image", f"is missing: {model.name} was trained to {task}", cure=f"give {{image}}{more}")
    if init is not None and init.fingerprints and not init.masks and model.networks.inpaints:
        problem = f"has no mask: {model.name} was trained to fill masks, and changes the whole image"
        yield HintWarning("image", problem, cure="give {mask}, white where the image is to change")
    least = 128 if options.mask_mode == "hard" else 1
    if any(np.asarray(mask).max() < least for mask in (request.init_images.masks if request.init_images else ())):
        yield HintWarning("mask", "is black, so the image stays as it is", cure="paint white what to generate")
    if (spread := _odd_spread(request)) is not None:
        yield HintWarning(
            "latents",
            f"has a standard deviation of {spread:.3g}, and the noise a run begins with has 1",
            cure="give noise, or with {denoising_start} latents of a run that stopped",
        )
    if not request.guided and not request.embedded and any(request.negatives):
        off = "guidance_steps" if options.guidance_steps else f"a guidance scale of {scale:g}"
        yield HintWarning(
            "negative_prompt",
            f"is not read with {off}",
            cure=f"give more than {request.guidance_off:g}, or leave it out",
        )
    if request.embedded and any(request.negatives):
        problem = f"is not read by {model.name}, which is not guided by one"
        yield HintWarning("negative_prompt", problem)
    times, side = options.hires, request.height
    if times > 1 and side * times != (larger := larger_side(model, side, times)):
        problem = f"makes {larger} of {side} pixels: sizes are multiples of {max(8, model.networks.size_step)}"
        yield HintWarning("hires", problem, value=times)
    negatives = list(filter(None, dict.fromkeys(request.negatives)))
    second = [prompt for prompt in dict.fromkeys(request.hires_prompts) if prompt not in prompts]
    unweighted = "" if clip_configs(model.text) else f"{model.name} reads no weights of words; take them out"
    yield from _of_words(list(prompts), negatives, second, syntax, added, unweighted)


def _of_words(
    prompts: list[str], negatives: list[str], second: list[str], syntax: str, added: set[str], unweighted: str
) -> Iterator[HintWarning]:
    """Yield hints about syntax in the prompts that is read as text, probably by mistake.

    ``second`` are prompts of a second pass; ``added`` are words of textual inversions; ``unweighted`` is the cure for
    weights if the model reads none.
    """

    def as_text(words: str, cure: str, name: str = "prompt") -> HintWarning:
        return HintWarning(name, f"has {words}, which is read as text", cure=cure)

    if network := _first(NETWORK, prompts):
        yield as_text(
            network, "give a folder of adapters, pipe.adapters.folder or --lora-dir, or load it with pipe.adapters.load"
        )
    texts = [*prompts, *negatives, *second]
    matches = dict.fromkeys(match[0] for text in texts for match in _WORD.finditer(text))
    bare = {word: word.lower().removeprefix("embedding:") for word in matches}
    if free := [word for word in matches if not {(to := bare[word]), to.strip("<>"), to.rpartition(".")[0]} & added]:
        yield as_text(free[0], "pipe.adapters.load_embedding or --embedding loads a textual inversion of this name")
    for name, elsewhere in (("negative_prompt", negatives), ("hires_prompt", second)):
        if network := _first(NETWORK, elsewhere):
            yield as_text(network, "name adapters in the prompt", name)
    if syntax == "plain" and (weight := _first(_WEIGHT, texts)):
        yield as_text(weight, unweighted or "{prompt_syntax='a1111'} reads it as a weight")
    elif syntax == "plain" and (words := _first(_WORDS, (text for text in texts if not text.isupper()))):
        yield as_text(words, "{prompt_syntax='a1111'} reads it as A1111 does")
    elif syntax == "plain" and (weight := _first(_COMPEL, texts)):
        yield as_text(weight, unweighted or "{prompt_syntax='compel'} reads it as a weight")


def _first(pattern: re.Pattern[str], texts: Iterable[str]) -> str | None:
    """Return the match in the first text that has one."""
    return next((match[0] for text in texts if (match := pattern.search(text))), None)
