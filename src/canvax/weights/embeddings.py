"""Reads textual inversions (Gal et al. 2022): vectors for a word, for one text encoder or two.

diffusers       an array named like the word: [D] or [n, D]; for SDXL a second file for the second encoder
A1111           emb_params [n, D]; for SDXL clip_l [n, 768] and clip_g [n, 1280]
in a LoRA file  bundle_emb.NAME.emb_params, .string_to_param.*, .clip_l, .clip_g
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from canvax.call import MOST_VECTORS
from canvax.errors import CheckpointError, InputError
from canvax.types import HostArray
from canvax.weights.entries import PICKLES, Entry
from canvax.weights.identify import BASES, EMBEDDING, expect
from canvax.weights.location import pickle_refused
from canvax.weights.safetensors import open_safetensors

BUNDLED = "bundle_emb."
"""Prefix of embeddings in a LoRA file."""

_MOST_NAME = 200
_ENDS = (".string_to_param.*", ".emb_params", ".clip_l", ".clip_g", ".*")
_BY_KEY = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}
_UNNAMED = ("emb_params", "string_to_param.*", "*")
_WIDTHS = {**BASES, 1280: "the second encoder of Stable Diffusion XL"}


@dataclass(frozen=True, eq=False)
class Embedding:
    """A word and its vectors.

    Attributes:
        name: the word, as prompts write it.
        vectors: [n, D] float32 for each text encoder that the file is for, by component.
    """

    name: str
    vectors: Mapping[str, HostArray]


def read_embeddings(
    paths: Sequence[Path], widths: Mapping[str, int], token: str | Sequence[str] | None = None
) -> list[Embedding]:
    """Read the embeddings of a file, or of the two files of a model with two text encoders.

    Args:
        paths: safetensors files.
        widths: width of each text encoder's tokens, by component.
        token: the word; several words take one vector each. By default the name in the file, or the file's name.

    Raises:
        CheckpointError: a file is damaged, has other contents, or is for another model.
        InputError: ``token`` cannot name the file's vectors.
    """
    embeddings: dict[str, dict[str, HostArray]] = {}
    for path in paths:
        for name, component, vectors in _read_file(path, widths):
            if component in embeddings.setdefault(name, {}):
                raise CheckpointError(f"{path}: holds vectors of {name!r} for {component} twice")
            embeddings[name][component] = vectors
    if token is not None:
        if len(embeddings) > 1:
            raise InputError(
                "token",
                f"is one name, and {paths[0]} holds {len(embeddings)} embeddings",
                cure="leave it out",
                value=token,
            )
        embeddings = _renamed(next(iter(embeddings.values())), token)
    return [Embedding(check_token(name), vectors) for name, vectors in embeddings.items()]


def read_word(path: Path, name: str, widths: Mapping[str, int]) -> Embedding:
    """Read a file from the folder of textual inversions; the word is the file's name.

    Raises:
        CheckpointError: it is a pickle or damaged, has other contents, or is not for all text encoders of the model.
        InputError: its name cannot be a word.
    """
    if path.suffix.lower() in PICKLES:
        raise CheckpointError(pickle_refused(path))
    (embedding,) = read_embeddings([path], widths, name)
    if missing := widths.keys() - embedding.vectors.keys():
        raise CheckpointError(f"{path}: has no vectors for {min(missing)}: it was made for another model")
    return embedding


def bundled_embeddings(path: Path, entries: Sequence[Entry], widths: Mapping[str, int]) -> list[Embedding]:
    """Read the embeddings in a LoRA file.

    Raises:
        CheckpointError: they are for another model.
    """
    embeddings: dict[str, dict[str, HostArray]] = {}
    for entry in entries:
        if entry.name.startswith(BUNDLED):
            name = entry.name.removeprefix(BUNDLED)
            end = next((end for end in _ENDS if name.endswith(end) and len(name) > len(end)), "")
            component = _component(path, entry, end.removeprefix("."), widths)
            embeddings.setdefault(name.removesuffix(end), {})[component] = _vectors(path, entry)
    return [Embedding(check_token(name), vectors) for name, vectors in embeddings.items()]


def check_token(name: object) -> str:
    """Return ``name`` if a prompt can contain it as a word.

    Raises:
        InputError: it cannot.
    """
    if not isinstance(name, str) or not name.strip() or len(name) > _MOST_NAME or not name.isprintable():
        raise InputError("token", "cannot be a word of a prompt", cure="give another one with {token}", value=name)
    if name.strip().lower() in ("<|startoftext|>", "<|endoftext|>"):
        raise InputError(
            "token", "is what CLIP begins and ends prompts with", cure="give another one with {token}", value=name
        )
    return name.strip()


def _read_file(path: Path, widths: Mapping[str, int]) -> list[tuple[str, str, HostArray]]:
    """Return the name, component and vectors of each array."""
    entries = open_safetensors(path, plain_names=False)
    expect(path, {entry.name: entry.shape for entry in entries}, EMBEDDING)
    if strange := [entry for entry in entries if len(entry.shape) not in (1, 2)]:
        raise CheckpointError(
            f"{path}: {strange[0].name} is {strange[0].shape}; a textual inversion holds vectors (n, width)"
        )
    embeddings = []
    for entry in entries:
        unnamed = entry.name in _UNNAMED or entry.name in _BY_KEY
        component = _component(path, entry, entry.name, widths)
        embeddings.append((path.stem if unnamed else entry.name, component, _vectors(path, entry)))
    return embeddings


def _component(path: Path, entry: Entry, key: str, widths: Mapping[str, int]) -> str:
    """Return the text encoder whose tokens have this width."""
    width = entry.shape[-1] if entry.shape else 0
    component = _BY_KEY.get(key) or next((name for name, other in widths.items() if other == width), "")
    if component not in widths or widths[component] != width:
        known = f" ({_WIDTHS[width]})" if width in _WIDTHS else ""
        if not widths:
            raise CheckpointError(f"{path}: a textual inversion needs CLIP's text encoder, which this model lacks")
        expected = " and ".join(f"{size} ({name})" for name, size in widths.items())
        raise CheckpointError(
            f"{path}: {entry.name} has vectors of width {width}{known}, this model's tokens have {expected}: it was "
            "made for another model"
        )
    return component


def _vectors(path: Path, entry: Entry) -> HostArray:
    if not entry.is_float:
        raise CheckpointError(f"{path}: {entry.name} is {entry.dtype.name}, not floating point numbers")
    vectors = entry.read().astype(np.float32).reshape(-1, entry.shape[-1])
    if not 1 <= len(vectors) <= MOST_VECTORS:
        raise CheckpointError(f"{path}: {entry.name} has {len(vectors)} vectors, not 1 to {MOST_VECTORS}")
    if not np.isfinite(vectors).all():
        raise CheckpointError(f"{path}: {entry.name} has values that are not finite (NaN or infinity)")
    return vectors


def _renamed(vectors: Mapping[str, HostArray], token: str | Sequence[str]) -> dict[str, dict[str, HostArray]]:
    """Return the vectors under the user's names."""
    if isinstance(token, str):
        return {token: dict(vectors)}
    names, count = list(token), {len(array) for array in vectors.values()}
    if count != {len(names)} or len(set(names)) < len(names):
        problem = f"has {len(set(names))} names for {max(count)} vectors"
        raise InputError("token", problem, cure="give one for each", value=names)
    return {name: {part: array[i : i + 1] for part, array in vectors.items()} for i, name in enumerate(names)}
