"""Which file is which in a diffusers folder. Choosing works on file names alone, for the disk and the Hub alike.

A repository often holds the same weights several times: float32 and float16 variants, pickles, Flax files. One set of
files is chosen for each component: safetensors of the variant asked for, plain safetensors, then Flax msgpack.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

from canvax.errors import CheckpointError, InputError
from canvax.files import DAMAGED, read_json
from canvax.weights.safetensors import open_safetensors

INDEX = "model_index.json"

DEFAULTS = "canvax.json"
"""Optional, beside the index: steps and guidance that suit the model."""

Kind = Literal["diffusers", "transformers"]

KINDS: dict[str, Kind] = {
    "unet": "diffusers",
    "vae": "diffusers",
    "text_encoder": "transformers",
    "text_encoder_2": "transformers",
}
"""Components whose weights canvax reads, and the library whose file names they use."""

OTHER_KINDS: dict[str, Kind] = {"safety_checker": "transformers"}
"""Components that are read if they are asked for."""

PLAIN_FILES: dict[str, tuple[str, ...]] = {
    "scheduler": ("scheduler_config.json",),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_2"),
        (
            *("tokenizer.json", "vocab.json", "merges.txt"),
            *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        ),
    ),
}
"""Components without weights, and the files of theirs that canvax reads."""

STEMS: dict[Kind, str] = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
FLAX_FILES: dict[Kind, str] = {"diffusers": "diffusion_flax_model.msgpack", "transformers": "flax_model.msgpack"}

PICKLES = (".ckpt", ".bin", ".pt", ".pth", ".pkl", ".pickle")
_REFUSED = (
    "canvax does not open pickles (.ckpt, .bin, .pt), which can run code. Take the tensors out, without running "
    "anything: canvax convert"
)
PICKLE_REFUSED = f"{_REFUSED} FILE.ckpt FILE.safetensors"

_VARIANT = re.compile(r"[A-Za-z0-9_\-]+")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")


@dataclass(frozen=True)
class WeightPlan:
    """The weight file chosen for a component.

    Attributes:
        file: name inside the component's folder; the index if the weights are sharded.
        sharded: whether ``file`` is an index.
        variant: the variant the file belongs to, None for the plain one.
    """

    file: str
    sharded: bool
    variant: str | None


def pickle_refused(path: Path) -> str:
    """Why a pickle is not opened, and the command that makes a safetensors file of it."""
    new = path.with_suffix(".safetensors")
    return f"{_REFUSED} {shlex.quote(str(path))} {shlex.quote(str(new))}"


def config_file(component: str) -> str:
    """The name of a component's config file."""
    return f"{component.removesuffix('_2')}_config.json" if component in PLAIN_FILES else "config.json"


def check_variant(variant: str | None) -> None:
    """Refuse a variant that cannot be part of a file name."""
    if variant is not None and (not isinstance(variant, str) or not _VARIANT.fullmatch(variant)):
        raise InputError(f"variant = {variant!r} is not a variant name; use something like 'fp16', or leave it out.")


def plan_weights(names: Collection[str], kind: Kind, variant: str | None, where: str) -> WeightPlan:
    """Choose one weight file among the ``names`` in a component's folder; ``where`` names the folder in errors.

    Without a file of the ``variant``, the plain one is taken: repositories often hold variants of some components only.

    Raises:
        CheckpointError: there is nothing that can be read; says what there is instead.
    """
    stem = STEMS[kind]
    for wanted in dict.fromkeys((variant, None)):
        infix = f".{wanted}" if wanted else ""
        if f"{stem}{infix}.safetensors" in names:
            return WeightPlan(f"{stem}{infix}.safetensors", False, wanted)
        if f"{stem}.safetensors.index{infix}.json" in names:
            return WeightPlan(f"{stem}.safetensors.index{infix}.json", True, wanted)
    if FLAX_FILES[kind] in names:
        return WeightPlan(FLAX_FILES[kind], False, None)
    others = variants(names, kind)
    if others:
        raise CheckpointError(
            f"{where}: holds only variants of the weights; pass variant={others[0]!r}{_or(others[1:])}."
        )
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        raise CheckpointError(f"{where}: holds only {pickles[0]}. {PICKLE_REFUSED}.")
    raise CheckpointError(
        f"{where}: no weights found: neither {stem}.safetensors (or its index) nor {FLAX_FILES[kind]} is there. "
        "Download the folder again, or check that it is in the diffusers layout."
    )


def variants(names: Collection[str], kind: Kind) -> list[str]:
    """The variants for which safetensors files are there."""
    stem = re.escape(STEMS[kind])
    pattern = re.compile(rf"{stem}\.(?:safetensors\.index\.([\w\-]+)\.json|([\w\-]+)\.safetensors)")
    matches = [match for match in map(pattern.fullmatch, names) if match]
    return sorted({_SHARD.sub("", match[1] or match[2]) for match in matches})


def shard_names(index: Path) -> list[str]:
    """The files that a sharded checkpoint's index names, which must be plain names beside the index."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index}: has no weight_map. {DAMAGED}")
    for name in table.values():
        plain = isinstance(name, str) and PurePosixPath(name).name == PureWindowsPath(name).name == name
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: names the shard {str(name)[:80]!r}, which is not a safetensors file name.")
    return sorted(set(table.values()))


def _check_shards(index: Path, shards: Sequence[Path]) -> None:
    """Look for every tensor that a sharded checkpoint's index names in the shard that it names.

    Raises:
        CheckpointError: naming the first that is not there.
    """
    held = {shard.name: {entry.name for entry in open_safetensors(shard)} for shard in shards}
    for tensor, shard in read_json(index)["weight_map"].items():
        if tensor not in held[shard]:
            raise CheckpointError(f"{index}: says that {tensor[:80]!r} is in {shard}, which has none. {DAMAGED}")


def find_weights(folder: Path, kind: Kind, variant: str | None = None) -> list[Path]:
    """The weight files of one component's folder: one file, or all shards.

    Raises:
        CheckpointError: the folder, its weights or a shard is missing, or there are only pickles.
    """
    plan = plan_weights(names_in(folder), kind, variant, str(folder))
    if not plan.sharded:
        return [folder / plan.file]
    shards = [folder / name for name in shard_names(folder / plan.file)]
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise CheckpointError(
            f"{folder}: {len(absent)} of {len(shards)} shards are missing, for example {absent[0]}. "
            "Download the checkpoint again."
        )
    _check_shards(folder / plan.file, shards)
    return shards


def names_in(folder: Path) -> list[str]:
    """The names of a folder's files.

    Raises:
        CheckpointError: the folder is missing or cannot be read.
    """
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: the folder is missing. Download the checkpoint again.") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: the folder cannot be read ({error.strerror}).") from None


def _or(names: list[str]) -> str:
    return "".join(f" or variant={name!r}" for name in names)


_PARTS = {
    **dict.fromkeys(
        ("ControlNetModel", "ControlNetUnionModel", "FlaxControlNetModel", "T2IAdapter"),
        "pass a model, and this to controlnet= or --controlnet",
    ),
    **dict.fromkeys(("AutoencoderKL", "AutoencoderTiny"), "pass a model, and this to vae= or --vae"),
    "UNet2DConditionModel": f"pass the folder of the whole model, with {INDEX} in it",
}
"""Where a folder with a single network goes, by its class."""


def why_no_index(names: Collection[str], folder: Path | None = None) -> str:
    """Why a ``folder`` with these files and no index is not a checkpoint, and what to do."""
    if folder is not None and "config.json" in names:
        with suppress(CheckpointError):
            kind = str(read_json(folder / "config.json").get("_class_name"))
            if kind in _PARTS:
                return f"is a network alone ({kind}), not a model; {_PARTS[kind]}."
    files = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not files:
        return f"has no {INDEX}, only {pickles[0]}. {PICKLE_REFUSED}."
    single = f" If {files[0]} is a whole model, fetch it and pass the file." if files else ""
    if files and folder is not None:
        single = f" Pass one of its files, such as {folder / files[0]}; canvax info {folder} says what they are."
    below = sorted(path.parent for path in folder.glob(f"*/{INDEX}")) if folder is not None else []
    cure = f" {below[0].name} in it has one: pass {below[0]}." if below else single
    if not cure and folder is not None:  # the folder of models of other programs
        inner = [next(folder.glob(f"{name}/*.safetensors"), None) for name in ("checkpoints", "Stable-diffusion")]
        cure = next((f" Pass the file of a model in it, such as {one}." for one in inner if one is not None), "")
    return f"has no {INDEX}, so it is not a checkpoint in the diffusers layout.{cure}"
