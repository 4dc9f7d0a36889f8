"""Turns the arguments of a call into one checked record, before anything is traced or compiled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from canvax.call import MAX_SIDE, Call
from canvax.errors import NO_VALUE, InputError, refuse_tracers
from canvax.families.base import Model
from canvax.pipelines.checks import (
    check_guidance,
    check_latents,
    check_prompts,
    check_second,
    check_seeds,
    check_size,
    check_steps,
)
from canvax.pipelines.control_images import ControlImages, check_control
from canvax.pipelines.given import Given, all_anew, check_given
from canvax.pipelines.options import Options, check_options
from canvax.pipelines.texts import Embeds, Texts, check_conditions, chunk_count, read_texts
from canvax.samplers import SamplerSpec, SamplerTable, Solver, spec_of
from canvax.samplers.strength import steps_of_strength
from canvax.types import HostArray

if TYPE_CHECKING:
    from canvax.pipelines.beside import Shares
    from canvax.pipelines.image_prompts import ImagePrompts


@dataclass(frozen=True, eq=False)
class Request:
    """One call, checked: an entry for each image where lists stand. ``shape`` is that of the latents, [B, h, w, C].

    ``zeros``: no negative prompt was given, not even an empty one, and the model wants zeros for that.
    ``embedded``: the guidance scale is an input of the network. ``no_guidance``: ``Family.no_guidance``.
    ``on_device``: pixels and latents stay on the devices.
    """

    prompts: list[str]
    negatives: list[str]
    seeds: list[int]
    height: int
    width: int
    steps: int
    guidance: float
    sampler: str | SamplerSpec | SamplerTable | None
    latents: np.ndarray | None
    shape: tuple[int, int, int, int]
    options: Options
    prompts_2: list[str]
    negatives_2: list[str]
    zeros: bool
    embedded: bool
    no_guidance: float
    texts: Texts
    embeds: tuple[Embeds | None, Embeds | None] = (None, None)
    given: Given | None = None
    control: ControlImages | None = None
    image_prompts: ImagePrompts | None = None
    beside: Shares | None = None
    on_device: bool = False

    def fingerprint(self) -> list[Any]:
        """Everything but the seeds that must be the same in processes that generate together, by its ``repr``."""
        apart = ("seeds", "options", "latents", "given", "texts", "embeds", "control", "image_prompts", "beside")
        decided = {name: value for name, value in vars(self).items() if name not in apart}
        if isinstance(self.sampler, SamplerTable):
            decided["sampler"] = self.sampler.sha256
        elif isinstance(self.sampler, SamplerSpec):  # the text of a function is not the same in each process
            decided["sampler"] = self.sampler.name
        image = self.given and (self.given.strength, self.given.fingerprints)
        given = None if self.latents is None else hashlib.sha256(self.latents.tobytes()).hexdigest()
        image = [image, self.control and dict(self.control.fingerprints)]
        image += [self.image_prompts and self.image_prompts.fingerprint()]
        image += [self.beside and (self.beside.places, self.beside.records)]
        return [decided, given, image, self.options.changed(), self.options.callback is not None]

    @property
    def guided(self) -> bool:
        """Whether the negative prompt matters at all: for one prompt at a guidance scale of 1 or less it does not."""
        return not self.embedded and (self.composed or max(self.scales) > 1)

    @property
    def scales(self) -> tuple[float, ...]:
        """Guidance scales of the steps, of which 1 is none; one for all steps, or one for each."""
        return tuple(scale + (1 - self.no_guidance) for scale in self.options.guidance_steps or (self.guidance,))

    @property
    def composed(self) -> bool:
        """Whether several prompts of an image are added up, or one is weighed as a whole."""
        return self.texts.parts > 1 or bool((self.texts.weights != 1).any())

    @property
    def chunks(self) -> int:
        """Of each prompt, for the denoiser."""
        tokens = [one["text"].shape[1] for one in self.embeds if one is not None]
        counts = [self.texts.chunks, *(count // self.texts.tokens for count in tokens)]
        return chunk_count(counts, whole=True) if self.texts.whole else math.lcm(*counts)


def make_request(model: Model, call: Call) -> Request:
    """A checked call.

    Raises:
        InputError: naming the argument, its value and the cure.
    """
    options, sampler, per_prompt = check_options(call.options), _sampler(call.sampler), call.num_images_per_prompt
    check_for_model(options, model)
    check_seed_size(options, model.vae.factor)
    prompt, negative, embeds = taken_apart(call.prompt, call.negative_prompt, model)
    prompts, negatives = check_prompts(prompt, negative, per_prompt)
    if any(one is not None and len(one["text"]) != len(prompts) for one in embeds):
        raise InputError(
            "prompt", NO_VALUE, f"has conditions of other than {len(prompts)} images", "give an entry for each"
        )
    (tall, wide), factor = model.native_size, model.networks.size_step
    size = (call.height, call.width)
    if options.padding_mask_crop is not None:  # a part of the image, at the size the model was trained for
        size = (size[0] or tall, size[1] or wide)
    controls = check_control(model, call.control, len(prompts), options)
    if controls is not None and call.image is None:
        size = controls.size(size, factor)
    given = check_given(call.image, call.mask, call.strength, size, len(prompts), factor, options)
    if given is None:
        height, width = check_size("height", size[0], tall, factor), check_size("width", size[1], wide, factor)
        given = all_anew(height, width) if model.networks.inpaints else None
    else:
        height, width = given.size
    shape = model.networks.latent_shape(len(prompts), height, width)
    most = model.scheduler.schedule.alphas_cumprod.size
    table = sampler if isinstance(sampler, SamplerTable) else None
    own_steps = options.own_steps if table is None else int(table.step[-1]) + 1
    steps = check_steps(call.num_inference_steps, own_steps, model.defaults.num_inference_steps, most)
    if given is not None and table is not None:
        if call.strength is not None:
            cure = "leave it out: a table that was built with skip= begins later"
            raise InputError("strength", call.strength, "has no effect on a sampler that is a table", cure)
        first = int(table.step[0])
        given = replace(given, steps=steps, skipped=first, strength=1 - first / steps)
    elif given is not None:
        whole, skipped = steps_of_strength(given.strength, steps, options.strength_rule, most)
        given = replace(given, steps=whole, skipped=skipped)
    prompts_2 = check_second("prompt_2", options.prompt_2, prompts, per_prompt)
    negatives_2 = check_second("negative_prompt_2", options.negative_prompt_2, negatives, per_prompt)
    run = given.steps - given.skipped if given else steps
    request = Request(
        prompts=prompts,
        negatives=negatives,
        seeds=check_seeds(call.seed, len(prompts)),
        height=height,
        width=width,
        steps=steps,
        guidance=check_guidance(call.guidance_scale, model.defaults.guidance_scale),
        sampler=sampler,
        latents=check_latents(call.latents, shape),
        shape=shape,
        prompts_2=prompts_2,
        negatives_2=negatives_2,
        options=options,
        zeros=(negative, options.negative_prompt_2) == (None, None) and model.zeros_for_no_negative,
        embedded=model.networks.embeds_guidance,
        no_guidance=model.family.no_guidance,
        texts=read_texts(model, (prompts, prompts_2), (negatives, negatives_2), options, run),
        embeds=embeds,
        given=given,
        control=controls,
        image_prompts=_image_prompts(model, call.image_prompt, len(prompts), options),
    )
    _check_together(request, model)
    check_start(options, sampler, request.latents, model, image=given is not None)
    return request


def _sampler(value: Any) -> str | SamplerSpec | SamplerTable | None:
    """The sampler of a call, a function as a spec."""
    if isinstance(value, str | SamplerSpec | SamplerTable | None):
        return value
    if not callable(value) or isinstance(value, type):
        cure = "give a name that canvax samplers lists, a SamplerTable, a SamplerSpec or a solver"
        raise InputError("sampler", value, "is not a sampler", cure)
    return SamplerSpec.of(cast("Solver", value))


def _check_together(request: Request, model: Model) -> None:
    """Refuse what is right by itself and cannot go with the rest."""
    prompts, options = request.prompts, request.options
    if request.composed and (options.reuse > 1 or request.embedded):
        why = f"{model.name} has no negative prompt" if request.embedded else "options.reuse is for one prompt"
        raise InputError("prompt", prompts[0][:60], f"adds prompts up (AND): {why}", "leave AND and :weight out")
    if request.latents is not None and (options.variation_strength or options.seed_size):
        raise InputError(
            "latents",
            NO_VALUE,
            "cannot be combined with variation_strength or seed_size: the noise is given already",
            "leave them out",
        )


def _image_prompts(model: Model, value: Any, count: int, options: Options) -> ImagePrompts | None:
    if value is None:
        return None
    from canvax.pipelines.image_prompts import check_image_prompts  # which most calls never need

    return check_image_prompts(model, value, count, options)


def taken_apart(prompt: Any, negative: Any, model: Model) -> tuple[Any, Any, tuple[Embeds | None, Embeds | None]]:
    """Prompts, and in place of those that were given as conditions empty ones and the conditions."""
    found: list[Embeds | None] = [None, None]
    texts = [prompt, negative]
    for i, name in enumerate(("prompt", "negative_prompt")):
        if isinstance(texts[i], Mapping):
            refuse_tracers(name, dict(texts[i]))
            found[i] = check_conditions(name, texts[i], model)
            texts[i] = [""] * len(found[i]["text"])  # pyright: ignore[reportOptionalSubscript]
    return texts[0], texts[1], (found[0], found[1])


def check_for_model(options: Options, model: Model) -> None:
    """Refuse options that the model has no place for, rather than pass them over.

    Raises:
        InputError: naming the options and the kind of model they are for.
    """
    unused = model.family.unused_options(model)
    for name in sorted(options.changed().keys() & unused.keys()):
        raise InputError(name, NO_VALUE, f"is not supported by {model.name}: {unused[name]}", "leave it out")
    for name in ("guidance_steps", "guidance_interval", "guidance_rescale"):
        if model.networks.embeds_guidance and name in options.changed():
            raise InputError(
                name,
                NO_VALUE,
                f"is not supported by {model.name}, which takes one guidance scale, as an input",
                "leave it out",
            )
    check_clip_skip(options.clip_skip, model)
    check_layers(options.reuse_layers, model)
    if options.reuse > 1 and not model.networks.denoiser.most_layers:
        raise InputError("reuse", options.reuse, f"{model.name} has no features to reuse", "leave it out")


def check_clip_skip(skip: int, model: Model) -> None:
    """Refuse to leave out more layers than the text encoder can spare.

    Raises:
        InputError: naming how many these are.
    """
    if not 0 <= skip <= model.text.max_skip:
        raise InputError("clip_skip", skip, f"is not in 0..{model.text.max_skip}, the layers that can be left out")


def check_seed_size(options: Options, factor: int) -> None:
    """Refuse a size of noise that is no whole number of latents, or larger than any image.

    Raises:
        InputError: naming the sides that do.
    """
    if options.seed_size is not None and not all(factor <= side <= MAX_SIDE for side in options.seed_size):
        raise InputError("seed_size", options.seed_size, f"is not (height, width) of {factor} to {MAX_SIDE} pixels")
    for side in options.seed_size or ():
        check_size("seed_size", side, 0, factor)


def check_layers(layers: int, model: Model) -> None:
    """Refuse ``reuse_layers`` that the denoiser has not.

    Raises:
        InputError: naming how many it has.
    """
    most = max(1, model.networks.denoiser.most_layers)
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= most:
        raise InputError("reuse_layers", layers, f"is not in 1..{most}, the skip connections of {model.name}")


def check_start(
    options: Options, sampler: Any, latents: HostArray | None, model: Model, *, image: bool = False
) -> None:
    """Refuse a call that goes on from an image but was given none.

    Raises:
        InputError: naming the option and what to pass.
    """
    started = options.denoising_start > 0
    if started and latents is None:
        raise InputError(
            "denoising_start",
            NO_VALUE,
            "needs latents",
            "give {latents=result.latents} of a run that stopped there, with {denoising_end}",
        )
    inverts = not isinstance(sampler, SamplerTable | None) and spec_of(sampler)[0].name == "ddim_inverse"
    if inverts and image:
        raise InputError(
            "image",
            NO_VALUE,
            f"does not go with sampler={sampler!r}",
            "pass pipe.encode_image(image) as latents, without noise",
        )
    if inverts and latents is None:
        raise InputError(
            "sampler",
            sampler,
            "goes from an image to its noise and needs latents",
            "pass the {latents} of the image, such as result.latents",
        )
    if model.is_refiner and not started and not image:
        raise InputError(
            "image",
            NO_VALUE,
            f"is missing: {model.name} is a refiner, which only finishes images",
            "give {image}, or {latents} of a base model that stopped at {denoising_end=0.8}, and {denoising_start=0.8}",
        )
