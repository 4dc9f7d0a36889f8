"""What AUTOMATIC1111's txt2img and img2img are sent, as canvax means it; and the words that go with the images."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from PIL import Image, ImageChops, ImageOps

from canvax import __version__
from canvax.call import MAX_SIDE
from canvax.errors import InputError
from canvax.images.infotext import to_infotext
from canvax.samplers.catalog import curve_named, find
from canvax.samplers.specs import SamplerSpec
from canvax.server.a1111_control import Scripts, controlled, units_of
from canvax.server.answers import encoded, without_none
from canvax.server.fields import Fraction, Scale, Seed, SideOrNone, Steps
from canvax.server.images_in import MOST_PIXELS, colours, image_of_text, white_mask
from canvax.server.jobs import Ask, Job, ModelCard, Picture, Refused
from canvax.server.work import MOST_IMAGES

PREVIEWS = 6
"""Of each image: clients ask for one about every second."""
_FILLS = ("fill", "original", "noise", "nothing")
_CHURN = (("s_churn", 0.0), ("s_tmin", 0.0), ("s_tmax", 0.0), ("s_noise", 1.0))
"""And what clients send that mean nothing by it."""
_PLAIN_SCHEDULERS = ("", "automatic", "default", "none", "use same scheduler")

Prompt = Annotated[str, Meta(max_length=32_000)]
Name = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=1, le=1000)]
Number = Annotated[float, Meta(ge=0, le=1_000_000)]


class TextToImage(Struct, kw_only=True):
    """The body of txt2img: what is read of its fields."""

    prompt: Prompt | None = None
    negative_prompt: Prompt | None = None
    model: Name | None = None
    seed: Seed | None = None
    subseed: Seed | None = None
    subseed_strength: Fraction | None = None
    seed_resize_from_h: SideOrNone | None = None
    seed_resize_from_w: SideOrNone | None = None
    sampler_name: Name | None = None
    sampler_index: Name | None = None
    scheduler: Name | None = None
    batch_size: Count | None = None
    n_iter: Count | None = None
    steps: Steps | None = None
    cfg_scale: Scale | None = None
    width: Annotated[int, Meta(ge=0, le=MAX_SIDE)] | None = None
    height: Annotated[int, Meta(ge=0, le=MAX_SIDE)] | None = None
    eta: Fraction | None = None
    s_churn: Number | None = None
    s_tmin: Number | None = None
    s_tmax: Number | None = None
    s_noise: Annotated[float, Meta(ge=0, le=1000)] | None = None
    clip_skip: Annotated[int, Meta(ge=0, le=100)] | None = None
    override_settings: dict[str, Any] | None = None
    send_images: bool | None = None
    # refused where they ask for something
    init_images: list[str] | None = None
    styles: list[str] | None = None
    enable_hr: bool | None = None
    tiling: bool | None = None
    restore_faces: bool | None = None
    refiner_checkpoint: Name | None = None
    script_name: Name | None = None
    alwayson_scripts: Scripts | None = None


class ImageToImage(TextToImage, kw_only=True):
    """The body of img2img."""

    init_images: Annotated[list[str], Meta(min_length=1, max_length=1)]  # type: ignore[assignment]
    mask: str | None = None
    denoising_strength: Fraction | None = None
    resize_mode: Annotated[int, Meta(ge=0, le=3)] | None = None
    mask_blur: Annotated[float, Meta(ge=0, le=1000)] | None = None
    mask_blur_x: Annotated[float, Meta(ge=0, le=1000)] | None = None
    inpainting_fill: Annotated[int, Meta(ge=0, le=3)] | None = None
    inpaint_full_res: bool | None = None
    inpaint_full_res_padding: Annotated[int, Meta(ge=0, le=MAX_SIDE)] | None = None
    inpainting_mask_invert: Annotated[int, Meta(ge=0, le=1)] | None = None
    include_init_images: bool | None = None


def ask_of(body: TextToImage, card: ModelCard, client: str) -> Ask:
    """What a body asks for. Decodes its images, so it is called off the event loop.

    Raises:
        Refused: naming the field.
    """
    _check_offered(body)
    sampler = body.sampler_name or body.sampler_index or None
    spec = spec_of(sampler or card.sampler)
    if sampler and spec is None:
        field = "sampler_name" if body.sampler_name else "sampler_index"
        raise _refused(field, f"{sampler!r} is not known; /sdapi/v1/samplers lists them")
    options = {"prompt_syntax": "a1111", **dict(_options(body, spec))}
    image = mask = strength = None
    if isinstance(body, ImageToImage):
        image, mask = _given(body)
        # There, 0 runs the last step all the same; the smallest strength does so here.
        strength = 0.75 if body.denoising_strength is None else max(body.denoising_strength, 0.001)
        options |= {"strength_rule": "a1111"} | (_mask_options(body) if mask else {})
    units = units_of(body.alwayson_scripts)
    if units and "padding_mask_crop" in options:
        raise _refused("inpaint_full_res", "true does not go with controlnet, whose image is of the whole; send false")
    steered = controlled(units, card, _size(body, card, image), image)
    images = (body.batch_size or 1) * (body.n_iter or 1)
    if images > MOST_IMAGES and body.n_iter:
        told = f"{body.batch_size or 1} times n_iter={body.n_iter} are {images} images, more than {MOST_IMAGES}"
        raise _refused("batch_size", f"{told}; send several requests")
    return Ask(
        body.prompt or "",
        negative_prompt=body.negative_prompt or None,
        model=card.id,
        n=images,
        width=body.width or None,
        height=body.height or None,
        steps=body.steps,
        guidance_scale=body.cfg_scale,
        sampler=sampler,
        seed=None if body.seed == -1 else body.seed,
        image=image,
        mask=mask,
        strength=strength,
        control=steered.control,
        image_prompt=steered.image_prompt,
        options={**options, **(steered.options or {})},
        lenient=True,
        previews=PREVIEWS,
        client=client,
    )


def _check_offered(body: TextToImage) -> None:
    """Refuse what would change the image and is not there, in place of leaving it out."""
    if body.enable_hr:
        raise _refused("enable_hr", "a second pass at a larger size is not offered by this server yet; send false")
    if body.init_images and not isinstance(body, ImageToImage):
        raise _refused("init_images", "are for /sdapi/v1/img2img; send them there")
    for name in ("styles", "tiling", "restore_faces", "refiner_checkpoint", "script_name"):
        if getattr(body, name):
            raise _refused(name, "is not offered by this server; leave it out")


def _size(body: TextToImage, card: ModelCard, image: Image.Image | None) -> tuple[int, int]:
    """Width and height of what is generated."""
    own = card.native if image is None else image.size
    return body.width or own[0], body.height or own[1]


def _options(body: TextToImage, spec: SamplerSpec | None) -> Iterator[tuple[str, Any]]:
    """Names and values of ``canvax.Options``."""
    named = body.sampler_name or body.sampler_index
    # There as here a curve in the sampler's name wins, and samplers that take no curve leave the scheduler unread.
    open_to_curves = (spec is None or spec.curves) and not (named and spec and "sigmas" in find(named)[1])
    if (body.scheduler or "").strip().lower() not in _PLAIN_SCHEDULERS and open_to_curves:
        try:
            yield "sigmas", curve_named(body.scheduler or "")
        except InputError:
            raise _refused("scheduler", f"{body.scheduler!r} is not known; /sdapi/v1/schedulers lists them") from None
    # webuiapi sends eta 1 with every request. That is what the ancestral samplers do anyway, and would turn DDIM into
    # another sampler, which nobody asked for. Where someone chose another value, samplers that have an eta take it.
    if body.eta not in (None, 1.0) and spec is not None and spec.eta:
        yield "eta", body.eta
    churn = {name: value for name, usual in _CHURN if (value := getattr(body, name)) not in (None, usual)}
    if spec is not None and (taken := {name: value for name, value in churn.items() if name in spec.settings}):
        yield "sampler_settings", taken
    layers = (body.override_settings or {}).get("CLIP_stop_at_last_layers", body.clip_skip)
    if layers is not None and (not isinstance(layers, int) or isinstance(layers, bool) or layers < 0):
        raise _refused(
            "override_settings", f"CLIP_stop_at_last_layers={layers!r:.80} is not a whole number from 0 on, such as 2"
        )
    if layers is not None and layers > 1:
        yield "clip_skip", layers - 1  # there, 1 is the last layer
    if body.subseed_strength:
        yield "variation_seed", secrets.randbits(32) if body.subseed in (None, -1) else body.subseed
        yield "variation_strength", body.subseed_strength
    if (body.seed_resize_from_h or 0) > 0 and (body.seed_resize_from_w or 0) > 0:
        yield "seed_size", (body.seed_resize_from_h, body.seed_resize_from_w)


def spec_of(sampler: str | None) -> SamplerSpec | None:
    """The sampler of this name, if there is one."""
    try:
        return find(sampler)[0] if sampler else None
    except InputError:
        return None


def _given(body: ImageToImage) -> tuple[Image.Image, Image.Image | None]:
    """Image and mask, in which white is generated anew."""
    image = colours("init_images", image_of_text("init_images", body.init_images[0]))
    mask = white_mask("mask", image_of_text("mask", body.mask)) if body.mask else None
    if mask is not None and mask.size != image.size:
        mask = mask.resize(image.size, Image.Resampling.LANCZOS)
    if mask is not None and body.inpainting_mask_invert:
        mask = ImageChops.invert(mask)
    if body.resize_mode in (2, 3):
        raise _refused("resize_mode", "2 and 3 are not offered by this server; send 0 to stretch or 1 to crop")
    size = body.width or image.width, body.height or image.height
    if body.resize_mode == 1 and size != image.size:
        if size[0] * size[1] > MOST_PIXELS:
            raise _refused("width", f"{size[0]} x {size[1]} are more than {MOST_PIXELS} pixels; ask for fewer")
        image = ImageOps.fit(image, size, Image.Resampling.LANCZOS)
        mask = mask and ImageOps.fit(mask, size, Image.Resampling.LANCZOS)
    return image, mask


def _mask_options(body: ImageToImage) -> dict[str, Any]:
    """What is not sent is as AUTOMATIC1111 has it."""
    blur = next((value for value in (body.mask_blur, body.mask_blur_x) if value is not None), 4.0)
    options: dict[str, Any] = {"mask_blur": blur, "mask_fill": _FILLS[body.inpainting_fill or 0]}
    if body.inpaint_full_res is not False:
        options["padding_mask_crop"] = body.inpaint_full_res_padding or 0
    return options


def _refused(param: str, why: str) -> Refused:
    return Refused(422, "invalid_value", f"{param}: {why}", param=param)


def parameters_of(body: TextToImage) -> dict[str, Any]:
    """What was asked for, given back without fields that nobody knows, and, as there, without images unless asked."""
    asked = msgspec.structs.asdict(body)
    images = () if asked.get("include_init_images") else ("init_images", "mask")
    left_out = (*images, "model", "alwayson_scripts")
    return {name: value for name, value in asked.items() if name not in left_out}


def info_of(job: Job, body: TextToImage, card: ModelCard, pictures: Sequence[Picture]) -> str:
    """The JSON text about the images that clients read seeds and settings from."""
    ask = job.ask
    spec = spec_of(ask.sampler or card.sampler)
    one = pictures[0] if pictures else job.pictures[0]
    negative = ask.negative_prompt or ""
    subseed = ask.options.get("variation_seed", -1)
    info = {
        "prompt": ask.prompt,
        "all_prompts": [ask.prompt] * len(pictures),
        "negative_prompt": negative,
        "all_negative_prompts": [negative] * len(pictures),
        "seed": one.seed,
        "all_seeds": [picture.seed for picture in pictures],
        "subseed": subseed,
        "all_subseeds": [subseed] * len(pictures),
        "subseed_strength": ask.options.get("variation_strength", 0),
        "width": one.width,
        "height": one.height,
        "sampler_name": spec.label if spec else (ask.sampler or card.sampler or ""),
        "cfg_scale": card.guidance_scale if ask.guidance_scale is None else ask.guidance_scale,
        "steps": ask.steps or card.steps,
        "batch_size": body.batch_size or 1,
        "restore_faces": False,
        "face_restoration_model": None,
        "sd_model_name": card.id,
        "sd_model_hash": card.sha256[:10],
        "sd_vae_name": None,
        "sd_vae_hash": None,
        "seed_resize_from_w": body.seed_resize_from_w or -1,
        "seed_resize_from_h": body.seed_resize_from_h or -1,
        "denoising_strength": ask.strength,
        "extra_generation_params": without_none([("Schedule type", ask.options.get("sigmas") and body.scheduler)]),
        "index_of_first_image": 0,
        "infotexts": [to_infotext(picture.metadata) for picture in pictures],
        "styles": [],
        "job_timestamp": time.strftime("%Y%m%d%H%M%S", time.localtime(job.created)),
        "clip_skip": ask.options.get("clip_skip", 0) + 1,
        "is_using_inpainting_conditioning": False,
        "version": f"canvax {__version__}",
    }
    return encoded(info).decode()
