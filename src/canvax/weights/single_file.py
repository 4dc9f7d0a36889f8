"""A whole model in one safetensors file, as most sites share them: Stable Diffusion 1.x, 2.x, XL and its refiner.

Such a file has only arrays. The kind of model, its sizes and its schedule are inferred from names and shapes; the
tokenizer is CLIP's, from the package. Unused arrays are an error, as in a folder. Files are written with the names of
the original Stable Diffusion code, which A1111, ComfyUI and PyTorch diffusers read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from canvax.errors import CheckpointError, warn
from canvax.weights.entries import Entry
from canvax.weights.files import ModelFiles, open_weights
from canvax.weights.formats import OPEN_CLIP, numbered, unet_rules, vae_rules
from canvax.weights.identify import BASES, MODEL, UNET, VAE, expect, parts_missing
from canvax.weights.rules import Names
from canvax.weights.safetensors import ArrayToSave, read_metadata

CLIP = Path(__file__).parent.parent / "assets" / "clip"
"""CLIP's tokenizers: ``tokenizer`` pads with the end token, ``tokenizer_2`` with "!", as OpenCLIP does."""

_HF, _OPEN = "transformer.", "model."
_ONE = "cond_stage_model."
_XL = ("conditioner.embedders.0.", "conditioner.embedders.1.")

_IGNORED = re.compile(
    r"(model_ema\..*|alphas_cumprod.*|betas|sqrt_.*|log_one_minus_.*|posterior_.*|logvar|lvlb_weights|global_step|"
    r"scale_factor|embedding_manager.*|cond_stage_model\.(text_projection|model\.visual\..*)|"
    r"denoiser\.sigmas|.*\.position_ids|.*logit_scale|.*\.attn_mask|v_pred|ztsnr|edm_vpred\..*|first_stage_model\.loss\..*)"
)
"""Arrays that do not affect images: schedules, averages, markers and remains of training."""

_OTHER_INPUTS = {8: "edits images by instructions", 5: "reads depths", 7: "enlarges images"}
_STATED = "modelspec.prediction_type"
_PREDICTIONS = {"v": "v_prediction", "v_prediction": "v_prediction", "epsilon": "epsilon", "eps": "epsilon"}
"""Names of prediction types in a file's metadata."""

_LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.")

_V_BIAS = 0.09
"""A 2.x model predicts v if a bias has a larger standard deviation; the released models have 0.04 and 0.14."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a model in one file.

    Attributes:
        name: the family.
        pipeline: pipeline class of diffusers.
        encoders: component -> prefix of its arrays' names.
        open_clip: components with OpenCLIP's names.
        architecture: ModelSpec's name of the architecture.
    """

    name: str
    pipeline: str
    encoders: Mapping[str, str]
    open_clip: tuple[str, ...] = ()
    architecture: str = ""


SD1 = Layout(BASES[768], "StableDiffusionPipeline", {"text_encoder": _ONE + _HF}, (), "stable-diffusion-v1")
SD2 = Layout(BASES[1024], "StableDiffusionPipeline", {"text_encoder": _ONE + _OPEN}, ("text_encoder",))
XL = Layout(
    BASES[2048],
    "StableDiffusionXLPipeline",
    {"text_encoder": _XL[0] + _HF, "text_encoder_2": _XL[1] + _OPEN},
    ("text_encoder_2",),
    "stable-diffusion-xl-v1-base",
)
REFINER = Layout(
    BASES[1280],
    "StableDiffusionXLImg2ImgPipeline",
    {"text_encoder_2": _XL[0] + _OPEN},
    ("text_encoder_2",),
    "stable-diffusion-xl-v1-refiner",
)
KINDS = (XL, REFINER, SD2, SD1)


def open_single_file(name: str, path: Path, *, prediction: str | None = None, vae: bool = True) -> ModelFiles:
    """Open a model in one safetensors file; only weights that determine the prediction type are read.

    Args:
        name: name as the caller wrote it.
        path: the file.
        prediction: prediction type, if the caller knows it; otherwise a guess causes a warning.
        vae: require an autoencoder.

    Raises:
        CheckpointError: it contains no model that canvax supports, or more than one.
    """
    arrays = open_weights(path, plain_names=False)
    names = {array.name for array in arrays}
    expect(name, {array.name: array.shape for array in arrays}, MODEL)
    kind = next((kind for kind in KINDS if all(_any(names, start) for start in kind.encoders.values())), None)
    lacking = [part for part in parts_missing(names) if vae or part != "an autoencoder"]
    if lacking:
        raise CheckpointError(
            f"{name}: holds no whole model: it lacks {' and '.join(lacking)}. "
            "Pass a whole one, or a folder in the diffusers layout (for families of other packages, only a folder)"
            + ("; an autoencoder may be given with vae=." if lacking == ["an autoencoder"] else ".")
        )
    if kind is None:
        raise CheckpointError(f"{name}: its text encoders are none of Stable Diffusion 1.x, 2.x or XL")
    if {"edm_mean", "edm_std"} & names:
        raise CheckpointError(f"{name}: is trained as Playground v2.5; pass its folder in the diffusers layout")
    starts = (UNET, VAE, *kind.encoders.values())
    strange = sorted(name for name in names if not name.startswith(starts) and not _IGNORED.fullmatch(name))
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise CheckpointError(f"{name}: holds arrays that {kind.name} has no use for: {', '.join(strange[:3])}{more}")
    metadata = {} if prediction else read_metadata(path)
    predicts, why = (prediction, "as you say") if prediction else _prediction(arrays, kind, metadata)
    files = single_files(name, path, kind, arrays, (predicts, why), zero_snr="ztsnr" in names)
    if (channels := files.config("unet")["in_channels"]) in _OTHER_INPUTS:
        raise CheckpointError(
            f"{name}: its UNet {_OTHER_INPUTS[channels]} ({channels} channels), which canvax does not"
        )
    stated = metadata.get(_STATED, "").strip()
    if stated and stated.lower() not in _PREDICTIONS:
        warn(
            f"{name}: its header says {_STATED}={stated!r:.80}, which canvax does not know ('v' and 'epsilon' are "
            f"usual); read as {predicts}. prediction_type= or --prediction-type sets another one"
        )
    return files


def single_files(
    name: str, path: Path, kind: Layout, arrays: Sequence[Entry], prediction: tuple[str, str], *, zero_snr: bool
) -> ModelFiles:
    """Return the files of a model from the arrays of its file.

    Args:
        name: name as the caller wrote it.
        path: the file.
        kind: kind of model.
        arrays: all arrays of the file.
        prediction: prediction type of the UNet, and the evidence.
        zero_snr: True if its last training step was pure noise.

    Raises:
        CheckpointError: parts of the model are missing.
    """
    parts = _parts(kind, arrays)
    scheduler = _scheduler(kind, prediction[0], zero_snr)
    classes = {
        part: "CLIPTextModelWithProjection" if part.endswith("_2") else "CLIPTextModel" for part in kind.encoders
    }
    try:
        shapes = {part: {array.name: array.shape for array in arrays} for part, arrays in parts.items()}
        configs = {
            "unet": _unet_config(kind, shapes["unet"], prediction[0]),
            "vae": vae_config(shapes["vae"], _of_vae(kind)),
            "scheduler": scheduler,
            **{part: _text_config(kind, shapes[part], part, classes[part]) for part in kind.encoders},
        }
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{name}: is not a whole model ({kind.name}, without {error}); it may hold a part of one"
        ) from None
    tokenizers = {part.replace("text_encoder", "tokenizer"): "CLIPTokenizer" for part in kind.encoders}
    class_names = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": scheduler["_class_name"]}
    components = {**class_names, **classes, **tokenizers}
    pipeline = kind.pipeline
    if configs["unet"]["in_channels"] == 9:
        pipeline = pipeline.replace("Pipeline", "InpaintPipeline")
    index = {"_class_name": pipeline, **{part: ["diffusers" if part in class_names else "transformers", of]
                                         for part, of in components.items()}}  # fmt: skip
    if kind in (XL, REFINER):
        index |= {"force_zeros_for_empty_prompt": kind is XL, "requires_aesthetics_score": kind is REFINER}

    def folder(component: str) -> Path:
        """Return the package's folder of tokenizers."""
        fills_up = component == "tokenizer_2" or (component == "tokenizer" and kind is SD2)
        return CLIP / ("tokenizer_2" if fills_up else component)

    starts = ", ".join(start.rstrip(".") for start in kind.encoders.values())
    end = "as the array ztsnr says" if zero_snr else "as all that have no array ztsnr"
    reasons = {
        "kind": f"{kind.name}: it has {starts}",
        "prediction_type": f"{prediction[0]}, {prediction[1]}",
        "zero_snr": f"{'yes' if zero_snr else 'no'}, {end}",
    }
    return ModelFiles(name, path, index, components, configs, parts.__getitem__, folder, reasons=reasons)


def single_arrays(
    kind: Layout, parts: Mapping[str, Sequence[ArrayToSave]], *, v_prediction: bool, zero_snr: bool
) -> list[ArrayToSave]:
    """Return all arrays of the file.

    Args:
        kind: kind of model.
        parts: the arrays of each component, as PyTorch diffusers stores them.
        v_prediction: True if the UNet predicts v; SDXL's files mark it by an empty array.
        zero_snr: True if the last training step was pure noise, marked in the same way.
    """
    arrays = []
    for component, start in {"unet": UNET, "vae": VAE, **kind.encoders}.items():
        names = _names(kind, component, [part.name for part in parts[component]])
        renamed = names.to_external(parts[component]) if names else parts[component]
        if component in kind.encoders and kind is SD2:
            # It reads OpenCLIP's last layer but one. diffusers omits the last layer, the original code does not.
            layers = 1 + max(_layer_of(array.name) for array in renamed)
            renamed = [*renamed, *(replace(array, name=array.name.replace(f".{layers - 1}.", f".{layers}.", 1))
                           for array in renamed if _layer_of(array.name) == layers - 1)]  # fmt: skip
        arrays += [replace(array, name=start + array.name) for array in renamed]
    marks = {"v_pred": v_prediction and kind is XL, "ztsnr": zero_snr}
    none = np.zeros(0, np.float32)
    return arrays + [ArrayToSave(name, (0,), none.dtype, lambda: none) for name, marked in marks.items() if marked]


def single_metadata(kind: Layout, *, v_prediction: bool, inpaints: bool) -> dict[str, str]:
    """Return ModelSpec's header (version 1.0.1): facts that the arrays do not determine."""
    plain = kind.architecture or ("stable-diffusion-v2-768-v" if v_prediction else "stable-diffusion-v2-512")
    return {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": plain + ("-inpainting" if inpaints else ""),
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        _STATED: "v" if v_prediction else "epsilon",
    }


def as_read(
    path: Path, kind: Layout, arrays: Sequence[ArrayToSave], *, v_prediction: bool, zero_snr: bool
) -> ModelFiles:
    """Return the files that reading the file would give, before it is written."""
    entries = [Entry(array.name, array.shape, array.dtype, path, ((0, array.nbytes),), "torch") for array in arrays]
    prediction = ("v_prediction" if v_prediction else "epsilon"), f"as {_STATED} says"
    return single_files(str(path), path, kind, entries, prediction, zero_snr=zero_snr)


def _names(kind: Layout, component: str, names: Collection[str]) -> Names | None:
    """Return the rules of a component, from its arrays' names in either layout; None for names of diffusers."""
    if component in ("unet", "vae"):
        return Names(unet_rules(names) if component == "unet" else vae_rules(names))
    return OPEN_CLIP if component in kind.open_clip else None


def _parts(kind: Layout, arrays: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the arrays of each component under internal names."""
    parts = {}
    for component, start in {"unet": UNET, "vae": VAE, **kind.encoders}.items():
        stored = [replace(array, name=array.name.removeprefix(start)) for array in arrays
               if array.name.startswith(start) and not _IGNORED.fullmatch(array.name)]  # fmt: skip
        if component in kind.encoders and kind is SD2:  # its last layer and projection are not used
            last = max((_layer_of(array.name) for array in stored), default=-1)
            stored = [
                array for array in stored if array.name != "text_projection" and not 0 <= last == _layer_of(array.name)
            ]
        names = _names(kind, component, [array.name for array in stored])
        parts[component] = names.to_internal(stored) if names else stored
    return parts


def _layer_of(name: str) -> int:
    """Return the layer of OpenCLIP's text encoder that an array belongs to; -1 for none."""
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def _unet_config(kind: Layout, shapes: Mapping[str, tuple[int, ...]], prediction: str) -> dict[str, Any]:
    levels = numbered(shapes, r"down_blocks\.(\d+)\.")
    widths = [shapes[f"down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)]
    depths = [numbered(shapes, rf"down_blocks\.{i}\.attentions\.0\.transformer_blocks\.(\d+)\.") for i in range(levels)]
    first = min(name for name in shapes if name.endswith("attn2.to_k.weight"))
    has = [depth > 0 for depth in depths]
    middle = numbered(shapes, r"mid_block\.attentions\.0\.transformer_blocks\.(\d+)\.")
    deep = {depth for depth in (*depths, middle) if depth}
    config = {
        "_class_name": "UNet2DConditionModel",
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": shapes["conv_out.weight"][0],
        "block_out_channels": widths,
        "layers_per_block": numbered(shapes, r"down_blocks\.0\.resnets\.(\d+)\."),
        "down_block_types": ["CrossAttnDownBlock2D" if attends else "DownBlock2D" for attends in has],
        "up_block_types": ["CrossAttnUpBlock2D" if attends else "UpBlock2D" for attends in reversed(has)],
        "cross_attention_dim": shapes[first][1],
        "transformer_layers_per_block": middle if deep == {middle} else [*(d or 1 for d in depths[:-1]), middle],
        "use_linear_projection": kind is not SD1,
        "attention_head_dim": 8 if kind is SD1 else [width // 64 for width in widths],
        "sample_size": {SD1: 64, SD2: 96 if prediction == "v_prediction" else 64}.get(kind, 128),
        "upcast_attention": kind is SD2 and prediction == "v_prediction",
    }
    if kind in (XL, REFINER):
        config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
        config["projection_class_embeddings_input_dim"] = shapes["add_embedding.linear_1.weight"][1]
    return config


def _of_vae(kind: Layout) -> dict[str, Any]:
    """Return the config fields that an autoencoder's arrays do not determine."""
    large = kind in (XL, REFINER)
    return {"scaling_factor": 0.13025 if large else 0.18215, "sample_size": 1024 if large else 512}


def _text_config(kind: Layout, shapes: Mapping[str, tuple[int, ...]], name: str, cls: str) -> dict[str, Any]:
    shapes = {key.removeprefix("text_model."): shape for key, shape in shapes.items()}
    vocabulary, width = shapes["embeddings.token_embedding.weight"]
    projection = shapes.get("text_projection.weight")
    return {
        **({"projection_dim": projection[1]} if projection else {}),
        "architectures": [cls],
        "model_type": "clip_text_model",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shapes["encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": numbered(shapes, r"encoder\.layers\.(\d+)\."),
        "num_attention_heads": max(1, width // 64),
        "max_position_embeddings": shapes["embeddings.position_embedding.weight"][0],
        "hidden_act": "gelu" if name in kind.open_clip else "quick_gelu",
        "bos_token_id": 49406,
        "eos_token_id": 2 if kind in (XL, REFINER) else 49407,  # 2: the largest id, as in the released configs
    }


def _scheduler(kind: Layout, prediction: str, zero_snr: bool) -> dict[str, Any]:
    kinds = {SD1: "PNDMScheduler", SD2: "DDIMScheduler"}
    config = {
        "_class_name": kinds.get(kind, "EulerDiscreteScheduler"),
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000,
        "prediction_type": prediction,
        "steps_offset": 1,
        "timestep_spacing": "trailing" if zero_snr else "leading",
    }
    config |= {"set_alpha_to_one": False} if kind in (SD1, SD2) else {}
    config |= {"skip_prk_steps": True} if kind is SD1 else {}
    return config | ({"rescale_betas_zero_snr": True} if zero_snr else {})


def vae_config(shapes: Mapping[str, tuple[int, ...]], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an autoencoder from its arrays; other fields are those of ``rest``."""
    if not shapes:
        return {"_class_name": "AutoencoderKL", **rest}
    levels = numbered(shapes, r"encoder\.down_blocks\.(\d+)\.")
    widths = [shapes[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)]
    of_decoder = [shapes[f"decoder.up_blocks.{i}.resnets.0.conv1.weight"][0] for i in reversed(range(levels))]
    return {
        "_class_name": "AutoencoderKLFlux2" if "bn.running_mean" in shapes else "AutoencoderKL",
        **({"decoder_block_out_channels": of_decoder} if of_decoder != widths else {}),
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": numbered(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        **rest,
    }


def _prediction(arrays: Sequence[Entry], kind: Layout, metadata: Mapping[str, str]) -> tuple[str, str]:
    """Return ``epsilon`` or ``v_prediction``, and the evidence."""
    stated = metadata.get(_STATED, "").strip().lower()
    if stated in _PREDICTIONS:
        return _PREDICTIONS[stated], f"as {_STATED} says"
    if any(array.name == "v_pred" for array in arrays):
        return "v_prediction", "as the array v_pred says"
    if kind is SD2:
        wanted = f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"
        bias = next((array.read().astype(np.float32) for array in arrays if array.name == wanted), None)
        if bias is not None:
            spread = float(bias.std())
            predicts, other = ("v_prediction", "epsilon") if spread > _V_BIAS else ("epsilon", "v_prediction")
            return predicts, (
                f"a guess by the spread of a bias, {spread:.2f}; if images are grey or burnt, load it with "
                f"prediction_type={other!r} (--prediction-type {other})"
            )
    return "epsilon", "as all of its kind that say nothing"


def _any(names: Collection[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)
