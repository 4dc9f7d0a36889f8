"""Recognises a file or folder of weights, and the family it is for, from headers only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from canvax.errors import CheckpointError, InputError
from canvax.families.base import Family, Shapes
from canvax.families.flux import FLUX
from canvax.families.known import AUTOENCODERS, MODELS, families
from canvax.families.qwen_image_1 import QWEN_IMAGE_1, file_title
from canvax.files import read_json
from canvax.images.formats import FORMATS
from canvax.weights.adapter_names import is_adapters, split_name
from canvax.weights.entries import PICKLES, UPSCALER, WEIGHTS, foreign, is_upscaler, open_weight_file
from canvax.weights.files import open_weights
from canvax.weights.folder import INDEX, INDICES
from canvax.weights.safetensors import read_metadata
from canvax.weights.scales import UnreadFormat

UNET, VAE = "model.diffusion_model.", "first_stage_model."
"""Prefixes of these parts in a single file."""

INSIDE = {"text_encoder": "text_encoders.", "text_encoder_2": "text_encoders.", "vae": "vae."}
"""Prefixes of the parts next to a transformer in ComfyUI's file of a whole model, by argument of ``canvax.load``."""

_TEXT = ("cond_stage_model.", "conditioner.")
_OF_A_UNET = ("down_blocks.", "mid_block.", "up_blocks.", "time_embedding.", "add_embedding.", "conv_")
_OF_A_VAE = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "conv1.", "conv2.", "bn.", VAE)
_LANGUAGE_MODEL = re.compile(r"((model\.)?(language_model\.)?layers\.0\.self_attn\.q_proj|blk\.0\.attn_q)\.weight")
_T5 = re.compile(r"(encoder\.block\.0\.layer\.0\.SelfAttention\.q|enc\.blk\.0\.attn_q)\.weight")
_CLIP = re.compile(r"(text_model\.)?encoder\.layers\.0\.self_attn\.q_proj\.weight")
_T2I = re.compile(r"adapter\.body\.0\.|body\.\d+\.(body\.\d+\.)?block1\.")
_UNFINISHED = (".crdownload", ".part", ".partial", ".download", ".aria2", ".incomplete", ".opdownload")
"""Suffixes that browsers and downloaders give to incomplete files."""

DAMAGED = "damaged"
_HEAD = 64

BASES = {
    768: "Stable Diffusion 1.x",
    1024: "Stable Diffusion 2.x",
    2048: "Stable Diffusion XL",
    1280: "the refiner of Stable Diffusion XL",
}
"""Width of the text that cross-attention reads -> the family."""

OTHERS = {
    "double_blocks": "FLUX", "single_transformer_blocks": "FLUX",
    **dict.fromkeys(
        ("txt_mlp", "txt_mod", "transformer_blocks.59.", "transformer_blocks_59_"), "Qwen-Image 1 or its Edit models"
    ),
    "joint_blocks": "Stable Diffusion 3",
    "add_q_proj": "Stable Diffusion 3", "lora_prior": "Stable Cascade", "lora_transformer_": "a transformer",
}  # fmt: skip
"""Parts of names that only families without a UNet have."""


FLUX_CONTROLNET = "FluxControlNetModel"


def is_flux_control(names: Collection[str]) -> bool:
    """Return whether a file is a ControlNet of FLUX.1."""
    marks = (("controlnet_x_embedder.", "time_text_embed.text_embedder."), ("pos_embed_input.", "double_blocks.0."))
    return any(all(any(name.startswith(mark) for name in names) for mark in pair) for pair in marks)


class FileKind(NamedTuple):
    """A kind of file.

    Attributes:
        name: display name with its article.
        cure: advice for errors.
        flag: the command-line flag that accepts it.
        is_this: recognises the kind by names and shapes of arrays.
    """

    name: str
    cure: str
    flag: str
    is_this: Callable[[Shapes], bool]


_WHOLE = f"pass the folder of the whole model ({INDEX} is in it)"


def _any(*starts: str) -> Callable[[Shapes], bool]:
    return lambda shapes: any(name.startswith(starts) for name in shapes)


def _all(*starts: str) -> Callable[[Shapes], bool]:
    """Return a test for files of a single network. AnimateDiff's modules, which have a UNet's names, are excluded."""
    return lambda shapes: all(name.startswith(starts) and "motion_modules." not in name for name in shapes)


CONTROLNET = FileKind(
    "a ControlNet", "pass it to controlnet (--controlnet)", "--controlnet",
    lambda shapes: is_flux_control(shapes) or _any(
        "control_model.", "input_hint_block.", "controlnet_cond_embedding.", "controlnet_down_blocks.",
        "lora_controlnet",
    )(shapes),
)  # fmt: skip
LLLITE = FileKind("a ControlLLLite", "canvax does not have this method", "", _any("lllite_"))
IP_ADAPTER = FileKind(
    "an IP-Adapter",
    "pass it to pipe.with_ip_adapter (--ip-adapter)",
    "--ip-adapter",
    _any("ip_adapter.", "image_proj."),
)
LORA = FileKind(
    "a LoRA", "pass it to pipe.adapters.load (--lora)", "--lora", lambda shapes: any(map(is_adapters, shapes))
)
T2I_ADAPTER = FileKind(
    "a T2I-Adapter",
    "pass it to controlnet (--controlnet)",
    "--controlnet",
    lambda shapes: any(map(_T2I.match, shapes)),
)
EMBEDDING = FileKind(
    "a textual inversion", "pass it to pipe.adapters.load_embedding (--embedding)", "--embedding",
    # Vectors named like words; names of weights have dots.
    lambda shapes: all("." not in name and len(shape) in (1, 2) for name, shape in shapes.items()),
)  # fmt: skip
AUTOENCODER = FileKind("an autoencoder", "pass it to vae (--vae)", "--vae", _all(*_OF_A_VAE))
UNET_ALONE = FileKind("a UNet alone", _WHOLE, "", _all(*_OF_A_UNET))
TEXT_ALONE = FileKind(
    "a text encoder alone", f"pass it to text_encoder (--text-encoder) with FLUX.1, else {_WHOLE}", "--text-encoder",
    lambda shapes: _all("text_model.")(shapes) or any(map(_CLIP.fullmatch, shapes)),
)  # fmt: skip
T5 = FileKind(
    "T5", "pass it to text_encoder_2 (--text-encoder-2) with FLUX.1, to text_encoder (--text-encoder) with Chroma",
    "--text-encoder-2 with FLUX.1, --text-encoder with Chroma", lambda shapes: any(map(_T5.fullmatch, shapes)),
)  # fmt: skip
LANGUAGE_MODEL = FileKind(
    "a language model", "pass it to text_encoder (--text-encoder)", "--text-encoder",
    lambda shapes: any(map(_LANGUAGE_MODEL.fullmatch, shapes)),
)  # fmt: skip
TRANSFORMER = FileKind(
    "a transformer alone", "pass it to canvax.load (--model) with its other parts", "--model",
    lambda shapes: transformer_family(shapes) is not None,
)  # fmt: skip
MODEL = FileKind("a model", "pass it to canvax.load (--model)", "--model", _any(UNET, *_TEXT))
KINDS = (
    *(CONTROLNET, LLLITE, IP_ADAPTER, LORA, T2I_ADAPTER, EMBEDDING, T5, LANGUAGE_MODEL, AUTOENCODER, UNET_ALONE),
    *(TEXT_ALONE, TRANSFORMER, MODEL),
)  # fmt: skip
"""All kinds; the first that matches is the kind of a file."""

CLASSES: Mapping[str, FileKind] = {
    **dict.fromkeys(
        ("ControlNetModel", "FlaxControlNetModel", "ControlNetUnionModel", "ControlNetModel_Union", FLUX_CONTROLNET),
        CONTROLNET,
    ),
    "T2IAdapter": T2I_ADAPTER,
    **dict.fromkeys((*AUTOENCODERS, "FlaxAutoencoderKL"), AUTOENCODER),
    "UNet2DConditionModel": UNET_ALONE,
}
"""Kind of a folder with one network, by the class in its config."""


def bare_name(name: str) -> str:
    """Return an array's name in a transformer's file without a prefix."""
    return name.removeprefix(UNET).removeprefix("net.")


def transformer_family(names: Collection[str]) -> Family | None:
    """Return the family of the transformer in a file; None for other files."""
    plain = list(map(bare_name, names))
    for family in families():
        layout = family.single_file
        if layout and all(any(name.startswith(mark) for name in plain) for mark in layout.marks):
            return family
    return None


def identify(shapes: Shapes) -> FileKind | None:
    """Return the kind of a file from the names and shapes of its arrays; None if it is unknown."""
    return next((kind for kind in KINDS if kind.is_this(shapes)), None) if shapes else None


def expect(name: str | Path, shapes: Shapes, *wanted: FileKind, for_unet: bool = True) -> None:
    """Refuse a file of another kind than the accepted ones, or, if required, one that is not for a UNet.

    Raises:
        CheckpointError: names the arguments that accept it.
    """
    if not shapes:
        raise CheckpointError(f"{name}: is empty: it holds no array")
    kind = identify(shapes)
    if kind is not None and kind not in wanted:
        raise CheckpointError(f"{name}: is {kind.name}, not {wanted[0].name}; {kind.cure}")
    if for_unet and (other := family_of(shapes)[0]) in OTHERS.values():
        raise CheckpointError(f"{name}: is for {other}; canvax runs {MODELS}")


def family_of(shapes: Shapes, metadata: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Return the family of models that a file is or is for, "" if unknown, and the width of the text it reads, or 0."""
    if is_flux_control(shapes):
        return FLUX.title, 0
    if known := transformer_family(shapes):
        return known.title, 0
    for piece, family in OTHERS.items():
        if any(piece in name for name in shapes):
            return family, 0
    if width := next(filter(None, (_width_read(name, shape) for name, shape in shapes.items())), 0):
        return BASES.get(width, ""), width
    if any(name.startswith("lora_te2_") for name in shapes) or "clip_g" in shapes:
        return BASES[2048], 0
    stated = " ".join((metadata or {}).get(key, "") for key in ("ss_base_model_version", "modelspec.architecture"))
    for words, width in ((("sdxl", "xl-"), 2048), (("sd_v2", "diffusion-v2"), 1024), (("sd_v1", "diffusion-v1"), 768)):
        if any(word in stated for word in words):
            return BASES[width], 0
    if any(name.startswith("lora_te_") for name in shapes):
        return "Stable Diffusion 1.x or 2.x", 0
    widths = {shape[-1] for shape in shapes.values() if shape}
    return BASES.get(min(widths), "") if len(widths) == 1 and EMBEDDING.is_this(shapes) else "", 0


def _width_read(name: str, shape: tuple[int, ...]) -> int:
    """Return the width of the text that an array reads; 0 if it reads none."""
    split = split_name(name)
    module = (split.module if split else name.removesuffix(".weight")).replace(".", "_")
    reads = split is None or split.role in ("down", "diff") or name.endswith(".hada_w1_b")
    return shape[1] if reads and len(shape) > 1 and module.endswith(("attn2_to_k", "to_k_ip")) else 0


class FileReport(NamedTuple):
    """Kind of a file or folder.

    Attributes:
        path: its path.
        kind_name: display name of the kind, such as "a LoRA".
        family: family of the model, such as "Stable Diffusion 1.x"; "" if unknown.
        kind: None for files that are not weights of a known kind.
    """

    path: Path
    kind_name: str
    family: str = ""
    kind: FileKind | None = None


def inspect(path: Path) -> FileReport | None:
    """Identify a file, or a folder in the diffusers layout; None for anything else. No pickle is opened."""
    if path.is_dir():
        return _inspect_folder(path)
    suffix = path.suffix.lower()
    if suffix in PICKLES and is_upscaler(path):
        return FileReport(path, UPSCALER)
    if kind_name := _by_ending(suffix):
        return FileReport(path, kind_name)
    if suffix not in WEIGHTS:
        return None
    try:
        shapes = {entry.name: entry.shape for entry in open_weights(path, plain_names=False)}
        metadata = read_metadata(path) if suffix == ".safetensors" else {}
    except UnreadFormat as error:
        return FileReport(path, f"weights of {error.format}, which canvax does not read")
    except CheckpointError:
        return FileReport(path, _unreadable(path))
    except InputError:
        return FileReport(path, 'a GGUF file, which needs pip install ".[gguf]"')
    kind, family = identify(shapes), family_of(shapes, metadata)[0]
    if family in OTHERS.values() and kind is not LORA:
        return FileReport(path, "weights that canvax does not run", family)
    missing = parts_missing(shapes) if kind is MODEL else []
    if kind is TRANSFORMER and family == QWEN_IMAGE_1.title:
        family = file_title(shapes, path.stem)
    if kind is TRANSFORMER and all(any(name.startswith(start) for name in shapes) for start in INSIDE.values()):
        return FileReport(path, MODEL.name, family, kind)
    kind_name = kind.name if kind else UPSCALER if is_upscaler(path) else "not recognised"
    if missing:
        kind_name = f"a model without {' and '.join(missing)}"
    return FileReport(path, kind_name, family, None if missing else kind)


def listing(folder: Path) -> Iterator[FileReport]:
    """Return the files in a folder and its subfolders."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name.lower())):
        part = inspect(path)
        if part is not None:
            yield part
        elif path.is_dir() and not path.is_symlink():
            yield from listing(path)


def unreadable(path: Path) -> str:
    """Return the format of a weight file that canvax cannot open as a model."""
    return _by_ending(path.suffix.lower()) or "no safetensors file"


def parts_missing(names: Collection[str]) -> list[str]:
    """Return the parts that a single file of a whole model lacks."""
    parts = {"a UNet": UNET, "an autoencoder": VAE, "a text encoder": _TEXT}
    return [part for part, start in parts.items() if not any(name.startswith(start) for name in names)]


def _unreadable(path: Path) -> str:
    try:
        with open_weight_file(path) as file:
            return foreign(file.read(_HEAD)) or DAMAGED
    except CheckpointError:
        return DAMAGED


def _by_ending(suffix: str) -> str:
    if suffix in PICKLES:
        return "a pickle, which is not opened"
    if suffix in FORMATS:
        return "an image"
    if suffix in _UNFINISHED:
        return "a download that has not finished; fetch it whole"
    return ""


def _inspect_folder(folder: Path) -> FileReport | None:
    if any((folder / name).is_file() for name in INDICES):
        return FileReport(folder, MODEL.name, _family_of_config(_json(folder / "unet" / "config.json")), MODEL)
    config = _json(folder / "config.json")
    name = str(config.get("_class_name"))
    if (kind := CLASSES.get(name)) is not None and kind.flag:
        family = FLUX.title if name == FLUX_CONTROLNET else _family_of_config(config)
        return FileReport(folder, kind.name, family, kind)
    return (
        FileReport(folder, f"a network alone ({name})", _family_of_config(config)) if "_class_name" in config else None
    )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def _family_of_config(config: Mapping[str, Any]) -> str:
    width = config.get("cross_attention_dim")
    return BASES.get(width, "") if isinstance(width, int) else ""
