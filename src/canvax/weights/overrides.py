"""Replacements of a model's parts and of missing parts: autoencoder, text encoder, tokenizer, schedule fields.

AutoencoderKL           diffusers: encoder.down_blocks.0. ...; original: [first_stage_model.]encoder.down.0. ...
AutoencoderKLFlux2      as AutoencoderKL, with bn.running_mean
AutoencoderKLQwenImage  diffusers: decoder.mid_block.resnets.0.norm1.gamma; Wan 2.1:
    decoder.middle.0.residual.0.gamma
AutoencoderKLQwenImage21  diffusers alone: encoder.down_blocks.0.resnets.0.norm1.gamma
AutoencoderTiny         diffusers: decoder.layers.0.weight; TAESD: decoder.1.weight, where the clamp has number 0
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from canvax.errors import CheckpointError, InputError, nearest, warn
from canvax.families.known import AUTOENCODERS, family_of
from canvax.files import named_path, read_json
from canvax.models.text import FIRST, SECOND
from canvax.samplers.schedule import PREDICTION_TYPES
from canvax.weights.files import ModelFiles, NetworkFiles, open_weights
from canvax.weights.folder import is_tokenizer
from canvax.weights.formats import TAESD, vae_rules
from canvax.weights.identify import AUTOENCODER, CLASSES, INSIDE, MODEL, VAE, expect
from canvax.weights.language_model import open_language_model
from canvax.weights.location import Location, refuse_pickle
from canvax.weights.open import find_tokenizer, open_part
from canvax.weights.rules import Names
from canvax.weights.single_file import vae_config
from canvax.weights.wan_vae import wan_vae_config

_OF_LOCATION = ("token", "cache_dir", "local_files_only", "progress")
_HALF = re.compile(r"\d+\.(?:conv\.\d+\.)?(?:weight|bias)")
_TINY = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.((?:conv\.\d+\.)?(?:weight|bias))")
_IGNORED = re.compile(r"(first_stage_model\.)?(loss\..*|model_ema\..*|.*num_batches_tracked)")


@dataclass(frozen=True)
class Overrides:
    """Parts of a model that the caller of ``canvax.load`` replaces.

    Attributes:
        vae: location of another autoencoder; None for the model's.
        text_encoder: location of another language model; None for the model's.
        text_encoder_2: location of another second text encoder; None for the model's.
        tokenizer: location of the tokenizer of the last text encoder; None for the model's, or the one next to it.
        prediction: prediction type of the UNet; None for the model's.
        scheduler: fields of ``scheduler_config.json`` that replace the model's.
        reasons: reasons for parts that were chosen automatically, by argument.
    """

    vae: str | None = None
    text_encoder: str | None = None
    text_encoder_2: str | None = None
    tokenizer: str | None = None
    prediction: str | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        vae: Any = None,
        prediction_type: Any = None,
        scheduler: Any = None,
        text_encoder: Any = None,
        tokenizer: Any = None,
        text_encoder_2: Any = None,
    ) -> Overrides:
        """Check the arguments of ``canvax.load`` as far as possible without the model.

        Raises:
            InputError, CheckpointError: names the argument.
        """
        given = {"vae": vae, FIRST: text_encoder, SECOND: text_encoder_2, "tokenizer": tokenizer}
        parts: dict[str, Any] = {}
        for name, part in given.items():
            if part is not None:
                parts[name] = os.fspath(part) if isinstance(part, os.PathLike) else part
                Location(parts[name], argument=name)
                refuse_pickle(parts[name])
        if prediction_type is not None and str(prediction_type) not in PREDICTION_TYPES:
            cure = nearest(str(prediction_type), list(PREDICTION_TYPES))
            raise InputError("prediction_type", "is not known", cure=cure, value=prediction_type)
        fields = _fields(scheduler)
        other = fields.get("prediction_type", prediction_type) if isinstance(scheduler, Mapping) else prediction_type
        if prediction_type is not None and other != prediction_type:
            problem = f"is not that of scheduler, {other!r:.80}"
            raise InputError("prediction_type", problem, cure="give one of them", value=prediction_type)
        return cls(**parts, prediction=prediction_type, scheduler=fields)

    @property
    def parts(self) -> dict[str, str]:
        """Locations of the replaced parts, by argument."""
        parts = {"vae": self.vae, FIRST: self.text_encoder, SECOND: self.text_encoder_2, "tokenizer": self.tokenizer}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """The replaced parts as arguments of ``canvax.load``."""
        values = {"prediction_type": self.prediction, "scheduler": dict(self.scheduler) or None}
        return self.parts | {name: value for name, value in values.items() if value is not None}

    def apply(self, files: ModelFiles, **location: Any) -> ModelFiles:
        """Return the files of a model with the replaced parts.

        Raises:
            InputError, CheckpointError, HubError: a part is missing, damaged or another kind of file.
        """
        arguments = self.arguments
        if not arguments:
            return files
        configs, components, family = dict(files.configs), dict(files.components), family_of(files.index)
        single = family.single_file
        hub = {name: value for name, value in location.items() if name in _OF_LOCATION}
        where = {name: Location(part, argument=name, **hub) for name, part in self.parts.items()}
        opened: dict[str, NetworkFiles] = {}
        if "vae" in where:
            opened["vae"] = vae = open_vae(where["vae"], configs.get("vae", {}))
            components["vae"] = str(vae.config["_class_name"]).removeprefix("Flax")
        for name in where.keys() - {"vae"}:
            if single is None or (name == SECOND and SECOND not in family.classes):
                problem = f"does not go with {files.name}, which has no such language model"
                raise InputError(name, problem, cure="leave it out", value=self.parts[name])
        for name in where.keys() & {FIRST, SECOND}:
            opened[name] = open_language_model(where[name], configs[name])
        configs |= {name: part.config for name, part in opened.items()}
        folders = files.folders
        *_, last = ["", *filter(is_tokenizer, family.classes)]
        encoder = SECOND if SECOND in family.classes else FIRST
        if (tokenizer := self._tokenizer(where, last, encoder, files)) is not None:
            assert single is not None  # otherwise it was refused
            folder = find_tokenizer(tokenizer, otherwise=single.tokenizer if self.tokenizer is None else None)
            components.setdefault(last, family.classes[last][0])
            folders = lambda part: folder if part == last else files.folders(part)  # noqa: E731
        configs["scheduler"] = {**configs.get("scheduler", {}), **self.scheduler}
        if self.prediction is not None:
            configs["scheduler"]["prediction_type"] = self.prediction
        if "_class_name" in self.scheduler:
            components["scheduler"] = str(self.scheduler["_class_name"])
        index = {
            **files.index,
            **{part: ["diffusers", components[part]] for part in ("vae", "scheduler") if part in components},
        }
        return replace(
            files,
            index=index,
            components=components,
            configs=configs,
            arrays=lambda part: opened[part].arrays if part in opened else files.arrays(part),
            folders=folders,
            reasons={
                **{name: reason for name, reason in files.reasons.items() if name not in self.scheduler},
                **self.reasons,
            },
            overrides=arguments,
        )

    def _tokenizer(
        self, where: Mapping[str, Location], name: str, encoder_name: str, files: ModelFiles
    ) -> Location | None:
        """Return the location of a tokenizer, by default next to its text encoder. None for the model's."""
        if "tokenizer" in where or encoder_name not in where or name in files.components:
            return where.get("tokenizer")
        encoder = where[encoder_name]
        return replace(encoder if encoder.local() else encoder.on_hub()[0], argument="tokenizer")


def open_vae(location: Location, original: Mapping[str, Any]) -> NetworkFiles:
    """Find an autoencoder and download missing files; no array is read.

    Args:
        location: a diffusers folder, a folder that contains one as ``vae``, a Hub id with an optional folder, or a
            safetensors file.
        original: config of the model's autoencoder, for the scaling factor of a file without a config.

    Raises:
        InputError, CheckpointError, HubError: it is missing, damaged or another kind of file.
    """
    name = location.text
    refuse_pickle(name)
    path = location.local()
    if path is not None and path.is_file():
        files = vae_of_file(name, path, original)
    else:

        def accept(config: Mapping[str, Any]) -> None:
            if CLASSES.get(str(config.get("_class_name"))) is not AUTOENCODER:
                raise CheckpointError(
                    f"vae={name!r}: its config.json is of the class {str(config.get('_class_name'))[:80]!r}; canvax "
                    f"reads {', '.join(AUTOENCODERS)}"
                )

        files = open_part(location, "vae", accept, "diffusers")
        scale, usual = files.config.get("scaling_factor"), original.get("scaling_factor")
        if files.config["_class_name"] != "AutoencoderTiny" and usual is not None and scale != usual:
            warn(
                f"vae={name!r}: its scaling_factor is {scale}, that of the model's VAE {usual}; it was made for "
                "another kind of model, and colours may be wrong"
            )
    sizes = [_factor(config) for config in (files.config, original)]
    if "block_out_channels" in original and sizes[0] != sizes[1]:
        raise CheckpointError(
            f"vae={name!r}: makes one latent of {sizes[0]} x {sizes[0]} pixels, the model's VAE one of {sizes[1]} x "
            f"{sizes[1]}; it was made for another kind of model"
        )
    return files


def vae_of_file(name: str, path: Path, original: Mapping[str, Any]) -> NetworkFiles:
    """Return the autoencoder of one safetensors file, which may be that of a whole model.

    Raises:
        CheckpointError: the file has no autoencoder.
    """
    arrays = [entry for entry in open_weights(path) if not _IGNORED.fullmatch(entry.name)]
    if prefix := next((start for start in (VAE, INSIDE["vae"]) if any(e.name.startswith(start) for e in arrays)), ""):
        arrays = [replace(array, name=array.name.removeprefix(prefix)) for array in arrays
                  if array.name.startswith(prefix)]  # fmt: skip
    if any(_HALF.fullmatch(array.name) for array in arrays):
        raise CheckpointError(
            f"vae={name!r}: holds half of a TAESD, encoder or decoder alone; take the file that has both, or "
            "madebyollin/taesd"
        )
    expect(f"vae={name!r}", {array.name: array.shape for array in arrays}, AUTOENCODER, MODEL)
    tiny = TAESD.to_internal(arrays)
    if any(_TINY.fullmatch(array.name) for array in tiny):
        shapes = {array.name: array.shape for array in tiny}
        if strange := [array.name for array in tiny if not _TINY.fullmatch(array.name)]:
            raise CheckpointError(f"vae={name!r}: holds an array that TAESD has no use for: {strange[0]}")
        if missing := [half for half in ("encoder", "decoder") if f"{half}.layers.0.weight" not in shapes]:
            raise CheckpointError(f"vae={name!r}: holds half of a TAESD, without the {missing[0]}; take the whole one")
        width, latents = shapes["decoder.layers.0.weight"][:2]
        widths = {f"{half}_block_out_channels": [width] * 4 for half in ("encoder", "decoder")}
        return NetworkFiles(name, tiny, {"_class_name": "AutoencoderTiny", "latent_channels": latents, **widths})
    if any(array.name.endswith(".gamma") for array in arrays):
        try:
            return NetworkFiles(name, arrays, wan_vae_config(arrays))
        except (KeyError, IndexError) as error:
            raise CheckpointError(f"vae={name!r}: is not a whole autoencoder, it lacks {error}") from None
    if not any(array.name.startswith("decoder.") for array in arrays):
        raise CheckpointError(f"vae={name!r}: holds no autoencoder: no name of its arrays begins with decoder.")
    arrays = Names(vae_rules([array.name for array in arrays])).to_internal(arrays)
    shapes = {array.name: array.shape for array in arrays}
    rest = {
        key: original[key]
        for key in ("scaling_factor", "shift_factor", "sample_size", "force_upcast")
        if key in original
    }
    try:
        config = vae_config(shapes, rest)
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(f"vae={name!r}: is not a whole autoencoder, it lacks {error}") from None
    if odd := [width for width in config["block_out_channels"] if width % 32]:
        raise CheckpointError(
            f"vae={name!r}: has {odd[0]} channels in groups that no file tells of; pass its folder, with config.json"
        )
    config["use_quant_conv"] = "quant_conv.weight" in shapes
    config["use_post_quant_conv"] = "post_quant_conv.weight" in shapes
    return NetworkFiles(name, arrays, config)


def _factor(config: Mapping[str, Any]) -> int:
    """Return the pixels per latent along an axis."""
    levels = config.get("num_decoder_blocks") or config.get("block_out_channels")
    return 2 ** (len(levels) - 1) if isinstance(levels, list | tuple) else 8


def _fields(scheduler: Any) -> dict[str, Any]:
    """Return scheduler fields from a table, a scheduler object, its folder or its ``scheduler_config.json``."""
    if scheduler is None:
        return {}
    if isinstance(config := getattr(scheduler, "config", None), Mapping):
        return {"_class_name": type(scheduler).__name__, **config}
    if isinstance(scheduler, Mapping) and all(isinstance(name, str) for name in scheduler):
        return dict(scheduler)
    if isinstance(scheduler, str | os.PathLike):
        path = named_path("scheduler", scheduler)
        path = path / "scheduler_config.json" if path.is_dir() else path
        if path.is_file():
            return read_json(path)
    raise InputError(
        "scheduler",
        "is no table of fields of scheduler_config.json, such as {'rescale_betas_zero_snr': True}, and no such file",
        cure="a sampler is chosen in each call: {sampler='Euler'}",
        value=scheduler,
    )
