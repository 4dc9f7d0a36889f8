"""The settings of ``canvax.load`` and of a call, each declared once: arguments, and options that are seldom changed.

Keywords, flags, columns of batch jobs, JSON fields, PNG texts and the tables of the docs are derived from these records
(``canvax.settings``). ``canvax.pipelines.options.Options`` adds the checks of several options together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import islice
from typing import Any, Literal, Protocol, get_args

from canvax.errors import InputError, check_function, nearest
from canvax.settings import check_all, check_once, declared, is_whole, numbers_of, setting

Spacing = Literal["leading", "trailing", "linspace"]
GuidanceMethod = Literal["cfg", "cfg_pp", "cfg_norm", "cfg_zero", "apg"]


class GuidanceRule(Protocol):
    """A ``canvax.guidance.Guidance``."""

    def denoised(self, seen: Any) -> Any: ...


GuidanceFunction = Callable[..., Any] | GuidanceRule
"""A function (negative, conditional, scale) -> guided of denoised images [B, h, w, C], also with ``row``; or a rule
(docs/guidance.md)."""
Tiling = Literal["auto", "on", "off"]
NoiseKind = Literal["philox", "torch"]
PromptSyntax = Literal["plain", "a1111", "comfy", "compel"]
StrengthRule = Literal["diffusers", "a1111", "exact"]
ImageEncoding = Literal["mean", "sample"]
Quality = Literal["full", "fast"]
MaskMode = Literal["hard", "soft", "graded"]
MaskFill = Literal["original", "fill", "noise", "nothing"]
MaskBlend = Literal["denoised", "renoised"]
ControlMode = Literal["balanced", "guess", "prompt", "control"]
HiresMethod = Literal["pixel", "latent"]
Quantize = Literal["int8", "float8", "int8-w8a8", "float8-w8a8"]
Offload = Literal["layers"] | bool
LAYERS = "layers"
"""Value of ``offload`` for weights that are copied to the devices as their layers run."""
PredictionType = Literal["epsilon", "v_prediction", "sample", "flow_prediction"]
STRENGTH, STRENGTH_OF_MASKED = 0.8, 1.0
"""Default strengths for a whole image, and for a masked one."""
HIRES_STRENGTHS: Mapping[HiresMethod, float] = {"pixel": 0.4, "latent": 0.7}
"""Default strengths of the second pass: below 0.55 or so enlarged latents stay blurred."""

MAX_SIDE = 16384
"""The most pixels of a side of an image."""
MAX_SEED = 2**64 - 1
MOST_IMAGES = 65536
"""The most images of one call: no machine holds the latents of more, and their prompts would fill its memory."""
MOST_STEPS = 10_000
"""The most steps, and numbers in a list of noise levels: no noise schedule has so many timesteps."""
MOST_GUIDANCE = 10_000
"""The largest guidance scale: images are destroyed long before, so a larger number is a mistake."""
MOST_VECTORS = 75
"""The most vectors of a trained word: the tokens of a prompt of CLIP."""
MOST_TRAINED = 1_000_000
"""The most pixels of a side of an image that a model was trained on."""

MODEL = "model"
DEVICES = "devices"
SUBJECT = "what to generate"
IMAGE = "from an image"
CONTROL = "from a control image (the first three once for each network)"
PROMPTS = "with an image as a prompt (each flag once for each image or adapter)"
SAMPLING = "settings (changing them does not recompile, except where noted)"
HIRES = "a second pass at a larger size"
SDXL = "SDXL only"
PYTHON = "Python only"

ZERO_SNR: Mapping[str, Any] = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
"""Fields of the noise schedule of a model that was trained with zero terminal SNR."""

_IN_PYTHON = "only Python code can give it"
_BATCHED = "images in a batch are at different steps"
_NO_LATENTS = "latents do not go over the wire"


def read_levels(name: str, value: Any) -> Any:
    """Read noise levels, also from text with commas, as a tuple; return the name of a curve unchanged."""
    if isinstance(value, str) and re.match(r"\s*[a-zA-Z_]", value):
        return value
    numbers = numbers_of(value)
    if not numbers or not all(map(math.isfinite, numbers)):
        raise InputError(name, "is not a list of numbers", cure="for example 14.6,6.5,2.7,0.9,0", value=value)
    return tuple(map(float, numbers))


def read_guidance_method(name: str, value: Any) -> Any:
    """Read a kind of guidance, a function or a rule, which is a part of the key of its program."""
    if callable(value) or hasattr(value, "denoised"):
        if denoised := getattr(value, "denoised", None):
            check_function(name, denoised, 1, "(seen), a canvax.guidance.Evaluated")
        else:
            rule = partial(value, row=None) if takes_row(value) else value
            check_function(name, rule, 3, "(negative, conditional, scale), with row as an optional fourth parameter")
        try:
            hash(value)
        except TypeError:
            raise InputError(
                name, "cannot be hashed", cure="give a function, or a frozen dataclass", value=value
            ) from None
    elif value not in (kinds := get_args(GuidanceMethod)):
        raise InputError(name, "is not known", cure=nearest(str(value), kinds), value=value)
    return value


def takes_row(rule: Callable[..., Any]) -> bool:
    """Return True if a rule of guidance has a parameter ``row``, for the evaluation that it guides."""
    try:
        return "row" in signature(rule).parameters
    except (TypeError, ValueError):  # functions of C may have no signature
        return False


def read_pairs(name: str, value: Any) -> tuple[str, ...]:
    """Read settings by name; return them as ``name=value`` texts, with the value in JSON."""
    if isinstance(value, Mapping):
        value = [f"{key}={json.dumps(each, default=_plain)}" for key, each in value.items()]
    if isinstance(value, str):
        raise InputError(name, "is text", cure="give a table, for example {'NAME': 1}", value=value)
    if not isinstance(value, Sequence) or not all("=" in str(each) for each in value):
        raise InputError(name, "are not names with values", cure="for example NAME=1", value=value)
    check_once(name, (str(each).partition("=")[0] for each in value))
    return tuple(str(each) for each in value)


def _plain(value: Any) -> Any:
    """Return an array as lists and a number of NumPy as Python's, for JSON."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


_SIDES = ("left", "top", "right", "bottom")


def read_sides(name: str, value: Any) -> tuple[int, int, int, int]:
    """Read pixels on each side, also from text: ``left=64,right=64``, or four numbers."""
    cure = "for example left=64,right=64, or four numbers: left, top, right, bottom"
    wrong = InputError(name, "is not pixels by side", cure=cure, value=value)
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",")]
        named = "=" in value
        check_once(name, (side.strip() for side, _, _ in pairs if named))
        value = {side.strip(): pixels for side, _, pixels in pairs} if named else [pixels for pixels, _, _ in pairs]
    if isinstance(value, Mapping):
        if value.keys() - set(_SIDES):
            raise wrong
        value = [value.get(side, 0) for side in _SIDES]
    try:
        sides = tuple(int(side) if isinstance(side, str) else side for side in islice(value, 5))
    except (TypeError, ValueError):
        raise wrong from None
    if len(sides) != 4 or not all(is_whole(side) and 0 <= side <= MAX_SIDE for side in sides) or not any(sides):
        raise wrong
    left, top, right, bottom = map(int, sides)
    return left, top, right, bottom


@dataclass(frozen=True, kw_only=True)
class Load:
    """The arguments of ``canvax.load``. Files, Hub ids and values of JAX are checked when they are used."""

    model: Any = setting(
        "emoji", "a folder, a safetensors or GGUF file, a Hub id owner/name, or emoji",
        group=MODEL, metavar="MODEL", flags=("-m", "--model"),
    )  # fmt: skip
    dtype: Any = setting(
        None, "float32, bfloat16 or float16", unset="bfloat16; before Ampere float16; on a CPU float32", group=MODEL,
        metavar="DTYPE",
    )  # fmt: skip
    quantize: Quantize | None = setting(
        None,
        "int8 or float8: large weights in 8 bits; int8-w8a8 or float8-w8a8: matmuls as well",
        group=MODEL, metavar="KIND",
    )  # fmt: skip
    precision: str | None = setting(
        None, "matmul precision; highest for real float32 on TPU and GPU", unset="JAX's default", group=MODEL,
        metavar="NAME",
    )  # fmt: skip
    safety_checker: bool | None = setting(
        None, "make images black that the model's safety checker refuses", group=MODEL,
    )  # fmt: skip
    prediction_type: PredictionType | None = setting(
        None, "epsilon or v_prediction, if the config lacks it or is wrong", group=MODEL, metavar="TYPE",
    )  # fmt: skip
    scheduler: Any = setting(
        None,
        "for zero terminal SNR that the files do not state; in Python any fields of scheduler_config.json", group=MODEL,
        flags=("--zero-snr",), const=ZERO_SNR,
    )  # fmt: skip
    vae: Any = setting(
        None, "another autoencoder: a folder, Hub id or safetensors file",
        group=MODEL, metavar="VAE",
    )  # fmt: skip
    text_encoder: Any = setting(
        None, "language model for a transformer in one file: a file, folder or Hub id", group=MODEL,
        metavar="FILE",
    )  # fmt: skip
    text_encoder_2: Any = setting(
        None, "T5 of FLUX.1, whose text_encoder is CLIP", group=MODEL,
        metavar="FILE",
    )  # fmt: skip
    tokenizer: Any = setting(
        None, "tokenizer of the language model: a folder or Hub id", unset="the text encoder's",
        group=MODEL, metavar="FOLDER",
    )  # fmt: skip
    revision: str | None = setting(
        None, "branch, tag or commit of a Hub id", unset="main", group=MODEL, metavar="REV",
    )  # fmt: skip
    variant: str | None = setting(None, "variant of the weights, such as fp16", group=MODEL, metavar="NAME")
    cache_dir: Any = setting(None, "folder of the files from the Hub", group=MODEL, metavar="FOLDER")
    local_files_only: bool = setting(False, "never ask the Hub", group=MODEL)
    token: Any = setting(
        None, "Hub token; prefer HF_TOKEN, since other users see a command line",
        group=MODEL, metavar="TOKEN",
    )  # fmt: skip
    progress: bool = setting(True, "show downloads on stderr", group=PYTHON, closed={"command": "--quiet"})
    controlnet: Any = setting(
        None, "ControlNet or T2I-Adapter: a folder, Hub id or safetensors file", group=CONTROL, metavar="NET",
        flags=("--controlnet", "--control-net"), repeats=True,
    )  # fmt: skip
    mesh: Any = setting(
        None, "data=4,model=2 splits the batch 4 ways and the weights 2 ways", unset="data over all devices",
        group=DEVICES, metavar="AXES",
    )  # fmt: skip
    offload: Offload = setting(
        False,
        "keep weights in the host's memory, except those of the network that runs, or with 'layers' of two layers",
        group=DEVICES,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_all(self)

    def keywords(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the arguments of some names; by default those but ``model`` that differ from their defaults."""
        if names is not None:
            return {name: getattr(self, name) for name in names}
        values = {name: getattr(self, name) for name in declared(Load) if name != "model"}
        return {name: value for name, value in values.items() if value != declared(Load)[name].default}


LOCATION = ("revision", "variant", "token", "cache_dir", "local_files_only")
"""Arguments of ``canvax.load`` about the source of files."""
PARTS = ("vae", "prediction_type", "text_encoder", "text_encoder_2", "tokenizer", "scheduler")
"""Arguments of ``canvax.load`` that replace parts of the model."""


@dataclass(frozen=True)
class LoadFlags:
    """Flags of models in addition to ``Load``: two of them are arguments of ``pipe.with_ip_adapter``."""

    data_dir: str | None = setting(
        None, "folder of A1111 or ComfyUI, whose models can be given by name",
        unset="CANVAX_DATA_DIR", group=MODEL, metavar="FOLDER",
    )  # fmt: skip
    ip_adapter: Any = setting(
        None, "IP-Adapter: a safetensors file, here or OWNER/NAME/FILE on the Hub",
        group=PROMPTS, metavar="FILE", repeats=True,
    )  # fmt: skip
    ip_encoder: str | None = setting(
        None, "CLIP's image encoder", unset="the one next to the adapter", group=PROMPTS, metavar="FOLDER",
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Call:
    """The unchecked arguments of a call; None is the model's default."""

    prompt: Any = setting(help="the text to show; a list gives an image of each", group="prompt", also=("prompts",))
    negative_prompt: Any = setting(
        None, "the text to avoid", group=SUBJECT, metavar="TEXT",
        flags=("-N", "--negative-prompt", "--negative"), also=("negative", "neg_prompt"),
    )  # fmt: skip
    height: int | None = setting(
        None, "multiple of 8, 16 or 32", low=8, high=MAX_SIDE, unset="the model's",
        group=SUBJECT, metavar="PIXELS", flags=("-H", "--height"), also=("H",),
    )  # fmt: skip
    width: int | None = setting(
        None, "multiple of 8, 16 or 32", low=8, high=MAX_SIDE, unset="the model's",
        group=SUBJECT, metavar="PIXELS", flags=("-W", "--width"), also=("W",),
    )  # fmt: skip
    num_inference_steps: int | None = setting(
        None, "sampler steps, at most 1000", low=1, high=MOST_STEPS,
        cure="20 to 50 is usual", unset="the model's, else 50", group=SAMPLING, metavar="N",
        flags=("--steps", "--num-inference-steps"), also=("steps", "num_steps", "sampling_steps"), infotext="Steps",
    )  # fmt: skip
    guidance_scale: float | None = setting(
        None,
        "strength of guidance; 1 or less (0 for Z-Image and Krea 2): none, in another program of half the work",
        low=-MOST_GUIDANCE, high=MOST_GUIDANCE, cure="7.5 is usual",
        unset="the model's, else 7.5", group=SAMPLING, metavar="G",
        flags=("-g", "--guidance-scale", "--guidance", "--cfg-scale", "--cfg"), also=("cfg", "cfg_scale", "guidance"),
        infotext="CFG scale",
    )  # fmt: skip
    num_images_per_prompt: int = setting(
        1, "images for each prompt", low=1, high=MOST_IMAGES, group=SUBJECT, metavar="N",
        flags=("-n", "--num-images", "--num-images-per-prompt"), also=("n", "num_images", "n_iter", "batch_size"),
        closed={"file": "a row is one image"},
    )  # fmt: skip
    seed: int | None = setting(
        None, "image i uses SEED + i", low=-1, high=MAX_SEED, unset="-1: random", group=SUBJECT,
        metavar="SEED", flags=("-s", "--seed"), infotext="Seed",
    )  # fmt: skip
    sampler: str | None = setting(
        None, "see canvax samplers", unset="the model's", group=SAMPLING, metavar="NAME",
        flags=("--sampler", "--scheduler"), also=("scheduler", "sampler_name"), infotext="Sampler",
    )  # fmt: skip
    latents: Any = setting(None, "initial noise", group=PYTHON, closed={"command": _IN_PYTHON, "file": _IN_PYTHON})
    options: Any = setting(None, "options", group=PYTHON, closed={"command": _IN_PYTHON, "file": _IN_PYTHON})
    image: Any = setting(
        None, "begin from this image, at its size without -W and -H; a model that edits reads it without --strength "
        "and --mask", group=IMAGE, metavar="FILE",
        flags=("--image", "--init-image", "--init-img"), also=("init_image", "input_image", "images"),
    )  # fmt: skip
    mask: Any = setting(
        None, "mask of the image's size: white is generated", group=IMAGE, metavar="FILE",
        flags=("--mask", "--mask-image"), also=("mask_image",),
    )  # fmt: skip
    strength: float | None = setting(
        None, "part of the run to do", low=0, high=1, above=True, cure="0.8 changes much, 0.3 little",
        unset=f"{STRENGTH:g}; with a mask {STRENGTH_OF_MASKED:g}", group=IMAGE,
        flags=("--strength", "--denoising-strength"), also=("denoising_strength", "denoise"),
    )  # fmt: skip
    control: Any = setting(
        None,
        "image that the network reads; none for no image; for several types TYPE=FILE,TYPE=FILE",
        group=CONTROL, metavar="FILE", repeats=True, flags=("--control", "--control-image"),
        also=("control_image", "controlnet_image", "adapter_image"),
    )  # fmt: skip
    image_prompt: Any = setting(
        None, "image prompts", group=PROMPTS, closed=dict.fromkeys(("command", "file"), "ip_image names its files"),
    )  # fmt: skip


@dataclass(frozen=True)
class Enlarging:
    """The arguments of ``pipe.upscale`` that are not those of a call, or have other defaults."""

    scale: float = setting(2.0, "factor of width and height", low=1, high=16, cure="2 is usual")
    strength: float | None = setting(
        None, "strength of the change", low=0, high=1, above=True, unset="0.3, or the model's if that is less",
        cure="0.3 is usual",
    )  # fmt: skip
    overlap: int | None = setting(
        None, "fewest pixels that tiles share", low=1, high=MAX_SIDE, unset="three eighths of a tile",
        metavar="PIXELS",
    )  # fmt: skip
    batch: int = setting(4, "tiles at once", low=1, high=MOST_IMAGES, metavar="N", flags=("-b", "--batch-size"))
    control: bool = setting(False, "use tiles as the control images of the networks")

    def __post_init__(self) -> None:
        check_all(self)


@dataclass(frozen=True)
class FromFiles:
    """Settings of flags and rows of files that replace arguments with images."""

    reference: Any = setting(
        None, "further reference image for a model that edits; --image is the first", group=IMAGE,
        metavar="FILE", repeats=True, also=("references",),
    )  # fmt: skip
    control_from: str | None = setting(
        None, "make the control image first: canny, invert, ...", group=CONTROL, metavar="KIND",
    )  # fmt: skip
    ip_image: Any = setting(
        None, "an image prompt, with its strength (1): photo.png:0.6", group=PROMPTS, metavar="FILE[:X]", repeats=True,
        also=("image_prompt",),
    )  # fmt: skip
    ip_mask: Any = setting(
        None, "mask of an image prompt: white where it acts; none for all", group=PROMPTS, metavar="FILE", repeats=True,
    )  # fmt: skip


@dataclass(frozen=True)
class OptionRecord:
    """The fields of ``canvax.Options``."""

    eta: float | None = setting(
        None, "noise that DDIM and ancestral samplers add", low=0, high=1, unset="the sampler's own",
        cure="leave it out for the sampler's own", group=SAMPLING, also=("ddim_eta",), infotext="Eta", per_image=True,
    )  # fmt: skip
    spacing: Spacing | None = setting(
        None, "spacing of the timesteps: leading, trailing or linspace", unset="the model's", group=SAMPLING,
        metavar="KIND", hint_without=("free spacing",), per_image=True,
    )  # fmt: skip
    sigmas: str | Sequence[float] | None = setting(
        None, "sigma schedule: karras, ays, ... (canvax samplers curves) or a list: 14.6,6,2,0.5,0",
        unset="the model's", group=SAMPLING, metavar="CURVE", read=read_levels, per_image=True,
    )  # fmt: skip
    sampler_settings: Mapping[str, Any] | Sequence[str] = setting(
        (), "setting of the sampler, for example s_churn=10", group=SAMPLING, metavar="NAME=VALUE",
        flags=("--set", "--sampler-settings"), repeats=True, read=read_pairs, per_image=True,
    )  # fmt: skip
    guidance_steps: Sequence[float] | None = setting(
        None, "guidance scale of each step", low=-MOST_GUIDANCE, high=MOST_GUIDANCE,
        cure="for example 7.5,5,2.5,1", group=SAMPLING, metavar="G,G,...", per_image=True,
    )  # fmt: skip
    guidance_interval: Sequence[float] = setting(
        (0.0, 1.0), "use guidance only from A to B of the run, for less work", low=0, high=1,
        length=2, cure="for example 0.2,0.8", group=SAMPLING, metavar="A,B", hint_without=("guidance",), per_image=True,
    )  # fmt: skip
    guidance_rescale: float = setting(
        0.0, "against over-exposure at high guidance", low=0, high=1, cure="0.7 is usual",
        group=SAMPLING, also=("cfg_rescale",), hint_without=("guidance",), per_image=True,
    )  # fmt: skip
    true_cfg_scale: float = setting(
        1.0, "for models that read the guidance scale: scale away from the negative prompt, at twice the work",
        low=1, high=MOST_GUIDANCE, cure="4 is usual", group=SAMPLING, per_image=True,
    )  # fmt: skip
    guidance_method: GuidanceFunction | GuidanceMethod | None = setting(
        None, "cfg, cfg_pp (scale 0..2), cfg_norm, cfg_zero or apg; in Python also a function or a rule",
        unset="cfg, of Qwen-Image 1 cfg_norm", group=SAMPLING,
        metavar="KIND", hint_without=("guidance",), read=read_guidance_method,
    )  # fmt: skip
    guidance_settings: Mapping[str, Any] | Sequence[str] = setting(
        (), "setting of the guidance method, for example norm=2.5", group=SAMPLING, metavar="NAME=VALUE", repeats=True,
        read=read_pairs,
    )  # fmt: skip
    pag_scale: float = setting(
        0.0, "perturbed-attention guidance; 3 is usual; one more evaluation for each step", low=0,
        high=100, cure="3 is usual", group=SAMPLING,
    )  # fmt: skip
    pag_adaptive_scale: float = setting(
        0.0, "decrease of pag_scale with the timestep", low=0, high=100, cure="0 is usual", group=SAMPLING,
        hint_without=("pag_scale",),
    )  # fmt: skip
    quality: Quality = setting(
        "full", "fast: from 20 steps on, forecast half of the evaluations, for nearly the same image",
        group=SAMPLING, metavar="full|fast", per_image=True,
    )  # fmt: skip
    reuse: int = setting(
        1,
        "compute the whole UNet in every N-th evaluation only, and forecast its deep features in the others; one more "
        "program",
        low=1, high=2**31 - 1, group=SAMPLING, metavar="N", closed={"server": _BATCHED},
    )  # fmt: skip
    reuse_layers: int = setting(
        1, "with reuse: outermost skip connections that are always computed; one program each", low=1,
        high=2**31 - 1, group=SAMPLING, metavar="N", hint_without=("reuse",), closed={"server": _BATCHED},
    )  # fmt: skip
    tiling: Tiling = setting(
        "auto", "decode in tiles, in less memory; auto: above 1536 x 1536 pixels", group=SAMPLING,
        metavar="auto|on|off", flags=("--tiling", "--vae-tiling"), closed={"server": "the size decides it"},
    )  # fmt: skip
    clip_skip: int = setting(
        0, "leave out the last N layers of the text encoder", low=0, group=SAMPLING, metavar="N",
        hint_without=("text",), infotext="Clip skip",
    )  # fmt: skip
    noise: NoiseKind = setting(
        "philox", "initial noise: philox, or torch (PyTorch's CPU generator)",
        cure="an array of noise is {latents}", group=SAMPLING, metavar="KIND", hint_without=("seed's noise",),
        infotext="RNG",
    )  # fmt: skip
    prompt_syntax: PromptSyntax = setting(
        "plain", "meaning of brackets in prompts: plain (none), a1111, comfy or compel", group=SAMPLING,
        metavar="KIND", hint_without=("text",),
    )  # fmt: skip
    progress: bool | Literal["programs"] = setting(
        True, "show compiling and evaluations on stderr; programs: compiling alone", group=PYTHON,
        closed={"command": _IN_PYTHON, "file": _IN_PYTHON, "server": "watch the job instead"},
    )  # fmt: skip
    callback: Callable[[Any], Any] | None = setting(
        None, "called after each evaluation with a canvax.Step", group=PYTHON,
        closed={"command": _IN_PYTHON, "file": _IN_PYTHON, "server": "the server runs no code of clients"},
    )  # fmt: skip
    strength_rule: StrengthRule = setting(
        "diffusers", "rule for the steps of a strength: diffusers, a1111 or exact", group=IMAGE, metavar="RULE",
        hint_without=("image", "strength below 1"),
    )  # fmt: skip
    image_encoding: ImageEncoding | None = setting(
        None, "latents of the image: the encoder's mean, or a random sample",
        unset="mean; sample with noise=torch and an AutoencoderKL", group=IMAGE,
        metavar="KIND", hint_without=("encoded image", "kept image"),
    )  # fmt: skip
    mask_mode: MaskMode = setting(
        "hard", "grey in a mask: hard rounds it, soft mixes, graded begins later", group=IMAGE, metavar="MODE",
        hint_without=("mask",),
    )  # fmt: skip
    mask_blur: float = setting(
        0.0, "blur of the mask's edges, a standard deviation", low=0, high=1000, cure="4 is usual",
        group=IMAGE, metavar="PIXELS", hint_without=("mask",),
    )  # fmt: skip
    mask_fill: MaskFill = setting(
        "original", "initial content of the masked part: original, fill, noise or nothing", group=IMAGE, metavar="KIND",
        hint_without=("mask", "mask over the image"),
    )  # fmt: skip
    mask_blend: MaskBlend = setting(
        "denoised", "method of keeping the rest: denoised, or renoised as in diffusers",
        group=IMAGE, metavar="KIND", hint_without=("mask",),
    )  # fmt: skip
    padding_mask_crop: int | None = setting(
        None, "generate only the masked part and this many pixels around it, at the full size", low=0,
        high=MAX_SIDE, cure="32 is usual", unset="the whole image", group=IMAGE, metavar="PIXELS",
        flags=("--padding-mask-crop", "--only-masked"),
    )  # fmt: skip
    outpaint: str | Sequence[int] | Mapping[str, int] | None = setting(
        None, "add pixels on these sides: left=64,right=64", group=IMAGE, metavar="SIDES", read=read_sides,
    )  # fmt: skip
    control_scale: float | Sequence[float] = setting(
        1.0, "strength of control; X,X for two networks, as for the next three", low=-10, high=10,
        cure="1 is as trained", group=CONTROL,
        also=("controlnet_conditioning_scale", "adapter_conditioning_scale", "control_weight"),
    )  # fmt: skip
    control_start: float | Sequence[float] = setting(
        0.0, "part of the run after which control begins", low=0, high=1, cure="0 is from the beginning",
        group=CONTROL, also=("control_guidance_start", "guidance_start"),
    )  # fmt: skip
    control_end: float | Sequence[float] = setting(
        1.0, "part of the run after which control ends", low=0, high=1, cure="1 is to the end", group=CONTROL,
        also=("control_guidance_end", "guidance_end", "adapter_conditioning_factor"),
    )  # fmt: skip
    control_mode: ControlMode | Sequence[ControlMode] = setting(
        "balanced", "preference: balanced, prompt, or control (the control image); guess needs no prompt",
        group=CONTROL, metavar="MODE",
        cure="give the type for a ControlNet-Union with its image, as in control=dict(depth=image)",
    )  # fmt: skip
    variation_seed: int | None = setting(
        None, "seed of noise to mix in", low=0, high=MAX_SEED, group=SAMPLING,
        metavar="SEED", flags=("--variation-seed", "--subseed"), also=("subseed",),
        hint_without=("variation_strength",), infotext="Variation seed", per_image=True,
    )  # fmt: skip
    variation_strength: float = setting(
        0.0, "share of the variation seed's noise", low=0, high=1, cure="0.1 changes little",
        group=SAMPLING, flags=("--variation-strength", "--subseed-strength"), also=("subseed_strength",),
        error_without="variation_seed=1", infotext="Variation seed strength", per_image=True,
    )  # fmt: skip
    seed_size: tuple[int, int] | None = setting(
        None, "keep the composition that the seed gives at this size", low=1, high=MAX_SIDE,
        cure="for example (1024, 1024)", group=SAMPLING, metavar=("HEIGHT", "WIDTH"), infotext="Seed resize from",
        per_image=True,
    )  # fmt: skip
    hires: float = setting(
        1.0, "second pass at this many times the size", low=1, high=8, cure="2 is usual", group=HIRES,
        flags=("--hires", "--hr-scale"), also=("hr_scale", "hires_scale"), infotext="Hires upscale",
    )  # fmt: skip
    hires_method: HiresMethod = setting(
        "pixel", "input of the second pass: pixel (the image), or latent", group=HIRES, metavar="KIND",
        error_without="hires=2",
    )  # fmt: skip
    hires_strength: float | None = setting(
        None, "strength of the second pass", low=0, high=1, above=True, cure="0.4 is usual",
        unset="{pixel:g}; with latent {latent:g}".format(**HIRES_STRENGTHS), group=HIRES, error_without="hires=2",
        infotext="Denoising strength",
    )  # fmt: skip
    hires_steps: int | None = setting(
        None, "steps of the second pass", low=1, unset="the first pass's", group=HIRES, metavar="N",
        also=("hr_second_pass_steps",), error_without="hires=2", infotext="Hires steps",
    )  # fmt: skip
    hires_sampler: str | None = setting(
        None, "sampler of the second pass", unset="the first pass's", cure="canvax samplers lists them", group=HIRES,
        metavar="NAME", also=("hr_sampler_name",), error_without="hires=2", infotext="Hires sampler",
    )  # fmt: skip
    hires_prompt: str | Sequence[str] | None = setting(
        None, "prompt of the second pass", unset="the first pass's", group=HIRES, metavar="TEXT", also=("hr_prompt",),
        error_without="hires=2", infotext="Hires prompt",
    )  # fmt: skip
    denoising_start: float = setting(
        0.0, "begin at this part of the run, from latents of a run that stopped there (denoising_end)", low=0,
        high=1, cure="0.8 is usual between base and refiner", group=PYTHON,
        closed={"command": _IN_PYTHON, "file": _IN_PYTHON, "server": _NO_LATENTS},
    )  # fmt: skip
    denoising_end: float = setting(
        1.0, "stop after this part of the run: Result.latents are noisy then, and are not decoded", low=0, high=1,
        cure="0.8 is usual between base and refiner", group=PYTHON,
        closed={"command": _IN_PYTHON, "file": _IN_PYTHON, "server": _NO_LATENTS},
    )  # fmt: skip
    prompt_2: str | Sequence[str] | None = setting(
        None, "prompt of the second text encoder", unset="the prompt", group=SDXL, metavar="TEXT",
        hint_without=("prompt as text",), per_image=True,
    )  # fmt: skip
    negative_prompt_2: str | Sequence[str] | None = setting(
        None, "negative prompt of the second text encoder", unset="the negative prompt", group=SDXL, metavar="TEXT",
        hint_without=("guidance", "negative prompt as text"), per_image=True,
    )  # fmt: skip
    original_size: tuple[int, int] | None = setting(
        None, "size of training images to imitate; small ones are blurred", low=1, high=MOST_TRAINED,
        unset="the image's size", cure="for example (1024, 1024)", group=SDXL, metavar=("HEIGHT", "WIDTH"),
    )  # fmt: skip
    crops_coords_top_left: tuple[int, int] = setting(
        (0, 0), "crop of training images to imitate", low=0, high=MOST_TRAINED,
        cure="(0, 0) is not cropped", group=SDXL, metavar=("TOP", "LEFT"),
    )  # fmt: skip
    target_size: tuple[int, int] | None = setting(
        None, "size of the training images after resizing", low=1, high=MOST_TRAINED, unset="the image's size",
        cure="for example (1024, 1024)", group=SDXL, metavar=("HEIGHT", "WIDTH"),
    )  # fmt: skip
    negative_original_size: tuple[int, int] | None = setting(
        None, "original_size for the negative prompt", low=1, high=MOST_TRAINED, cure="for example (1024, 1024)",
        group=SDXL, metavar=("HEIGHT", "WIDTH"), hint_without=("guidance",),
    )  # fmt: skip
    negative_crops_coords_top_left: tuple[int, int] | None = setting(
        None, "crops_coords_top_left for the negative prompt", low=0, high=MOST_TRAINED, cure="for example (0, 0)",
        group=SDXL, metavar=("TOP", "LEFT"), hint_without=("guidance",),
    )  # fmt: skip
    negative_target_size: tuple[int, int] | None = setting(
        None, "target_size for the negative prompt", low=1, high=MOST_TRAINED, cure="for example (1024, 1024)",
        group=SDXL, metavar=("HEIGHT", "WIDTH"), hint_without=("guidance",),
    )  # fmt: skip
    aesthetic_score: float | None = setting(
        None, "aesthetic score for the refiner, about 1 to 10", cure="6 is usual", unset="6", group=SDXL,
    )  # fmt: skip
    negative_aesthetic_score: float | None = setting(
        None, "aesthetic score to avoid, for the refiner", cure="2.5 is usual", unset="2.5", group=SDXL,
        hint_without=("guidance",),
    )  # fmt: skip
