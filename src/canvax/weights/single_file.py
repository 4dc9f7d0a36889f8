"""A whole model in one safetensors file, as most sites share them: Stable Diffusion 1.x, 2.x, XL and its refiner.

Such a file holds arrays and nothing else. What kind of model it is, its sizes and its schedule are read off names and
shapes; the tokenizer is CLIP's, which is in the package. Arrays that nothing asks for are an error, as in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from canvax.errors import CheckpointError, warn
from canvax.weights.adapter_names import OF_A_UNET, OF_A_VAE, all_begin
from canvax.weights.entries import Entry
from canvax.weights.ldm_names import count_layers, open_clip_entries, unet_entries, vae_entries
from canvax.weights.lora import OTHERS
from canvax.weights.safetensors import open_safetensors, read_metadata

CLIP = Path(__file__).parent.parent / "assets" / "clip"
"""CLIP's tokenizer: ``tokenizer`` fills up with the end token, ``tokenizer_2`` with "!" as OpenCLIP does."""

_WHOLE = "pass the folder of the whole model (model_index.json is in it)"
PARTS = (
    (OF_A_VAE, "an autoencoder", "pass a model, and this to vae= or --vae"),
    (OF_A_UNET, "a UNet", _WHOLE),
    (("text_model.",), "a text encoder", _WHOLE),
)
"""How the names of networks by themselves begin, and what to do with them."""
UNET, VAE = "model.diffusion_model.", "first_stage_model."
_HF, _OPEN = "transformer.", "model."
_ONE = "cond_stage_model."
_XL = ("conditioner.embedders.0.", "conditioner.embedders.1.")

_IGNORED = re.compile(
    r"(model_ema\..*|alphas_cumprod.*|betas|sqrt_.*|log_one_minus_.*|posterior_.*|logvar|lvlb_weights|global_step|"
    r"scale_factor|embedding_manager.*|cond_stage_model\.(text_projection|model\.visual\..*)|"
    r"denoiser\.sigmas|.*\.position_ids|.*logit_scale|.*\.attn_mask|v_pred|ztsnr|edm_vpred\..*|first_stage_model\.loss\..*)"
)
"""Arrays that are no weights of what generates: schedules, averages, marks and what training left."""

_OTHER_INPUTS = {8: "edits images by instructions", 5: "is told depths", 7: "enlarges images"}
_TOLD = "modelspec.prediction_type"
_PREDICTIONS = {"v": "v_prediction", "v_prediction": "v_prediction", "epsilon": "epsilon", "eps": "epsilon"}
"""What a file's metadata may say of what it predicts."""

_V_BIAS = 0.09
"""Standard deviation of a bias of 2.x, above which it predicts v: those of the released models are 0.04 and 0.14."""


@dataclass(frozen=True, eq=False)
class Kind:
    """Of a model in one file.

    Attributes:
        name: for people.
        pipeline: class of diffusers.
        encoders: component -> the beginning of its arrays' names.
        open_clip: those that have OpenCLIP's names.
    """

    name: str
    pipeline: str
    encoders: Mapping[str, str]
    open_clip: tuple[str, ...] = ()


SD1 = Kind("Stable Diffusion 1.x", "StableDiffusionPipeline", {"text_encoder": _ONE + _HF})
SD2 = Kind("Stable Diffusion 2.x", "StableDiffusionPipeline", {"text_encoder": _ONE + _OPEN}, ("text_encoder",))
XL = Kind(
    "Stable Diffusion XL",
    "StableDiffusionXLPipeline",
    {"text_encoder": _XL[0] + _HF, "text_encoder_2": _XL[1] + _OPEN},
    ("text_encoder_2",),
)
REFINER = Kind(
    "the refiner of Stable Diffusion XL",
    "StableDiffusionXLImg2ImgPipeline",
    {"text_encoder_2": _XL[0] + _OPEN},
    ("text_encoder_2",),
)
KINDS = (XL, REFINER, SD2, SD1)


@dataclass(frozen=True, eq=False)
class SingleFile:
    """A ``canvax.weights.files.ModelFiles`` of one file.

    Attributes:
        name: the path as it was given.
        path: the file.
        kind: of model.
        arrays: all that it holds.
        prediction: what the UNet predicts, and how that is known.
        zero_snr: whether its last step of training was noise alone.
    """

    name: str
    path: Path
    kind: Kind
    arrays: Sequence[Entry]
    prediction: tuple[str, str]
    zero_snr: bool
    revision: None = None
    variant: None = None
    unread: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def reasons(self) -> dict[str, str]:
        """What was read off the file beside its shapes, and how that is known."""
        starts = ", ".join(start.rstrip(".") for start in self.kind.encoders.values())
        end = "as the array ztsnr says" if self.zero_snr else "as all that have no array ztsnr"
        return {
            "kind": f"{self.kind.name}: it has {starts}",
            "prediction_type": f"{self.prediction[0]}, {self.prediction[1]}",
            "zero_snr": f"{'yes' if self.zero_snr else 'no'}, {end}",
        }

    @property
    def components(self) -> Mapping[str, str]:
        """As in ``ModelFiles``."""
        with_projection = {"text_encoder_2": "CLIPTextModelWithProjection"}
        encoders = {name: with_projection.get(name, "CLIPTextModel") for name in self.kind.encoders}
        tokenizers = {name.replace("text_encoder", "tokenizer"): "CLIPTokenizer" for name in self.kind.encoders}
        others = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": self._scheduler["_class_name"]}
        return {**others, **encoders, **tokenizers}

    @property
    def index(self) -> Mapping[str, Any]:
        """As in ``ModelFiles``."""
        pipeline = self.kind.pipeline
        if self._config["unet"]["in_channels"] == 9:
            pipeline = pipeline.replace("Pipeline", "InpaintPipeline")
        parts = {name: ["transformers" if "text" in name or "token" in name else "diffusers", of]
                 for name, of in self.components.items()}  # fmt: skip
        own = {"force_zeros_for_empty_prompt": self.kind is XL, "requires_aesthetics_score": self.kind is REFINER}
        return {"_class_name": pipeline, **parts, **(own if self.kind in (XL, REFINER) else {})}

    def config(self, component: str) -> dict[str, Any]:
        """As in ``ModelFiles``."""
        if component == "scheduler":
            return dict(self._scheduler)
        if component not in self._config:
            raise CheckpointError(f"{self.name}: {self.kind.name} has no component {component!r}")
        return dict(self._config[component])

    def entries(self, component: str) -> list[Entry]:
        """As in ``ModelFiles``."""
        return self._entries[component]

    def folder(self, component: str = "") -> Path:
        """As in ``ModelFiles``: the package's folder of tokenizers."""
        fills_up = component == "tokenizer_2" or (component == "tokenizer" and self.kind is SD2)
        return CLIP / ("tokenizer_2" if fills_up else component)

    @cached_property
    def _entries(self) -> Mapping[str, list[Entry]]:
        parts = {"unet": unet_entries(self._of(UNET)), "vae": vae_entries(self._of(VAE))}
        for name, start in self.kind.encoders.items():
            own = self._of(start)
            if name in self.kind.open_clip:
                # The last layer of 2.x is not used, nor is its projection.
                own = open_clip_entries(own, layers=count_layers(own) - 1 if self.kind is SD2 else None)
            parts[name] = own
        return parts

    def _of(self, start: str) -> list[Entry]:
        own = [one for one in self.arrays if one.name.startswith(start) and not _IGNORED.fullmatch(one.name)]
        return [replace(one, name=one.name.removeprefix(start)) for one in own]

    @cached_property
    def _config(self) -> Mapping[str, dict[str, Any]]:
        try:
            shapes = {part: {one.name: one.shape for one in own} for part, own in self._entries.items()}
            configs = {"unet": self._unet(shapes["unet"]), "vae": vae_config(shapes["vae"], self._of_vae)}
            configs |= {name: self._text(shapes[name], name) for name in self.kind.encoders}
        except (KeyError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"{self.name}: is not a whole model ({self.kind.name}, without {error}); it may hold a part of one"
            ) from None
        return configs

    def _unet(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        levels = _count(shapes, r"down_blocks\.(\d+)\.")
        widths = [shapes[f"down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)]
        depths = [
            _count(shapes, rf"down_blocks\.{i}\.attentions\.0\.transformer_blocks\.(\d+)\.") for i in range(levels)
        ]
        first = min(name for name in shapes if name.endswith("attn2.to_k.weight"))
        has = [depth > 0 for depth in depths]
        middle = _count(shapes, r"mid_block\.attentions\.0\.transformer_blocks\.(\d+)\.")
        deep = {depth for depth in (*depths, middle) if depth}
        config = {
            "_class_name": "UNet2DConditionModel",
            "in_channels": shapes["conv_in.weight"][1],
            "out_channels": shapes["conv_out.weight"][0],
            "block_out_channels": widths,
            "layers_per_block": _count(shapes, r"down_blocks\.0\.resnets\.(\d+)\."),
            "down_block_types": ["CrossAttnDownBlock2D" if one else "DownBlock2D" for one in has],
            "up_block_types": ["CrossAttnUpBlock2D" if one else "UpBlock2D" for one in reversed(has)],
            "cross_attention_dim": shapes[first][1],
            "transformer_layers_per_block": middle if deep == {middle} else [*(d or 1 for d in depths[:-1]), middle],
            "use_linear_projection": self.kind is not SD1,
            "attention_head_dim": 8 if self.kind is SD1 else [width // 64 for width in widths],
            "sample_size": {SD1: 64, SD2: 96 if self.prediction[0] == "v_prediction" else 64}.get(self.kind, 128),
            "upcast_attention": self.kind is SD2 and self.prediction[0] == "v_prediction",
        }
        if self.kind in (XL, REFINER):
            config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
            config["projection_class_embeddings_input_dim"] = shapes["add_embedding.linear_1.weight"][1]
        return config

    @property
    def _of_vae(self) -> dict[str, Any]:
        """What arrays of an autoencoder do not tell."""
        large = self.kind in (XL, REFINER)
        return {"scaling_factor": 0.13025 if large else 0.18215, "sample_size": 1024 if large else 512}

    def _text(self, shapes: Mapping[str, tuple[int, ...]], name: str) -> dict[str, Any]:
        shapes = {key.removeprefix("text_model."): shape for key, shape in shapes.items()}
        vocabulary, width = shapes["embeddings.token_embedding.weight"]
        projection = shapes.get("text_projection/kernel")
        return {
            **({"projection_dim": projection[1]} if projection else {}),
            "architectures": [self.components[name]],
            "model_type": "clip_text_model",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": shapes["encoder.layers.0.mlp.fc1.weight"][0],
            "num_hidden_layers": _count(shapes, r"encoder\.layers\.(\d+)\."),
            "num_attention_heads": max(1, width // 64),
            "max_position_embeddings": shapes["embeddings.position_embedding.weight"][0],
            "hidden_act": "gelu" if name in self.kind.open_clip else "quick_gelu",
            "bos_token_id": 49406,
            "eos_token_id": 2
            if self.kind in (XL, REFINER)
            else 49407,  # 2: the largest id, as the released configs say
        }

    @cached_property
    def _scheduler(self) -> Mapping[str, Any]:
        kinds = {SD1: "PNDMScheduler", SD2: "DDIMScheduler"}
        config = {
            "_class_name": kinds.get(self.kind, "EulerDiscreteScheduler"),
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "num_train_timesteps": 1000,
            "prediction_type": self.prediction[0],
            "steps_offset": 1,
            "timestep_spacing": "trailing" if self.zero_snr else "leading",
        }
        config |= {"set_alpha_to_one": False} if self.kind in (SD1, SD2) else {}
        config |= {"skip_prk_steps": True} if self.kind is SD1 else {}
        return config | ({"rescale_betas_zero_snr": True} if self.zero_snr else {})


def vae_config(shapes: Mapping[str, tuple[int, ...]], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The config of an autoencoder from its arrays, and what they do not tell; of none at all the latter."""
    if not shapes:
        return {"_class_name": "AutoencoderKL", **rest}
    levels = _count(shapes, r"encoder\.down_blocks\.(\d+)\.")
    return {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [shapes[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": _count(shapes, r"encoder\.down_blocks\.0\.resnets\.(\d+)\."),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        **rest,
    }


def open_single_file(name: str, path: Path, *, prediction: str | None = None, vae: bool = True) -> SingleFile:
    """A model in one safetensors file; no weights are read but those that tell what it predicts.

    Args:
        name: as it was asked for.
        path: the file.
        prediction: what it predicts, if the caller knows; else, where that is a guess, a warning says so.
        vae: whether it has to hold an autoencoder.

    Raises:
        CheckpointError: it holds no model that canvax knows, or more than one.
    """
    arrays = open_safetensors(path)
    names = {one.name for one in arrays}
    kind = next((kind for kind in KINDS if all(_any(names, start) for start in kind.encoders.values())), None)
    wanted = (("a UNet", UNET), *((("an autoencoder", VAE),) if vae else ()))
    lacking = [what for what, start in wanted if not _any(names, start)]
    if kind is None and not _any(names, _ONE) and not _any(names, "conditioner."):
        lacking.append("a text encoder")
    for starts, kind_of_part, cure in PARTS:
        if lacking and all_begin(names, starts):
            raise CheckpointError(f"{name}: is {kind_of_part} alone; {cure}")
    if other := next((family for piece, family in OTHERS.items() if any(piece in one for one in names)), None):
        raise CheckpointError(f"{name}: is of {other}; canvax runs Stable Diffusion 1.x, 2.x and XL")
    if lacking:
        raise CheckpointError(
            f"{name}: holds no whole model: it lacks {' and '.join(lacking)}. "
            "Pass a whole one, or a folder in the diffusers layout"
            + ("; an autoencoder may be given with vae=." if lacking == ["an autoencoder"] else ".")
        )
    if kind is None:
        raise CheckpointError(f"{name}: its text encoders are none of Stable Diffusion 1.x, 2.x or XL")
    if {"edm_mean", "edm_std"} & names:
        raise CheckpointError(f"{name}: is trained as Playground v2.5; pass its folder in the diffusers layout")
    starts = (UNET, VAE, *kind.encoders.values())
    strange = [one for one in names if not one.startswith(starts) and not _IGNORED.fullmatch(one)]
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise CheckpointError(
            f"{name}: holds arrays that {kind.name} has no use for: {', '.join(sorted(strange)[:3])}{more}"
        )
    metadata = {} if prediction else read_metadata(path)
    known = (prediction, "as you say") if prediction else _prediction(arrays, kind, metadata)
    files = SingleFile(name, path, kind, arrays, known, "ztsnr" in names)
    if (channels := files.config("unet")["in_channels"]) in _OTHER_INPUTS:
        raise CheckpointError(
            f"{name}: its UNet {_OTHER_INPUTS[channels]} ({channels} channels), which canvax does not"
        )
    told = metadata.get(_TOLD, "").strip()
    if told and told.lower() not in _PREDICTIONS:
        warn(
            f"{name}: its header says {_TOLD}={told!r:.80}, which canvax does not know ('v' and 'epsilon' are usual); "
            f"read as {known[0]}. Another one is said with prediction_type= or --prediction-type"
        )
    if known[1].startswith("a guess"):
        other = "epsilon" if known[0] == "v_prediction" else "v_prediction"
        warn(
            f"{name}: predicts {known[0]}, {known[1]}. If images are grey or burnt, load it with "
            f"prediction_type={other!r} (--prediction-type {other})"
        )
    return files


def _prediction(arrays: Sequence[Entry], kind: Kind, metadata: Mapping[str, str]) -> tuple[str, str]:
    """``epsilon`` or ``v_prediction``, and how that is known."""
    told = metadata.get(_TOLD, "").strip().lower()
    if told in _PREDICTIONS:
        return _PREDICTIONS[told], f"as {_TOLD} says"
    if any(one.name == "v_pred" for one in arrays):
        return "v_prediction", "as the array v_pred says"
    if kind is SD2:
        wanted = f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"
        bias = next((one.read().astype(np.float32) for one in arrays if one.name == wanted), None)
        if bias is not None:
            spread = float(bias.std())
            return ("v_prediction" if spread > _V_BIAS else "epsilon"), f"a guess by the spread of a bias, {spread:.2f}"
    return "epsilon", "as all of its kind that say nothing"


def _any(names: Collection[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)


def _count(names: Collection[str], pattern: str) -> int:
    """How many of a numbered list there are."""
    match: Callable[[str], re.Match[str] | None] = re.compile(pattern).match
    return 1 + max((int(found[1]) for found in map(match, names) if found), default=-1)
