"""Names in single-file checkpoints, which are those of the original Stable Diffusion code, and those of diffusers.

    UNet    input_blocks.4.1.norm.weight            -> down_blocks.1.attentions.0.norm.weight
    VAE     decoder.up.3.block.0.nin_shortcut.bias  -> decoder.up_blocks.0.resnets.0.conv_shortcut.bias
    CLIP    transformer.resblocks.0.mlp.c_fc.bias   -> text_model.encoder.layers.0.mlp.fc1.bias

The second text encoder of SDXL and that of 2.x are of OpenCLIP; the first one, and that of 1.x, have the names of
transformers already. (Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models"; Ilharco et
al. 2021, "OpenCLIP".)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from canvax.weights.entries import Entry

RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
    "nin_shortcut": "conv_shortcut",  # of the VAE, whose other names are those of diffusers
}
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
UNET_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_UNET_BLOCK = re.compile(r"(input|output|middle)_blocks?\.(\d+)\.(?:(\d+)\.)?(.+)")

_OUR_BLOCK = re.compile(r"(down|mid|up)_blocks?\.(?:(\d+)\.)?(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_OUR_RESNET = {ours: theirs for theirs, ours in RESNET.items() if theirs != "nin_shortcut"}

_VAE_BLOCK = re.compile(r"(encoder|decoder)\.(down|up)\.(\d+)\.(?:block\.(\d+)|(downsample|upsample))\.(.+)")
_VAE_MIDDLE = re.compile(r"(encoder|decoder)\.mid\.(block_1|block_2|attn_1)\.(.+)")
VAE_PARTS = {"block_1": "resnets.0", "block_2": "resnets.1", "attn_1": "attentions.0"}
VAE_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}

_TEXT_LAYER = re.compile(r"transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)")
TEXT_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
TEXT_ENDS = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
FUSED_PARTS = ("q_proj", "k_proj", "v_proj")
"""Of an attention, in the order in which OpenCLIP joins them."""

_FUSED = re.compile(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)")


def unet_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Those of a UNet, under the names of diffusers; a name that says nothing stays."""
    down = (re.fullmatch(r"input_blocks\.(\d+)\.0\.op\.weight", entry.name) for entry in entries)
    each = max(1, min((int(match[1]) for match in down if match), default=3))  # resnets of a level, and what follows
    return [replace(entry, name=_unet_name(entry.name, each)) for entry in entries]


def vae_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Those of an autoencoder; decoders count their levels the other way round."""
    levels = [int(match[1]) for entry in entries if (match := re.match(r"decoder\.up\.(\d+)\.", entry.name))]
    return [replace(entry, name=_vae_name(entry.name, max(levels, default=0))) for entry in entries]


def open_clip_entries(entries: Iterable[Entry], *, layers: int | None = None) -> list[Entry]:
    """Those of OpenCLIP's text encoder, of which the first ``layers`` alone, and then no projection, are wanted."""
    return [one for entry in entries for one in _text_entries(entry, layers)]


def count_layers(entries: Iterable[Entry]) -> int:
    """Of OpenCLIP's text encoder."""
    return 1 + max((int(match[1]) for entry in entries if (match := _TEXT_LAYER.fullmatch(entry.name))), default=-1)


def _unet_name(name: str, each: int) -> str:
    for start, ours in UNET_ENDS.items():
        if name.startswith(f"{start}."):
            return ours + name.removeprefix(start)
    match = _UNET_BLOCK.fullmatch(name)
    if match is None:
        return name
    side, number, part, rest = match[1], int(match[2]), match[3], match[4]
    if side == "middle":  # one block, whose parts are numbered
        return f"mid_block.{_MIDDLE.get(match[2], match[2])}.{_resnet(rest)}"
    block, place = divmod(number - 1 if side == "input" else number, each)
    start = f"{'down' if side == 'input' else 'up'}_blocks.{block}"
    if rest.startswith("op."):
        return f"{start}.downsamplers.0.conv.{rest.removeprefix('op.')}"
    if part != "0" and rest.startswith("conv."):
        return f"{start}.upsamplers.0.{rest}"
    return f"{start}.resnets.{place}.{_resnet(rest)}" if part == "0" else f"{start}.attentions.{place}.{rest}"


def ldm_modules(name: str, each: int) -> list[str]:
    """Names in the original code of a layer of the UNet that has a name of diffusers; none for one it has not.

    ``each`` is how many blocks a level has, what follows it included. Of a layer that enlarges, the number depends on
    whether its level attends: both names are given.
    """
    for theirs, ours in UNET_ENDS.items():
        if name == ours:
            return [theirs]
    match = _OUR_BLOCK.fullmatch(name)
    if match is None:
        return []
    way, block, part, number, rest = match[1], int(match[2] or 0), match[3], int(match[4]), match[5]
    inner = _OUR_RESNET.get(rest, rest) if part == "resnets" else rest
    if way == "mid":
        return [f"middle_block.{'1' if part == 'attentions' else 2 * number}.{inner}"]
    last, start = each * block + each - 1, each * block + number
    if part == "downsamplers":
        return [f"input_blocks.{last + 1}.0.op"]
    if part == "upsamplers":
        return [f"output_blocks.{last}.{place}.conv" for place in (1, 2)]
    place = int(part == "attentions")
    return [f"input_blocks.{start + 1}.{place}.{inner}" if way == "down" else f"output_blocks.{start}.{place}.{inner}"]


def _vae_name(name: str, top: int) -> str:
    if match := _VAE_BLOCK.fullmatch(name):
        side, way, number, place, sampler, rest = match.groups()
        start = f"{side}.{way}_blocks.{int(number) if way == 'down' else top - int(number)}"
        return f"{start}.{sampler}rs.0.{rest}" if sampler else f"{start}.resnets.{place}.{_resnet(rest)}"
    if match := _VAE_MIDDLE.fullmatch(name):
        side, part, rest = match.groups()
        if part == "attn_1":
            step, _, leaf = rest.rpartition(".")
            rest = f"{VAE_ATTENTION.get(step, step)}.{leaf}"
        return f"{side}.mid_block.{VAE_PARTS[part]}.{_resnet(rest)}"
    return re.sub(r"^(encoder|decoder)\.norm_out\.", r"\1.conv_norm_out.", name)


def _resnet(rest: str) -> str:
    step, _, leaf = rest.rpartition(".")
    return f"{RESNET.get(step, step)}.{leaf}"


def _text_entries(entry: Entry, layers: int | None) -> Iterator[Entry]:
    name = entry.name
    layer = _TEXT_LAYER.fullmatch(name) or _FUSED.fullmatch(name)
    if layer and layers is not None and int(layer[1]) >= layers:
        return
    if match := _FUSED.fullmatch(name):
        yield from _three(entry, f"text_model.encoder.layers.{match[1]}.self_attn", match[2])
    elif match := _TEXT_LAYER.fullmatch(name):
        number, part, leaf = match.groups()
        yield replace(entry, name=f"text_model.encoder.layers.{number}.{TEXT_PARTS.get(part, part)}.{leaf}")
    elif name == "text_projection":
        if layers is None:  # stored the other way round than PyTorch's linear maps: as Flax stores them
            yield replace(entry, name="text_projection/kernel", order="flax")
    else:
        yield replace(entry, name=TEXT_ENDS.get(name, name))


def _three(entry: Entry, start: str, leaf: str) -> Iterator[Entry]:
    """Queries, keys and values, which are stored as one array: its three equal parts, in this order."""
    ((offset, length),) = entry.segments
    rows, *rest = entry.shape
    for i, part in enumerate(FUSED_PARTS):
        piece = (offset + i * (length // 3), length // 3)
        yield replace(entry, name=f"{start}.{part}.{leaf}", shape=(rows // 3, *rest), segments=(piece,))
