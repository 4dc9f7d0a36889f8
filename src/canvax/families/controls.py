"""Networks for control images: reads them and checks that they were trained for the model's kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from canvax.errors import CheckpointError
from canvax.families import flux
from canvax.families.base import Model, Shapes
from canvax.models.configs import UNetConfig
from canvax.models.controlled import Control
from canvax.models.controlnet import ControlNet
from canvax.models.controlnet_union import UnionNet
from canvax.models.flux import ChromaConfig, FluxConfig
from canvax.models.flux_controlnet import FluxControlNet
from canvax.models.t2i_adapter import FULL, LIGHT, XL, T2IAdapter, fault_for
from canvax.weights.controlnet import ControlFiles, ControlKind, is_union
from canvax.weights.formats import numbered
from canvax.weights.identify import BASES


def component_name(index: int) -> str:
    """Return the key in ``params`` of the network with this index, as diffusers names the folders."""
    return f"controlnet_{index}" if index else "controlnet"


def control_of(name: str, kind: ControlKind, config: Mapping[str, Any], model: Model) -> Control:
    """Return the network of a config, for a model.

    Raises:
        CheckpointError: it is for another kind of model, or its config is not supported.
    """
    try:
        made: Control
        if kind == "transformer":
            made = FluxControlNet.from_dict(config, _flux_of(name, model), model.vae)
        elif kind == "adapter":
            made = T2IAdapter.from_dict(config, model.unet)
        else:
            made = (UnionNet if is_union(config) else ControlNet).from_dict(config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    if isinstance(made, ControlNet):
        made = _beside(name, made, model)
    elif isinstance(made, UnionNet):
        made = replace(made, net=_beside(name, made.net, model))
    elif isinstance(made, T2IAdapter) and (fault := fault_for(made.cfg, model.unet)) is not None:
        raise CheckpointError(f"{name}: is a T2I-Adapter for another kind of model than {model.name}: {fault}")
    if made.factor != model.vae.factor:
        raise CheckpointError(
            f"{name}: makes one feature of {made.factor} x {made.factor} pixels, {model.name} one latent of "
            f"{model.vae.factor} x {model.vae.factor}; it was made for another kind of model"
        )
    return made


def _beside(name: str, net: ControlNet, model: Model) -> ControlNet:
    """Return a ControlNet that was trained for this UNet; fields missing from its config are the UNet's."""
    check_family(name, net.unet, model)
    return replace(net, unet=replace(net.unet, upcast_attention=model.unet.upcast_attention))


def _flux_of(name: str, model: Model) -> FluxConfig:
    """Return the config of FLUX.1's transformer.

    Raises:
        CheckpointError: the model is another.
    """
    base = model.networks.config
    if not isinstance(base, FluxConfig) or isinstance(base, ChromaConfig):
        raise CheckpointError(f"{name}: is a ControlNet for FLUX.1, and {model.name} is {model.family.title}")
    return base


def read_control(files: ControlFiles, model: Model) -> Control:
    """Return the network of these files; without a config, shapes of arrays determine it.

    Raises:
        CheckpointError: as ``control_of``.
    """
    if not (config := files.config):
        try:
            if files.kind == "transformer":
                config = flux.controlnet_config(files.shapes, _flux_of(str(files), model))
            elif files.kind == "adapter":
                config = adapter_config(files.shapes)
            else:
                config = controlnet_config(files.shapes, model.unet)
        except (KeyError, IndexError, ValueError, StopIteration) as error:
            raise CheckpointError(f"{files}: is not a whole network, it lacks {error}") from None
    return control_of(str(files), files.kind, config, model)


def check_family(name: str, config: UNetConfig, model: Model) -> None:
    """Refuse a ControlNet of another kind of model's UNet.

    Raises:
        CheckpointError: names the kind, which its shapes determine.
    """
    base = model.unet

    def sizes(cfg: UNetConfig) -> dict[str, Any]:
        return {
            "text of width": cfg.cross_attention_dim,
            "levels of": list(cfg.block_out_channels),
            "residual blocks in each": list(cfg.layers),
            "latents of": cfg.in_channels,
            "size conditions of": cfg.projection_class_embeddings_input_dim,
        }

    wanted, got = sizes(base), sizes(config)
    wanted["latents of"] = model.vae.latent_channels
    if got == wanted:
        return
    apart = [f"{name} {got[name]} instead of {wanted[name]}" for name in got if got[name] != wanted[name]]
    made = BASES.get(config.cross_attention_dim)
    kind = BASES.get(base.cross_attention_dim, "another kind")
    belongs = f"is a ControlNet for {made}" if made and made != kind else "is a ControlNet for another kind of model"
    raise CheckpointError(
        f"{name}: {belongs}, and {model.name} is {kind if made != kind else 'not that'} ({'; '.join(apart)}). "
        "Take a ControlNet that was trained for this kind of model."
    )


def controlnet_config(shapes: Shapes, base: UNetConfig) -> dict[str, Any]:
    """Return the config of a ControlNet from its arrays; other fields, such as heads, are those of ``base``."""
    levels = numbered(shapes, r"down_blocks\.(\d+)\.")
    widths = [shapes[f"down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(levels)]
    depths = [numbered(shapes, rf"down_blocks\.{i}\.attentions\.0\.transformer_blocks\.(\d+)\.") for i in range(levels)]
    middle = numbered(shapes, r"mid_block\.attentions\.0\.transformer_blocks\.(\d+)\.")
    text = sorted(shape[1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight"))
    projections = [len(shape) for name, shape in shapes.items() if name.endswith("proj_in.weight")]
    hints = numbered(shapes, r"controlnet_cond_embedding\.blocks\.(\d+)\.")
    first = shapes["controlnet_cond_embedding.conv_in.weight"]
    width = text[0] if text else base.cross_attention_dim
    same = levels == len(base.block_out_channels)
    usual = 8 if width == 768 else [max(1, channels // 64) for channels in widths]
    own_depths = [*(depth or 1 for depth in depths[:-1]), middle or depths[-1] or 1]
    config = {
        "in_channels": shapes["conv_in.weight"][1],
        "block_out_channels": widths,
        "layers_per_block": _one([numbered(shapes, rf"down_blocks\.{i}\.resnets\.(\d+)\.") for i in range(levels)]),
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths],
        "transformer_layers_per_block": _one(own_depths),
        "mid_block_type": "UNetMidBlock2DCrossAttn" if middle else "UNetMidBlock2D",
        "cross_attention_dim": width,
        "use_linear_projection": 2 in projections if projections else base.use_linear_projection,
        "attention_head_dim": base.attention_head_dim if same else usual,
        "num_attention_heads": base.num_attention_heads if same else None,
        "norm_num_groups": base.norm_num_groups,
        "norm_eps": base.norm_eps,
        "upcast_attention": base.upcast_attention,
        "flip_sin_to_cos": base.flip_sin_to_cos,
        "freq_shift": base.freq_shift,
        "conditioning_channels": first[1],
        "conditioning_embedding_out_channels": [
            first[0],
            *(shapes[f"controlnet_cond_embedding.blocks.{i}.weight"][0] for i in range(1, hints, 2)),
        ],
    }
    if (added := shapes.get("add_embedding.linear_1.weight")) is not None:
        config |= {"addition_embed_type": "text_time", "projection_class_embeddings_input_dim": added[1]}
        config["addition_time_embed_dim"] = base.addition_time_embed_dim or 256
    return config | _union_config(shapes)


def _union_config(shapes: Shapes) -> dict[str, Any]:
    """Return the further fields of a ControlNet-Union's config."""
    if "task_embedding" not in shapes:
        return {}
    types, width = shapes["task_embedding"]
    return {
        "num_control_type": types,
        "num_trans_channel": width,
        "num_trans_layer": numbered(shapes, r"transformer_layes\.(\d+)\."),
        "num_proj_channel": shapes["spatial_ch_projs.weight"][0],
        "addition_time_embed_dim": shapes["control_add_embedding.linear_1.weight"][1] // types,
    }


def adapter_config(shapes: Shapes) -> dict[str, Any]:
    """Return the config of a T2I-Adapter from its arrays."""
    count = numbered(shapes, r"adapter\.body\.(\d+)\.")
    resnets = numbered(shapes, r"adapter\.body\.0\.resnets\.(\d+)\.")
    if "adapter.conv_in.weight" in shapes:
        kind, inputs = FULL, shapes["adapter.conv_in.weight"][1]
        channels = [shapes[f"adapter.body.{i}.resnets.0.block1.weight"][0] for i in range(count)]
    else:
        kind, inputs = LIGHT, shapes["adapter.body.0.in_conv.weight"][1]
        channels = [shapes[f"adapter.body.{i}.out_conv.weight"][0] for i in range(count - 1)]
    # Squares of 8 x 8 pixels, or 16 x 16 for SDXL, with 3 channels or 1.
    sizes = {channels * side**2: (channels, side) for side in (8, 16) for channels in (3, 1)}
    if inputs not in sizes:
        raise ValueError(f"a first convolution of {' or '.join(map(str, sorted(sizes)))} channels")
    grey, side = sizes[inputs]
    config = {"channels": channels, "num_res_blocks": resnets, "in_channels": grey, "downscale_factor": side}
    return {**config, "adapter_type": XL if kind == FULL and side == 16 else kind}


def _one(values: list[int]) -> int | list[int]:
    """Return a single number if all are equal, as configs have it."""
    return values[0] if len(set(values)) == 1 else values
