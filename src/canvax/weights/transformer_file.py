"""A transformer in a separate file, as in ComfyUI; text encoder and autoencoder are further files.

    FLUX.1     [model.diffusion_model.]double_blocks.0.img_mod.lin.weight
    Z-Image    [model.diffusion_model.]layers.0.attention.qkv.weight
    FLUX.2     [model.diffusion_model.]single_blocks.0.linear1.weight
    Krea 2     [model.diffusion_model.]blocks.0.attn.wq.weight
    Qwen-Image [model.diffusion_model.]transformer_blocks.0.img_mlp.gate_up.weight
    Anima      [model.diffusion_model. or net.]blocks.0.self_attn.q_proj.weight, with llm_adapter.

A checkpoint of ComfyUI has the other parts as well: text_encoders.t5xxl.transformer.encoder. ..., vae.decoder. ...;
they are opened by their own names (``canvax.weights.overrides``).

The file is a safetensors or a GGUF file. Sizes are inferred from shapes. Facts that neither these nor the other parts
determine are in the family's ``SingleFile``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, InputError
from canvax.families.base import Family
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles, open_weights
from canvax.weights.folder import is_tokenizer, library_of
from canvax.weights.identify import INSIDE, bare_name, transformer_family
from canvax.weights.rules import Names


def parts_beside(family: Family) -> tuple[str, ...]:
    """Return the arguments of ``canvax.load`` for the parts that are not in a transformer's file."""
    return (*(part for part in family.classes if part.startswith("text_encoder")), "vae")


def open_transformer_file(name: str, path: Path, given: Collection[str] = ()) -> ModelFiles | None:
    """Return the files of a model whose transformer is a separate file; None for other files. No array is read.

    Args:
        name: name as the caller wrote it.
        path: the file.
        given: parts that the caller supplies.

    Raises:
        InputError: parts are neither in the file nor supplied.
        CheckpointError: the transformer is incomplete.
    """
    entries = open_weights(path, plain_names=False)
    family = transformer_family({entry.name for entry in entries})
    if family is None or (layout := family.single_file) is None:
        return None
    if missing := [f"{{{part}=FILE}}" for part in parts_beside(family) if part not in given]:
        raise InputError(
            "model", f"is the transformer of {family.title} alone", cure=f"add {' and '.join(missing)}", value=name
        )
    entries = [entry for entry in entries if not entry.name.startswith(tuple(INSIDE.values()))]
    arrays = [replace(entry, name=bare_name(entry.name)) for entry in entries]
    marks = {array.name: array.shape for array in arrays if array.name.startswith(layout.unused)}
    arrays = [array for array in arrays if array.name not in marks]
    parts = {
        part: [replace(array, name=array.name.removeprefix(start)) for array in arrays if array.name.startswith(start)]
        for part, (start, _) in layout.inside.items()
    }
    starts = tuple(start for start, _ in layout.inside.values())
    parts["transformer"] = [array for array in arrays if not array.name.startswith(starts)]
    try:
        named = Names(family.names).to_internal(parts["transformer"])
        config = layout.config({**marks, **{array.name: array.shape for array in named}})
        config |= layout.named(path.stem) if layout.named else {}
        inside = {
            part: config_of({array.name: array.shape for array in parts[part]})
            for part, (_, config_of) in layout.inside.items()
        }
    except (KeyError, IndexError) as error:
        raise CheckpointError(f"{name}: is not a whole transformer of {family.title}, it lacks {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from None

    def read(component: str) -> list[Entry]:
        return parts.get(component, [])

    configs: dict[str, Mapping[str, Any]] = {"transformer": config, **inside, **layout.configs}
    classes = {part: kinds[0] for part, kinds in family.classes.items() if kinds}
    classes["scheduler"] = configs["scheduler"]["_class_name"]
    components = {part: [library_of(part), kind] for part, kind in classes.items()}
    configs["scheduler"] = {**configs["scheduler"], **(layout.schedule(config) if layout.schedule else {})}
    reasons = {"kind": f"{family.title}: it has {layout.marks[0]}"}
    index = dict(layout.index(config, path.stem) if callable(layout.index) else layout.index)
    if (by_name := layout.is_distilled(path.stem)) is not None:
        is_distilled, why = by_name
        if layout.base:  # the schedule of a checkpoint determines it
            fact = next(iter(layout.base))
            configs["scheduler"] = {**configs["scheduler"], **({} if is_distilled else layout.base)}
            value = configs["scheduler"][fact]
        else:
            fact, value = "is_distilled", "yes" if is_distilled else "no"
            index[fact] = is_distilled
        reasons[fact] = f"{value}, {why}"
    return ModelFiles(
        name,
        path,
        {"_class_name": family.pipelines[0], **index, **components},
        {part: kind for part, kind in classes.items() if part in layout.packaged or not is_tokenizer(part)},
        configs,
        read,
        lambda part: layout.packaged.get(part, path / part),
        reasons=reasons,
    )
