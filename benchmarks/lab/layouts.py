"""The checkpoint folders of Z-Image, FLUX.2 and Krea 2 in the layout of diffusers: configs, tokenizer, arrays."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from canvax.families.base import Family
from canvax.families.flux2 import FLUX2
from canvax.families.krea2 import KREA2
from canvax.families.z_image import Z_IMAGE
from canvax.models.configs import VaeConfig
from canvax.models.decoder_lm import DecoderConfig, LanguageModel, decoder_lm_spec
from canvax.models.dit import rms_norm_spec
from canvax.models.flux2 import ROWS, Flux2Config, Flux2Denoiser, taps
from canvax.models.flux2_vae import Flux2Autoencoder, Flux2VaeConfig
from canvax.models.krea2 import DROPPED, LENGTHS, PROMPT, Krea2Config, Krea2Denoiser
from canvax.models.krea2 import TEMPLATE as KREA2_TEMPLATE
from canvax.models.networks import Networks
from canvax.models.text import FIRST, TextEncoders
from canvax.models.wan_vae import UNUSED, WanAutoencoder, WanVaeConfig
from canvax.models.z_image import ZImageConfig, ZImageDenoiser
from canvax.nn import conv2d_spec, embedding_spec, linear_spec, norm_spec
from canvax.params import Param, Spec, flatten

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""What Qwen3's does with one message of the user."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TIMES_HALVED = (False, True, True)
"""``temperal_downsample`` of the autoencoder of Qwen-Image: whether a level halves the number of frames."""


class Stored(NamedTuple):
    """An array of a checkpoint: how it is initialised, and the shape that it has there."""

    name: str
    param: Param
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The folder of a family.

    Attributes:
        family: whose names and stacks its files have.
        index: what else ``model_index.json`` holds.
        sees: whether its language model has a vision encoder, which no image model reads.
    """

    family: Family
    index: Mapping[str, Any] = field(default_factory=dict)
    sees: bool = False

    @property
    def scheduler(self) -> Mapping[str, Any]:
        """The config of the scheduler."""
        assert self.family.single_file is not None
        return self.family.single_file.configs["scheduler"]

    @property
    def classes(self) -> dict[str, str]:
        """Of each component, as ``model_index.json`` names them."""
        named = {part: kinds[0] for part, kinds in self.family.classes.items() if kinds}
        return named | {"scheduler": self.scheduler["_class_name"]}

    def arrays(self, networks: Networks, name: str, spec: Spec) -> Iterator[Stored]:
        """All arrays of a component, also those that canvax does not read, under the names of its spec."""
        encoder, vae = networks.text.encoders[0], networks.vae
        if name == FIRST and isinstance(encoder, LanguageModel):
            spec = decoder_lm_spec(encoder.cfg, encoder.cfg.num_hidden_layers)
            spec["model"]["norm"] = rms_norm_spec(encoder.cfg.hidden_size)
            spec |= {"visual": _vision_spec(encoder.cfg)} if self.sees else {}
        of_video = name == "vae" and isinstance(vae, WanAutoencoder)
        for key, param in flatten(spec):
            yield Stored(key, param, _video_shape(key, param) if of_video else param.checkpoint_shapes[0])
        if of_video:
            yield from _time_layers(vae.cfg)

    def configs(self, networks: Networks) -> dict[str, dict[str, Any]]:
        """``config.json`` of each component."""
        encoder, vae = networks.text.encoders[0], networks.vae
        assert isinstance(encoder, LanguageModel)
        vae = vae if isinstance(vae, VaeConfig) else vae.cfg
        written = {"transformer": fields_of(networks.config), "vae": fields_of(vae)}
        if isinstance(vae, WanVaeConfig):
            written["vae"]["temperal_downsample"] = TIMES_HALVED
        written = {name: fields | {"_class_name": self.classes[name]} for name, fields in written.items()}
        return written | {FIRST: _language_model(encoder.cfg, self.classes[FIRST], sees=self.sees)}

    def index_of(self, networks: Networks) -> dict[str, Any]:
        """``model_index.json``."""
        libraries = {FIRST: "transformers", "tokenizer": "transformers"}
        index = {name: [libraries.get(name, "diffusers"), kind] for name, kind in self.classes.items()}
        encoder = networks.text.encoders[0]
        assert isinstance(encoder, LanguageModel)
        more = {"text_encoder_select_layers": [*encoder.earlier, encoder.tap]} if self.sees else {}
        return {"_class_name": self.family.pipelines[0], **index, **self.index, **more}


LAYOUTS: dict[type, Layout] = {
    ZImageDenoiser: Layout(Z_IMAGE),
    Flux2Denoiser: Layout(FLUX2, {"is_distilled": True}),
    Krea2Denoiser: Layout(KREA2, {"is_distilled": True}, sees=True),
}
"""By the class of the denoiser; each is the few-step model of its family."""


_SMALL_LM = DecoderConfig(
    vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=28, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip
*_EARLIER, _TAP = taps(28)

SMALL = {
    "z-image-small": Networks(
        ZImageDenoiser(
            ZImageConfig(
                dim=64, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=32, axes_dims=(8, 4, 4)
            )
        ),
        VaeConfig(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=16,
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        ),
        TextEncoders((LanguageModel(replace(_SMALL_LM, num_hidden_layers=3), 2),)),
        "flow_prediction",
    ),
    "flux2-klein-small": Networks(
        Flux2Denoiser(
            Flux2Config(
                in_channels=16, num_layers=1, num_single_layers=2, num_attention_heads=4, attention_head_dim=16,
                joint_attention_dim=96, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
            ),
            is_distilled=True,
        ),
        Flux2Autoencoder(
            Flux2VaeConfig(
                block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=4
            )
        ),
        TextEncoders((LanguageModel(_SMALL_LM, _TAP, tuple(_EARLIER), (ROWS,), ROWS),)),
        "flow_prediction",
    ),
    "krea-2-small": Networks(
        Krea2Denoiser(
            Krea2Config(
                in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=96, text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=4,
                text_num_key_value_heads=2, text_intermediate_size=48, num_layerwise_text_blocks=1,
                num_refiner_text_blocks=1, axes_dims_rope=(8, 4, 4),
            )
        ),
        WanAutoencoder(
            WanVaeConfig(
                base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=(0.5, -0.2, 0.1, 0.7),
                latents_std=(2.0, 1.5, 0.7, 1.1),
            )
        ),
        TextEncoders(
            (
                LanguageModel(
                    replace(_SMALL_LM, model_type="qwen3_vl_text", num_hidden_layers=6), 5, (1, 3), LENGTHS, PROMPT
                ),
            )
        ),
        "flow_prediction",
    ),
}  # fmt: skip
"""Each family in a few million numbers: to try a benchmark anywhere, and for tests."""


def write_chat_tokenizer(folder: Path) -> None:
    """A tokenizer of Qwen's class: a byte is a token, but the words of Krea 2's template are one each.

    So its template has as many tokens as with the released vocabulary, which that model counts on.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(  # pyright: ignore[reportAttributeAccessIssue]
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    pieces = re.findall(r"<\|\w+\|>| ?\w+|\n|[,:]", KREA2_TEMPLATE.partition("{}")[0])
    assert len(pieces) == DROPPED
    words = {piece for piece in (*pieces, "assistant") if len(piece) > 1 and piece not in SPECIAL}
    backend.add_tokens([AddedToken(word, normalized=False) for word in sorted(words)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer", "pad_token": SPECIAL[0], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE, "model_max_length": 131072, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def fields_of(cfg: Any) -> dict[str, Any]:
    """The fields of a config that have a value."""
    return {key: value for key, value in dataclasses.asdict(cfg).items() if value is not None}


def _language_model(cfg: DecoderConfig, kind: str, *, sees: bool) -> dict[str, Any]:
    fields = fields_of(cfg)
    positions = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    fields |= {"hidden_act": "silu", "max_position_embeddings": 40960, "tie_word_embeddings": True, "use_cache": False}
    if not sees:
        return fields | {"architectures": [kind], "rope_parameters": positions}
    half = cfg.width_of_head // 2
    third = half * 5 // 16
    positions |= {"mrope_section": [half - 2 * third, third, third], "mrope_interleaved": True}
    return {
        "model_type": "qwen3_vl", "architectures": [kind], "tie_word_embeddings": True,
        "text_config": fields | {"rope_parameters": positions}, "vision_config": _vision(cfg) | {"num_heads": 16},
    }  # fmt: skip


def _vision(cfg: DecoderConfig) -> dict[str, Any]:
    """The vision encoder of Qwen3-VL-4B, or of a small model one of a few layers."""
    small = cfg.hidden_size < 1000
    width = 64 if small else 1024
    layers = [0] if small else [5, 11, 17]
    return {
        "depth": 1 if small else 24, "hidden_size": width, "intermediate_size": 4 * width,
        "out_hidden_size": cfg.hidden_size, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": layers,
    }  # fmt: skip


def _vision_spec(cfg: DecoderConfig) -> Spec:
    eyes = _vision(cfg)
    width, inner, patch = eyes["hidden_size"], eyes["intermediate_size"], 16
    pixels = (width, 3, 2, patch, patch)

    def merger(normed: int) -> Spec:
        return {
            "norm": norm_spec(normed),
            "linear_fc1": linear_spec(4 * width, 4 * width),
            "linear_fc2": linear_spec(4 * width, eyes["out_hidden_size"]),
        }

    block = {
        "norm1": norm_spec(width),
        "norm2": norm_spec(width),
        "attn": {"qkv": linear_spec(width, 3 * width), "proj": linear_spec(width, width)},
        "mlp": {"linear_fc1": linear_spec(width, inner), "linear_fc2": linear_spec(inner, width)},
    }
    bias = Param((width,), (None,), init="zeros")
    return {
        "patch_embed": {"proj": {"weight": Param(pixels, (None,) * 5, init="normal"), "bias": bias}},
        "pos_embed": embedding_spec(eyes["num_position_embeddings"], width),
        "blocks": {str(i): block for i in range(eyes["depth"])},
        "merger": merger(width),
        "deepstack_merger_list": {str(i): merger(4 * width) for i in range(len(eyes["deepstack_visual_indexes"]))},
    }


def _video_shape(name: str, param: Param) -> tuple[int, ...]:
    """That of an array of the Wan autoencoder, of which canvax reads one frame: ``from_video`` undone."""
    shape = param.checkpoint_shapes[0]
    if name.endswith("gamma"):
        return (*shape, 1, 1) if "attentions" in name else (*shape, 1, 1, 1)
    if len(shape) == 1 or "attentions" in name or "resample" in name:
        return shape
    outputs, inputs, *kernel = shape
    return (outputs, inputs, kernel[0], *kernel)


def _time_layers(cfg: WanVaeConfig) -> Iterator[Stored]:
    """Layers that change the number of frames."""
    down = cfg.num_res_blocks
    layers = [
        (f"encoder.down_blocks.{i * (down + 1) + down}", width, 1)
        for i, (width, halved) in enumerate(zip(cfg.widths, TIMES_HALVED, strict=False))
        if halved
    ]
    widths = cfg.widths[::-1]
    layers += [
        (f"decoder.up_blocks.{i}.upsamplers.0", width, 2)
        for i, (width, doubled) in enumerate(zip(widths, TIMES_HALVED[::-1], strict=False))
        if doubled
    ]
    for name, width, times in layers:
        for key, param in flatten(conv2d_spec(width, times * width, 1)):
            shape = param.checkpoint_shapes[0]
            yield Stored(f"{name}.{UNUSED}.{key}", param, shape if len(shape) == 1 else (*shape[:2], 3, 1, 1))
