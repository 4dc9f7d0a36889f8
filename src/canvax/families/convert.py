"""Converts models between forms: a folder in the diffusers layout, one file, PyTorch's pickles to safetensors.

Arrays are copied from file to file as they are stored, one at a time; no device is used.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from canvax.errors import CheckpointError, InputError, check_flag, warn
from canvax.families.base import Model
from canvax.families.known import family_of
from canvax.families.local_models import completed
from canvax.families.read import read_model
from canvax.files import check_writable, named_path
from canvax.models.clip import clip_configs
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.params import flatten
from canvax.tokenizers.clip import ClipTokenizer
from canvax.types import DType, Params
from canvax.weights.cast import parse_dtype
from canvax.weights.entries import PICKLES, check_head, is_pickle, open_weight_file
from canvax.weights.files import ModelFiles
from canvax.weights.folder import INDICES
from canvax.weights.load import stored_components
from canvax.weights.location import Location, check_source, warn_unused_cache
from canvax.weights.open import open_files
from canvax.weights.overrides import Overrides
from canvax.weights.pickled import Pickled, read_pickled
from canvax.weights.safetensors import ArrayToSave, write_safetensors
from canvax.weights.save import arrays_of, narrowed, writing
from canvax.weights.single_file import KINDS, as_read, single_arrays, single_metadata

_ALIKE = {
    *("sample_size", "transformer_layers_per_block", "attention_head_dim", "num_attention_heads"),
    *("eos_token_id", "projection_dim"),
}
"""Config fields that have several spellings or that specs determine."""


def convert(
    model: str | Path,
    output: str | Path,
    *,
    dtype: DType | None = None,
    overwrite: bool = False,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_encoder_2: str | Path | None = None,
    tokenizer: str | Path | None = None,
    **source: Any,
) -> Path:
    """Write a model in another form; without a cast, the bits are the same.

    Args:
        model: a model as a folder, a file or a Hub id; a PyTorch pickle with any tensors; or a folder of PyTorch
            pickles.
        output: a name with the suffix .safetensors for one file, otherwise a folder in the diffusers layout. From a
            pickle only .safetensors, with the pickle's names; from a folder of them a folder. There, pickles that
            cannot be read or whose file exists are left out with a warning.
        dtype: dtype of the written arrays; by default unchanged.
        overwrite: write into a folder that is not empty, or over a file.
        vae: autoencoder that replaces the model's, or that a file lacks, as in ``canvax.load``.
        text_encoder: language model, as ``vae``.
        text_encoder_2: T5 of FLUX.1, as ``vae``.
        tokenizer: tokenizer of the language model, as ``vae``.
        source: ``revision``, ``variant``, ``token``, ``cache_dir``, ``local_files_only`` and ``progress`` as in
            ``canvax.load``.

    Returns:
        ``output``.

    Raises:
        InputError: an argument is invalid, or the form does not support the model.
        CheckpointError: the model is missing, damaged or refused.
    """
    check_flag("overwrite", overwrite)
    dtype = None if dtype is None else parse_dtype(dtype)
    output, single = named_path("output", output), str(output).lower().endswith(".safetensors")
    if not single and output.suffix.lower() in PICKLES and not output.is_dir():
        raise InputError("output", "is neither a folder nor a file that ends in .safetensors", value=output)
    if single and output.is_dir():
        raise InputError("output", "is a folder", cure="choose another name", value=output)
    if single and os.path.lexists(output) and not overwrite:
        raise InputError("output", "exists already", cure="choose another name, or pass overwrite=True", value=output)
    check_writable("output", output.parent if single else output)
    known = ("revision", "variant", "token", "cache_dir", "local_files_only", "progress")
    check_source(source, "model", *known)
    path, origin = named_path("model", model), Location(model, **source)
    overrides = completed(
        Overrides.of(vae, text_encoder=text_encoder, text_encoder_2=text_encoder_2, tokenizer=tokenizer), origin
    )
    warn_unused_cache(origin.cache_dir, model, *overrides.parts.values())
    if path.is_file() and _is_pickle(path):
        origin.warn_unused("revision", "variant")
        if not single:
            raise InputError(
                "output",
                f"is a folder: {path.name} is read as a pickle, which becomes one file",
                cure="name one ending in .safetensors",
                value=output,
            )
        return _from_pickle(path, output, dtype)
    if not single and path.is_dir() and (pickles := _pickles_in(path)):
        return _from_pickles(pickles, output, dtype, overwrite=overwrite)
    files = overrides.apply(open_files(origin, accept=_of_a_family, given=overrides.parts), **source)
    opened = read_model(files, np.float32)
    params = stored_components(files, opened.components)
    if not single:
        return opened.save(output, params, dtype=dtype, overwrite=overwrite)
    return _written(output, *_single(opened, params, output, dtype))


def _written(output: Path, arrays: list[ArrayToSave], metadata: Mapping[str, str]) -> Path:
    with writing("output", output):
        write_safetensors(output, arrays, metadata)
    return output


def _of_a_family(index: Mapping[str, Any]) -> None:
    """Refuse an unsupported kind of model before downloading it."""
    family_of(index)


def _is_pickle(path: Path) -> bool:
    with open_weight_file(path) as file:
        if is_pickle(head := file.read(64)):
            return True
    if path.suffix.lower() in PICKLES:
        check_head(path, head)
        raise CheckpointError(f"{path}: is none of the files that torch.save writes; download or save it again")
    return False


def _from_pickle(path: Path, output: Path, dtype: DType | None) -> Path:
    pickled = read_pickled(path)
    arrays, metadata = _embedding(pickled) or (list(pickled.arrays), {"format": "pt"})
    _written(output, [_cast(array, dtype) for array in arrays], metadata)
    if pickled.left_out:
        more = f" and {len(pickled.left_out) - 5} more" if len(pickled.left_out) > 5 else ""
        warn(f"{path}: left out what is no tensor: {', '.join(pickled.left_out[:5])}{more}")
    return output


def _pickles_in(folder: Path) -> list[Path]:
    """Return the pickles of a folder, unless a model or a network is in it."""
    files = sorted(folder.iterdir())
    alone = not {*INDICES, "config.json"} & {path.name for path in files}
    return [path for path in files if alone and path.suffix.lower() in PICKLES]


def _from_pickles(pickles: Sequence[Path], output: Path, dtype: DType | None, *, overwrite: bool) -> Path:
    for path in pickles:
        new = output / path.with_suffix(".safetensors").name
        if os.path.lexists(new) and not overwrite:
            warn(f"{path}: left out, since {new} exists")
            continue
        try:
            _is_pickle(path)
            _from_pickle(path, new, dtype)
        except CheckpointError as fault:
            warn(f"left out {fault}")
    return output


def _embedding(pickled: Pickled) -> tuple[list[ArrayToSave], dict[str, str]] | None:
    """Return an embedding of A1111 under the name that its safetensors files have; None for other files."""
    vectors = [array for array in pickled.arrays if array.name.startswith("string_to_param.")]
    if len(vectors) != 1:
        return None
    return [dataclasses.replace(vectors[0], name="emb_params")], {"format": "pt", **pickled.texts}


def _cast(array: ArrayToSave, dtype: DType | None) -> ArrayToSave:
    if dtype is None or array.dtype == dtype or array.dtype.kind not in "fV":
        return array
    return dataclasses.replace(array, dtype=np.dtype(dtype), get=lambda: narrowed(array.get(), dtype))


def _single(
    model: Model, params: Params, output: Path, dtype: DType | None
) -> tuple[list[ArrayToSave], dict[str, str]]:
    """Return all arrays of one file that reads back as the same model."""
    if not isinstance(model.networks.denoiser, UNetDenoiser):
        problem = f"is one file, which cannot hold {model.name}, a model of several files"
        raise InputError("output", problem, cure="write a folder (a name without .safetensors)", value=output)
    config = model.files.config("scheduler")
    says = {
        "v_prediction": config.get("prediction_type") == "v_prediction",
        "zero_snr": bool(config.get("rescale_betas_zero_snr")),
    }
    parts = {part.name: arrays_of(part, params[part.name], dtype) for part in model.components}
    faults: list[str] = []
    for kind in KINDS:
        if kind.encoders.keys() != clip_configs(model.text).keys():
            continue
        arrays = single_arrays(kind, parts, **says)
        faults = list(_differences(model, as_read(output, kind, arrays, **says)))
        if not faults:
            return arrays, single_metadata(kind, v_prediction=says["v_prediction"], inpaints=model.networks.inpaints)
    raise InputError(
        "output",
        f"is one file, which cannot say what {model.name} is: {'; '.join(faults[:4])}",
        cure="write a folder (a name without .safetensors)",
        value=output,
    )


def _differences(model: Model, single: ModelFiles) -> Iterator[str]:
    """Return the differences of the model that reading the file would give."""
    for name, tokenizer in model.tokenizers.items():
        clip = ClipTokenizer.from_folder(single.folder(name.replace("text_encoder", "tokenizer")))
        if (tokenizer.backend.get_vocab(), tokenizer.pad) != (clip.backend.get_vocab(), clip.pad):
            yield "its tokenizer is not CLIP's"
    try:
        yield from _other_networks(model.networks, model.family.read(single))
    except CheckpointError as error:
        yield str(error)
    before, after = model.files.config("scheduler"), single.config("scheduler")
    for name in ("beta_start", "beta_end", "beta_schedule", "num_train_timesteps", "prediction_type"):
        if before.get(name, after[name]) != after[name]:
            yield f"scheduler: {name} is {before[name]!r}, not {after[name]!r}"


def _other_networks(before: Networks, after: Networks) -> Iterator[str]:
    specs, original = (
        {name: dict(flatten(spec)) for name, spec in networks.specs().items()} for networks in (before, after)
    )
    for name, spec in specs.items():
        if spec != original[name]:
            yield f"{name}: its parameters are not those of this kind of model"
    pairs = [("unet", before.config, after.config), ("vae", before.vae, after.vae)]
    pairs += [(name, cfg, clip_configs(after.text)[name]) for name, cfg in clip_configs(before.text).items()]
    for name, our_cfg, other in pairs:
        for field in (field.name for field in dataclasses.fields(our_cfg)):
            if field not in _ALIKE and getattr(our_cfg, field) != getattr(other, field):
                yield f"{name}: {field} is {getattr(our_cfg, field)!r}, not {getattr(other, field)!r}"
