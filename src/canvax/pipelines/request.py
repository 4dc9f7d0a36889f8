"""Check the arguments of a call and keep them as one record, before anything is traced or compiled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from PIL import Image

from canvax.call import HIRES_STRENGTHS, MAX_SIDE, STRENGTH, STRENGTH_OF_MASKED, Call
from canvax.denoise import Known
from canvax.errors import InputError, conflict, needs, refuse_tracers
from canvax.families.base import AESTHETICS, SECOND_PROMPTS, SIZES, TARGET_SIZES, Model
from canvax.guidance import OFF, Guidance
from canvax.images.convert import on_white
from canvax.images.inputs import MOST_PIXELS, entry, fingerprint, read_images
from canvax.images.masks import (
    Box,
    around,
    as_floats,
    blurred,
    box_of,
    extended,
    painted_over,
    pixels_resized,
    resized,
    rounded,
)
from canvax.models.clip import most_skipped
from canvax.models.dit import pack
from canvax.pipelines.checks import (
    FITS_ALL,
    SIZE_STEP,
    check_guidance,
    check_image_size,
    check_latents,
    check_prompts,
    check_second,
    check_seeds,
    check_size,
    check_steps,
    check_strength,
)
from canvax.pipelines.control import ControlImages, check_control
from canvax.pipelines.options import Options, check_options
from canvax.pipelines.references import References, check_references, masked_reference
from canvax.pipelines.texts import Embeds, Texts, check_conditions, read_texts
from canvax.samplers import SamplerSpec, SamplerTable, Solver, spec_of
from canvax.samplers.strength import steps_of_strength
from canvax.types import HostArray

if TYPE_CHECKING:
    from canvax.pipelines.image_prompts import ImagePrompts
    from canvax.pipelines.slots import Shares


LAMBDA, LARGEST_LAMBDA = 0.6, 2.0
"""Usual and largest guidance scale of CFG++; the paper has 0..1."""


Output = Literal["pil", "np", "numpy", "jax", "latent"]
"""Kinds of ``Result.images``."""


@dataclass(frozen=True, eq=False)
class Request:
    """A checked call; lists have an entry for each image.

    Attributes:
        shape: shape of the latents, [B, h, w, C].
        zeros: replace the negative prompt by zeros, since the call has none and the model was trained so.
        embedded: the model reads no negative prompt at any guidance scale.
        guidance_off: ``Family.guidance_off``.
        guidance_kind: ``Family.guidance``.
        output: kind of ``Result.images``; "latent" needs no decoder.
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
    hires_prompts: list[str]
    zeros: bool
    embedded: bool
    guidance_off: float
    guidance_kind: str
    texts: Texts
    embeds: tuple[Embeds | None, Embeds | None] = (None, None)
    init_images: InitImages | None = None
    control: ControlImages | None = None
    image_prompts: ImagePrompts | None = None
    beside: Shares | None = None
    references: References | None = None
    output: Output = "pil"

    def fingerprint(self) -> list[Any]:
        """Return all values, except seeds, that must be the same in processes that generate together."""
        apart = ("seeds", "options", "latents", "init_images", "texts", "embeds", "control", "image_prompts", "beside")
        apart += ("references",)
        decided = {name: value for name, value in vars(self).items() if name not in apart}
        if isinstance(self.sampler, SamplerTable):
            decided["sampler"] = self.sampler.sha256
        elif isinstance(self.sampler, SamplerSpec):  # the text of a function is not the same in each process
            decided["sampler"] = self.sampler.name
        image = self.init_images and (self.init_images.strength, self.init_images.fingerprints)
        digest = None if self.latents is None else hashlib.sha256(self.latents.tobytes()).hexdigest()
        image = [image, self.control and dict(self.control.fingerprints)]
        image += [self.image_prompts and self.image_prompts.fingerprint()]
        image += [self.beside and (self.beside.places, self.beside.records)]
        image += [self.references and (self.references.sizes, self.references.fingerprints)]
        return [decided, digest, image, self.options.changed(), self.options.callback is not None]

    @property
    def on_device(self) -> bool:
        """True if pixels and latents stay on the devices."""
        return self.output == "jax"

    @property
    def guided(self) -> bool:
        """True if the negative prompt has an effect: not for a single prompt at a guidance scale of 1 or less."""
        always = self.composed or self.options.unguided_noise
        return not self.embedded and (always or max(self.scales) > OFF)

    @property
    def is_last_pass(self) -> bool:
        """False for the first pass of a hires fix, whose pixels no user sees."""
        return self.options.hires == 1 or self.init_images is not None

    @property
    def rule(self) -> Guidance:
        """The rule of guidance."""
        parts = self.texts.parts if self.composed else 0
        return self.options.rule(self.guidance_kind, guided=self.guided, parts=parts)

    @property
    def scales(self) -> tuple[float, ...]:
        """Guidance scales, where 1 is none: one for all steps, or one for each."""
        if self.options.true_cfg_scale != OFF:
            return (self.options.true_cfg_scale,)
        added = 0 if self.options.unguided_noise else 1 - self.guidance_off
        return tuple(scale + added for scale in self.options.guidance_steps or (self.guidance,))

    @property
    def composed(self) -> bool:
        """True if several prompts of an image are added up, or a whole prompt has a weight."""
        return self.texts.parts > 1 or bool((self.texts.weights != 1).any())

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of all prompts for each text encoder."""
        text = self.texts.encoders
        embeds = (text.lengths_of(embed["text"].shape[1]) for embed in self.embeds if embed is not None)
        return text.fit({*self.texts.lengths, *filter(None, embeds)}, self.height * self.width)


def make_request(model: Model, call: Call) -> Request:
    """Check a call.

    Raises:
        InputError: an argument cannot be used.
    """
    options, per_prompt = check_options(call.options), call.num_images_per_prompt
    sampler = None if model.scheduler.has_sampler(call.sampler) else _sampler(call.sampler)
    check_for_model(options, model)
    options = _with_own_strength(options, model)
    check_seed_size(options, model.vae.factor)
    prompt, negative, embeds = split_conditions(call.prompt, call.negative_prompt, model)
    prompts, negatives = check_prompts(prompt, negative, per_prompt)
    if any(embed is not None and len(embed["text"]) != len(prompts) for embed in embeds):
        raise InputError("prompt", f"has conditions of other than {len(prompts)} images", cure="give an entry for each")
    (tall, wide), factor = model.native_size, model.networks.size_step
    size = (call.height, call.width)
    if options.padding_mask_crop is not None:  # a part of the image, at the size the model was trained for
        size = (size[0] or tall, size[1] or wide)
    controls = check_control(model, call.control, len(prompts), options)
    if controls is not None and call.image is None:
        size = controls.size(size, factor, (tall, wide))
    references = _references(model, call, options)
    if references is not None:
        size = (size[0] or references.sizes[0][0], size[1] or references.sizes[0][1])
    image = call.image if references is None else None
    mode = model.networks.image_mode
    init = check_init_images(image, call.mask, call.strength, size, len(prompts), factor, options, mode, (tall, wide))
    if init is not None and init.masks and model.networks.denoiser.facts.edits:
        references = masked_reference(init.images, model.networks)
    if references is not None and any(embeds) and model.text.seeing(references.sizes) != model.text:
        if init is None:
            why = "the text encoder sees the reference images, and conditions were made without"
            raise conflict("image", "prompt", why=why, cure="give the prompt as text")
        references = None
    if init is None:
        height, width = check_size("height", size[0], tall, factor), check_size("width", size[1], wide, factor)
        init = masked_everywhere(height, width) if model.networks.inpaints else None
    else:
        height, width = init.size
    shape = model.networks.latent_shape(len(prompts), height, width)
    most = model.scheduler.schedule.alphas_cumprod.size
    table = sampler if isinstance(sampler, SamplerTable) else None
    listed_steps = options.listed_steps if table is None else int(table.step[-1]) + 1
    steps = check_steps(call.num_inference_steps, listed_steps, model.defaults.num_inference_steps, most)
    if init is not None and table is not None:
        if call.strength is not None:
            cure = "leave it out: a table that was built with skip= begins later"
            raise InputError("strength", "has no effect on a sampler that is a table", cure=cure, value=call.strength)
        first = int(table.step[0])
        init = replace(init, steps=steps, skipped=first, strength=1 - first / steps)
    elif init is not None:
        whole, skipped = steps_of_strength(init.strength, steps, options.strength_rule, most)
        init = replace(init, steps=whole, skipped=skipped)
    prompts_2 = check_second("prompt_2", options.prompt_2, prompts, per_prompt)
    negatives_2 = check_second("negative_prompt_2", options.negative_prompt_2, negatives, per_prompt)
    run = init.steps - init.skipped if init else steps
    request = Request(
        prompts=prompts,
        negatives=negatives,
        seeds=check_seeds(call.seed, len(prompts)),
        height=height,
        width=width,
        steps=steps,
        guidance=check_guidance(call.guidance_scale, usual_guidance(options, model)),
        sampler=sampler,
        latents=check_latents(call.latents, shape),
        shape=shape,
        prompts_2=prompts_2,
        negatives_2=negatives_2,
        hires_prompts=check_second("hires_prompt", options.hires_prompt, prompts, per_prompt),
        options=options,
        zeros=negative is None and options.negative_prompt_2 is None and model.zero_negative_embeds,
        embedded=model.networks.unguided and options.true_cfg_scale == OFF,
        guidance_off=model.family.guidance_off,
        guidance_kind=model.family.guidance,
        texts=read_texts(model, (prompts, prompts_2), (negatives, negatives_2), options, run, references),
        embeds=embeds,
        init_images=init,
        control=controls,
        image_prompts=_image_prompts(model, call.image_prompt, len(prompts), options),
        references=references,
    )
    check_composed(request, model)
    check_lengths(request)
    if options.unguided_noise and not all(0 <= scale <= LARGEST_LAMBDA for scale in request.scales):
        problem = f"is not in 0..{LARGEST_LAMBDA:g}, where that of guidance_method='cfg_pp' is"
        cure = f"{LAMBDA:g} is usual"
        raise InputError("guidance_scale", problem, cure=cure, value=options.guidance_steps or request.guidance)
    if request.latents is not None and (options.variation_strength or options.seed_size):
        raise conflict("latents", "variation_strength", "seed_size", why="the noise is given already")
    check_start(options, sampler, request.latents, model, image=init is not None)
    return request


def usual_guidance(options: Options, model: Model) -> float:
    """Return the guidance scale of calls that give none."""
    return LAMBDA if options.unguided_noise else model.defaults.guidance_scale


def _with_own_strength(options: Options, model: Model) -> Options:
    """Return the options with the model's own strength of a second pass, where none is given."""
    own = model.defaults.hires_strength
    given = options.hires == 1 or options.hires_method != "pixel" or options.hires_strength is not None
    return options if given or own == HIRES_STRENGTHS["pixel"] else replace(options, hires_strength=own)


def _sampler(value: Any) -> str | SamplerSpec | SamplerTable | None:
    """Check the sampler of a call; return a function as a spec."""
    if isinstance(value, str | SamplerSpec | SamplerTable | None):
        return value
    if isinstance(getattr(value, "config", value), Mapping):
        cure = "pass it to canvax.load(model, scheduler=...); {sampler} takes a name, for example 'Euler'"
        raise InputError("sampler", "is a scheduler, which belongs to the model", cure=cure, value=value)
    if not callable(value) or isinstance(value, type):
        cure = "give a name that canvax samplers lists, a SamplerTable, a SamplerSpec or a solver"
        raise InputError("sampler", "is not a sampler", cure=cure, value=value)
    return SamplerSpec.of(cast("Solver", value))


def check_composed(request: Request, model: Model, name: str = "prompt") -> None:
    """Refuse a ``prompt`` or ``hires_prompt`` with AND or a weight where only one prompt is read."""
    if request.composed and (request.options.reuse > 1 or request.embedded):
        problem = f"has AND or a weight, and {model.name} has no negative prompt"
        problem = problem if request.embedded else "has AND or a weight, which cannot be combined with reuse"
        raise InputError(name, problem, cure="leave AND and :weight out")


def check_lengths(request: Request) -> None:
    """Refuse conditions that cannot be brought to the length of the other prompts.

    Raises:
        InputError: names both numbers of rows.
    """
    text, lengths = request.texts.encoders, request.lengths
    for name, embed in zip(("prompt", "negative_prompt"), request.embeds, strict=True):
        if embed is None or (rows := embed["text"].shape[1]) == (wanted := text.rows(lengths)):
            continue
        if not text.is_lengthened(lengths):
            problem = f"has {rows} rows of text, and the other prompts of the call need {wanted}"
            raise InputError(name, problem, cure="give conditions for both sides, or a shorter prompt")


def _image_prompts(model: Model, value: Any, count: int, options: Options) -> ImagePrompts | None:
    if value is None:
        return None
    from canvax.pipelines.image_prompts import check_image_prompts  # which most calls never need

    return check_image_prompts(model, value, count, options)


def is_alone(call: Call, options: Options) -> bool:
    """Return True if a call has an image without strength, mask or other settings: a model that edits reads it."""
    begins = (call.strength, call.mask, *(value for _, value in _given_options(options)))
    return call.image is not None and all(value is None for value in begins)


def _references(model: Model, call: Call, options: Options) -> References | None:
    """Return the images of a call as reference images, unless the run begins from them or the model does not edit."""
    if not is_alone(call, options) or not model.networks.denoiser.facts.edits:
        return None
    return check_references(call.image, model.networks)


def split_conditions(prompt: Any, negative: Any, model: Model) -> tuple[Any, Any, tuple[Embeds | None, Embeds | None]]:
    """Separate conditions from prompts: return both prompts, empty where there are conditions, and the conditions."""
    embeds: list[Embeds | None] = [None, None]
    texts = [prompt, negative]
    for i, name in enumerate(("prompt", "negative_prompt")):
        if isinstance(texts[i], Mapping):
            refuse_tracers(name, dict(texts[i]))
            embeds[i] = check_conditions(name, texts[i], model)
            texts[i] = [""] * len(embeds[i]["text"])  # pyright: ignore[reportOptionalSubscript]
    return texts[0], texts[1], (embeds[0], embeds[1])


def check_for_model(options: Options, model: Model) -> None:
    """Refuse options that the model does not use.

    Raises:
        InputError: an option is for other kinds of models.
    """
    one = dict.fromkeys(SECOND_PROMPTS, "it has one text encoder") if len(model.text.encoders) == 1 else {}
    conditions = dict.fromkeys((*SIZES, *TARGET_SIZES, *AESTHETICS), "it is not an SDXL model")
    unused = one | ({} if model.family.size_conditions else conditions) | dict(model.family.unused_options)
    for name in sorted(options.changed().keys() & unused.keys()):
        raise InputError(name, f"is not supported by {model.name}: {unused[name]}", cure="leave it out")
    for name in ("guidance_steps", "guidance_interval", "guidance_rescale"):
        if model.networks.unguided and name in options.changed():
            raise InputError(
                name, f"is not supported by {model.name}, which is not guided by a negative prompt", cure="leave it out"
            )
    if options.true_cfg_scale != OFF and not model.networks.embeds_guidance:
        problem = f"is not supported by {model.name}, which does not read guidance_scale as an input"
        raise InputError("true_cfg_scale", problem, cure="use guidance_scale")
    for name in ("pag_scale", "pag_adaptive_scale"):
        if "perturbed" not in model.networks.denoiser.facts.offers and name in options.changed():
            problem = f"is not supported by {model.name}: its attention cannot be perturbed"
            raise InputError(name, problem, cure="leave it out")
    model.networks.check_roles(options.rule(model.family.guidance).samples)
    if options.guidance_rescale and options.guidance_method is None and model.family.guidance != "cfg":
        problem = f"has no effect with {model.family.guidance}, the guidance of {model.name}"
        raise InputError("guidance_rescale", problem, cure="give {guidance_method=cfg}, too")
    check_clip_skip(options.clip_skip, model)
    check_layers(options.reuse_layers, model)
    if options.reuse > 1 and not model.networks.most_layers:
        raise InputError("reuse", f"{model.name} has no features to reuse", cure="leave it out", value=options.reuse)


def check_clip_skip(skip: int, model: Model) -> None:
    """Check that the text encoder has more layers than are skipped.

    Raises:
        InputError: it has too few; the error says how many can be skipped.
    """
    if not 0 <= skip <= (most := most_skipped(model.text)):
        raise InputError("clip_skip", f"is not in 0..{most}, the layers that can be left out", value=skip)


def check_seed_size(options: Options, factor: int) -> None:
    """Check that a size of noise is a whole number of latents, and no larger than any image.

    Raises:
        InputError: the size cannot be used; the error names sizes that can.
    """
    if options.seed_size is not None and not all(factor <= side <= MAX_SIDE for side in options.seed_size):
        raise InputError(
            "seed_size", f"is not (height, width) of {factor} to {MAX_SIDE} pixels", value=options.seed_size
        )
    for side in options.seed_size or ():
        check_size("seed_size", side, 0, factor)


def check_layers(layers: int, model: Model) -> None:
    """Check that the denoiser has this many ``reuse_layers``.

    Raises:
        InputError: it has fewer; the error says how many.
    """
    most = max(1, model.networks.most_layers)
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= most:
        raise InputError("reuse_layers", f"is not in 1..{most}, the skip connections of {model.name}", value=layers)


def check_start(
    options: Options, sampler: Any, latents: HostArray | None, model: Model, *, image: bool = False
) -> None:
    """Refuse a call that continues from latents or an image, and has none.

    Raises:
        InputError: the latents or the image are missing.
    """
    started = options.denoising_start > 0
    if started and latents is None:
        raise needs(
            "denoising_start", "latents=result.latents", cure="of a run that stopped there, with {denoising_end}"
        )
    inverts = not isinstance(sampler, SamplerTable | None) and spec_of(sampler)[0].name == "ddim_inverse"
    if inverts and image:
        cure = "pass pipe.encode_image(image) as latents, without noise"
        raise conflict("image", "sampler='ddim_inverse'", cure=cure)
    if inverts and latents is None:
        raise needs("sampler", "latents", cure="those of the image, such as result.latents", value=sampler)
    if model.family.is_refiner and not started and not image:
        problem = f"is missing: {model.name} is a refiner, which only finishes images"
        cure = "{latents} of a base model that stopped at {denoising_end=0.8}, and {denoising_start=0.8}"
        raise InputError("image", problem, cure=f"give {{image}}, or {cure}")


@dataclass(frozen=True, eq=False)
class InitImages:
    """The source images and masks of a call: an entry for each image, or one for all.

    Attributes:
        images: RGB, of the size that is generated.
        masks: L, of the same size: white is generated, black stays; empty if the whole image is generated.
        strength: the part of the run to do, 0..1.
        fingerprints: hashes of the caller's images and masks, for metadata.
        whole: whole images and masks, into which the generated part is pasted; else the same as the above.
        boxes: the part that is generated; empty if it is the whole image.
        steps: steps of the whole run.
        skipped: steps left out at its beginning.
        latents: latents of the images [n, h, w, C], if they are known already.
    """

    images: list[Image.Image]
    masks: list[Image.Image]
    strength: float
    fingerprints: dict[str, list[str]]
    whole: tuple[list[Image.Image], list[Image.Image]]
    boxes: list[Box]
    steps: int = 0
    skipped: int = 0
    latents: HostArray | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the generated image."""
        return self.images[0].height, self.images[0].width

    @property
    def from_noise(self) -> bool:
        """True if the run begins from noise alone: strength 1 with a mask."""
        return bool(self.masks) and self.strength == 1

    def known(self, latents: HostArray, factor: int, options: Options) -> Known | None:
        """Return the part to keep of the images' latents [n, h, w, C]; None without masks."""
        if not self.masks:
            return None
        masks = self.latent_masks(len(latents), factor, hard=options.mask_mode == "hard")
        return Known(masks, latents, np.full(len(latents), options.mask_mode == "graded"))

    def latent_masks(self, count: int, factor: int, *, hard: bool) -> HostArray:
        """Shrink masks to latents [count, h, w, 1] float32 in 0..1: the mean of the pixels, or the rounded maximum."""
        masks = np.stack([_shrunk(mask, factor, hard=hard) for mask in self.masks])
        return np.broadcast_to(masks, (count, *masks.shape[1:]))

    def behind_latents(self, factor: int, *, folded: bool) -> tuple[list[HostArray], HostArray]:
        """Return the input of an inpainting network: images with grey holes, and masks [n, h, w, C], 1 in the holes.

        Both are as in the training of inpainting models: every ``factor``-th pixel of a mask of 0 and 1, or with
        ``folded`` all pixels of a latent as channels.
        """
        white = [Image.new("L", self.images[0].size, 255)]
        holes = [np.asarray(mask, np.float32)[..., None] >= 127.5 for mask in self.masks or white]
        count = max(len(holes), len(self.images))
        images = [np.where(entry(holes, i), np.float32(0.5), as_floats(entry(self.images, i))) for i in range(count)]
        masks = np.stack(holes).astype(np.float32)
        masks = pack(masks, factor, channels_first=True) if folded else masks[:, ::factor, ::factor]
        return images, masks

    def pasted(self, pixels: HostArray, indices: list[int]) -> HostArray:
        """Paste generated pixels [n, H, W, C] of some images of the call into the source images."""
        if not self.masks or not len(pixels):
            return pixels
        return np.stack([self._pasted(image, i) for image, i in zip(pixels, indices, strict=True)])

    def _pasted(self, pixels: HostArray, index: int) -> HostArray:
        image, mask = as_floats(entry(self.whole[0], index)), as_floats(entry(self.whole[1], index))[..., None]
        if self.boxes:
            left, top, right, bottom = entry(self.boxes, index)
            part = pixels_resized(pixels, bottom - top, right - left)
            pixels = image.copy()
            pixels[top:bottom, left:right] = part
        return (1 - mask) * image + mask * pixels


def check_init_images(
    image: Any,
    mask: Any,
    strength: Any,
    size: tuple[Any, Any],
    count: int,
    factor: int,
    options: Options,
    mode: str = "RGB",
    native: tuple[int, int] | None = None,
) -> InitImages | None:
    """Check the image, mask and strength of a call, and bring them to the size to generate.

    Args:
        image: as in a call.
        mask: as in a call.
        strength: as in a call.
        size: requested height and width; for None those of the image.
        count: number of images of the call.
        factor: pixels per latent.
        options: options of the call.
        mode: PIL's mode of the model's images.
        native: height and width that the model was trained for; None while it is not known.

    Raises:
        InputError: an argument cannot be used.
    """
    if image is None:
        for name, value in (("mask", mask), ("strength", strength), *_given_options(options)):
            if value is not None:
                raise needs(name, "image")
        return None
    if options.denoising_start:
        cure = "leave one out, or give {latents=result.latents} of a run that stopped"
        raise conflict("image", "denoising_start", why="strength says where an image begins", cure=cure)
    images = [image.convert(mode) for image in read_images("image", image, count, alpha=mode == "RGBA")]
    masks = [] if mask is None else read_images("mask", mask, count, grey=True)
    for i in range(len(masks)):
        if masks[i].size != entry(images, i).size:
            raise InputError(
                "mask",
                f"is {_size(masks[i])} and the image {_size(entry(images, i))}",
                cure="they must be of the same size",
            )
    # On white, as readers see the image that do not know the model.
    fingerprints = {
        "image": [fingerprint(on_white(image)) for image in images], "mask": [fingerprint(image) for image in masks]
    }  # fmt: skip
    fingerprints = {name: texts for name, texts in fingerprints.items() if texts}
    if options.outpaint:
        sides = cast(Box, options.outpaint)  # as canvax.Options keeps it
        images, masks = _outpainted(images, masks, sides, 1 if any(size) else factor)
    if strength is None:
        strength = STRENGTH_OF_MASKED if masks else STRENGTH
    strength = check_strength(strength)
    height, width = _sides(images, size, factor, native)
    if options.outpaint and options.padding_mask_crop is None:
        _check_extended(images, height, width, factor)
    if options.padding_mask_crop is not None:
        return _cut_out(images, masks, strength, fingerprints, (height, width), options)
    images = [resized(image, height, width) for image in images]
    masks = [_edged(resized(mask, height, width), options) for mask in masks]
    return InitImages(_filled(images, masks, options), masks, strength, fingerprints, (images, masks), [])


def masked_everywhere(height: int, width: int) -> InitImages:
    """Return a grey image with a full mask, from which an inpainting model generates a new image."""
    grey, white = [Image.new("RGB", (width, height), (128, 128, 128))], [Image.new("L", (width, height), 255)]
    return InitImages(grey, white, 1.0, {}, (grey, white), [])


def _given_options(options: Options) -> list[tuple[str, Any]]:
    return [("outpaint", options.outpaint), ("padding_mask_crop", options.padding_mask_crop)]


def _sides(
    images: list[Image.Image], size: tuple[Any, Any], factor: int, native: tuple[int, int] | None
) -> tuple[int, int]:
    if None in size and len({image.size for image in images}) > 1:
        raise InputError(
            "image", "has images of several sizes", cure="give {height} and {width}, which they are resized to"
        )
    height, width = (check_size(name, side, 0, factor) for name, side in zip(("height", "width"), size, strict=True))
    check_image_size("image", images[0].size, (height or None, width or None), factor, native)
    return height or images[0].height, width or images[0].width


def _outpainted(
    images: list[Image.Image], masks: list[Image.Image], sides: Box, factor: int
) -> tuple[list[Any], list[Any]]:
    """Extend images on each side, with masks in which the new parts are white."""
    for image in images:
        if (image.width + sides[0] + sides[2]) * (image.height + sides[1] + sides[3]) > MOST_PIXELS:
            raise InputError("outpaint", f"makes more than {MOST_PIXELS} pixels", cure="add fewer", value=sides)
        added = sides[0] + sides[2], sides[1] + sides[3]
        for side, length, pixels in zip(("width", "height"), image.size, added, strict=True):
            if length % factor == 0 and pixels % factor:
                raise InputError(
                    "outpaint",
                    f"makes a {side} of {length + pixels} pixels",
                    cure=f"add a multiple of {FITS_ALL if factor == SIZE_STEP else factor} to {length}",
                    value=sides,
                )
    holes: Sequence[Any] = masks or [None]
    count = max(len(images), len(holes))
    whole = [around(entry(holes, i), entry(images, i).size, sides) for i in range(count)]
    return [extended(image, sides) for image in images], whole


def _check_extended(images: list[Image.Image], height: int, width: int, factor: int) -> None:
    """Refuse a size of other proportions than extended images, which would be squeezed to it."""
    for image in images:
        apart = abs(image.width * height / image.height - width), abs(image.height * width / image.width - height)
        if min(apart) >= math.lcm(SIZE_STEP, factor):
            problem = f"makes {_size(image)} pixels, of other proportions than {width} x {height}"
            raise InputError("outpaint", problem, cure="leave {height} and {width} out")


def _cut_out(
    images: list[Image.Image], masks: list[Image.Image], strength: float, fingerprints: dict[str, list[str]],
    size: tuple[int, int], options: Options,
) -> InitImages:  # fmt: skip
    """Cut out the masked parts, each resized to the size to generate."""
    assert options.padding_mask_crop is not None
    if not masks:
        raise needs("padding_mask_crop", "mask")
    if len({image.size for image in images}) > 1:
        raise InputError(
            "padding_mask_crop", "does not go with images of several sizes", cure="call the pipeline for one at a time"
        )
    masks = [_edged(mask, options) for mask in masks]
    boxes = [box_of(mask, options.padding_mask_crop, *size) for mask in masks]
    count = max(len(images), len(masks))
    parts = [resized(entry(images, i).crop(entry(boxes, i)), *size) for i in range(count)]
    holes = [resized(mask.crop(box), *size) for mask, box in zip(masks, boxes, strict=True)]
    holes = [rounded(hole) for hole in holes] if options.mask_mode == "hard" and not options.mask_blur else holes
    return InitImages(_filled(parts, holes, options), holes, strength, fingerprints, (images, masks), boxes)


def _filled(images: list[Image.Image], masks: list[Image.Image], options: Options) -> list[Image.Image]:
    """Return the images to begin from, with their holes painted over if the options ask for it."""
    if options.mask_fill != "fill" or not masks:
        return images
    count = max(len(images), len(masks))
    return [painted_over(entry(images, i), entry(masks, i)) for i in range(count)]


def _edged(mask: Image.Image, options: Options) -> Image.Image:
    return blurred(rounded(mask) if options.mask_mode == "hard" else mask, options.mask_blur)


def _shrunk(mask: Image.Image, factor: int, *, hard: bool) -> HostArray:
    pixels = np.asarray(mask, np.float32) / 255
    tiles = pixels.reshape(mask.height // factor, factor, mask.width // factor, factor)
    small = (tiles.max(axis=(1, 3)) >= 0.5).astype(np.float32) if hard else tiles.mean(axis=(1, 3))
    return small[..., None]


def _size(image: Image.Image) -> str:
    return f"{image.width} x {image.height}"
