"""The layouts of names that files have, as tables. Ours are the names of today's PyTorch diffusers files.

    UNet              input_blocks.4.1.norm.weight            down_blocks.1.attentions.0.norm.weight
    VAE               decoder.up.3.block.0.nin_shortcut.bias  decoder.up_blocks.0.resnets.0.conv_shortcut.bias
    OpenCLIP          transformer.resblocks.0.mlp.c_fc.bias   text_model.encoder.layers.0.mlp.fc1.bias
    ControlNet        zero_convs.1.0.weight                   controlnet_down_blocks.1.weight
    T2I-Adapter       body.3.block1.weight                    adapter.body.1.resnets.1.block1.weight
    TAESD             decoder.1.weight                        decoder.layers.0.weight
    Z-Image           layers.0.attention.qkv.weight           layers.0.attention.to_q.weight, to_k, to_v
    FLUX.2            single_blocks.0.linear1.weight          single_transformer_blocks.0.attn.to_q.weight, to_k, ...
    Krea 2            blocks.0.attn.wq.weight                 transformer_blocks.0.attn.to_q.weight
    llama.cpp         blk.0.attn_q.weight                     model.layers.0.self_attn.q_proj.weight

The first three are those of the original Stable Diffusion code, which single files have. (Rombach et al. 2022,
"High-Resolution Image Synthesis with Latent Diffusion Models"; Ilharco et al. 2021, "OpenCLIP".) Flax files, old files
and files without a prefix are known by ``spellings``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from canvax.params import Param
from canvax.weights.entries import Entry
from canvax.weights.rules import Names, Rule

_RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_UNET = (
    Rule("time_embed.0", "time_embedding.linear_1"),
    Rule("time_embed.2", "time_embedding.linear_2"),
    Rule("label_emb.0.0", "add_embedding.linear_1"),
    Rule("label_emb.0.2", "add_embedding.linear_2"),
    Rule("input_blocks.0.0", "conv_in"),
    Rule("out.0", "conv_norm_out"),
    Rule("out.2", "conv_out"),
    Rule("middle_block.1", "mid_block.attentions.0"),
)


def _resnet(theirs: str, ours: str) -> list[Rule]:
    return [Rule(f"{theirs}.{their}", f"{ours}.{our}") for their, our in _RESNET.items()]


_MOST = 100
"""Items of a list of blocks that have rules, whatever a file claims to have."""


def unet_rules(names: Collection[str]) -> list[Rule]:
    """Those of a UNet; ``names`` in either layout tell how many blocks it has."""
    stride = _numbers(names, r"input_blocks\.(\d+)\.0\.op\.")
    each = min(stride, default=2 + max(_numbers(names, r"down_blocks\.0\.resnets\.(\d+)\."), default=1))
    each = max(1, min(each, _MOST))  # resnets of a level, and what follows
    last = max(_numbers(names, r"(?:input|output)_blocks\.(\d+)\."), default=0) // each
    levels = 1 + max(last, max(_numbers(names, r"(?:down|up)_blocks\.(\d+)\."), default=0))
    attends = _numbers(names, r"up_blocks\.(\d+)\.attentions\.")
    rules = [
        *_UNET,
        *_resnet("middle_block.0", "mid_block.resnets.0"),
        *_resnet("middle_block.2", "mid_block.resnets.1"),
    ]
    for level in range(min(levels, _MOST)):
        for i in range(each):
            at = level * each + i
            rules += _resnet(f"input_blocks.{at + 1}.0", f"down_blocks.{level}.resnets.{i}")
            rules += _resnet(f"output_blocks.{at}.0", f"up_blocks.{level}.resnets.{i}")
            rules.append(Rule(f"input_blocks.{at + 1}.1", f"down_blocks.{level}.attentions.{i}"))
            rules.append(Rule(f"output_blocks.{at}.1", f"up_blocks.{level}.attentions.{i}"))
        end = (level + 1) * each
        rules.append(Rule(f"input_blocks.{end}.0.op", f"down_blocks.{level}.downsamplers.0.conv"))
        # What enlarges comes behind the attention of its level, if that attends.
        for place in (2, 1) if level in attends else (1, 2):
            rules.append(Rule(f"output_blocks.{end - 1}.{place}.conv", f"up_blocks.{level}.upsamplers.0.conv"))
    return rules


def vae_rules(names: Collection[str]) -> list[Rule]:
    """Those of an autoencoder, from names as for a UNet; decoders count their levels the other way round."""
    top = max(_numbers(names, r"decoder\.up(?:_blocks)?\.(\d+)\."), default=0)
    rules = []
    for side, way, sampler in (("encoder", "down", "downsample"), ("decoder", "up", "upsample")):
        for level in range(min(top, _MOST) + 1):
            theirs = f"{side}.{way}.{level}"
            ours = f"{side}.{way}_blocks.{level if way == 'down' else top - level}"
            rules += [
                Rule(f"{theirs}.block.*", f"{ours}.resnets.*"),
                Rule(f"{theirs}.block.*.nin_shortcut", f"{ours}.resnets.*.conv_shortcut"),
                Rule(f"{theirs}.{sampler}", f"{ours}.{sampler}rs.0"),
            ]
        middle, attention = f"{side}.mid_block", f"{side}.mid_block.attentions.0"
        rules += [
            Rule(f"{side}.mid.block_1", f"{middle}.resnets.0"),
            Rule(f"{side}.mid.block_2", f"{middle}.resnets.1"),
            Rule(f"{side}.mid.attn_1.norm", f"{attention}.group_norm"),
            Rule(f"{side}.mid.attn_1.q", f"{attention}.to_q", "1x1 convolution"),
            Rule(f"{side}.mid.attn_1.k", f"{attention}.to_k", "1x1 convolution"),
            Rule(f"{side}.mid.attn_1.v", f"{attention}.to_v", "1x1 convolution"),
            Rule(f"{side}.mid.attn_1.proj_out", f"{attention}.to_out.0", "1x1 convolution"),
            Rule(f"{side}.norm_out", f"{side}.conv_norm_out"),
        ]
    if "encoder.quant_conv.weight" in names:  # FLUX.2's; others have them outside
        rules += [Rule("encoder.quant_conv", "quant_conv"), Rule("decoder.post_quant_conv", "post_quant_conv")]
    return rules


_LAYER, _OPEN_LAYER = "text_model.encoder.layers.*", "transformer.resblocks.*"
OPEN_CLIP = Names(
    [
        *(
            Rule(
                f"{_OPEN_LAYER}.attn.in_proj_{leaf}",
                tuple(f"{_LAYER}.self_attn.{part}_proj.{leaf}" for part in ("q", "k", "v")),
            )
            for leaf in ("weight", "bias")
        ),
        Rule(f"{_OPEN_LAYER}.attn.out_proj", f"{_LAYER}.self_attn.out_proj"),
        Rule(f"{_OPEN_LAYER}.ln_1", f"{_LAYER}.layer_norm1"),
        Rule(f"{_OPEN_LAYER}.ln_2", f"{_LAYER}.layer_norm2"),
        Rule(f"{_OPEN_LAYER}.mlp.c_fc", f"{_LAYER}.mlp.fc1"),
        Rule(f"{_OPEN_LAYER}.mlp.c_proj", f"{_LAYER}.mlp.fc2"),
        Rule("token_embedding", "text_model.embeddings.token_embedding"),
        Rule("positional_embedding", "text_model.embeddings.position_embedding.weight"),
        Rule("ln_final", "text_model.final_layer_norm"),
        Rule("text_projection", "text_projection.weight", "transposed"),
    ]
)
"""OpenCLIP's text encoder, which stores queries, keys and values as one array."""


def controlnet_rules(names: Collection[str]) -> list[Rule]:
    """Those of a ControlNet, half of which is a UNet."""
    last = max(_numbers(names, r"input_hint_block\.(\d+)\."), default=0)
    hint = "controlnet_cond_embedding"
    rules = unet_rules(names)
    rules += [Rule(f"input_hint_block.{at}", f"{hint}.blocks.{at // 2 - 1}") for at in range(2, min(last, _MOST), 2)]
    rules += [
        Rule("input_hint_block.0", f"{hint}.conv_in"),
        Rule(f"input_hint_block.{last}", f"{hint}.conv_out"),
        Rule("zero_convs.*.0", "controlnet_down_blocks.*"),
        Rule("middle_block_out.0", "controlnet_mid_block"),
    ]
    return rules


def t2i_adapter_rules(names: Collection[str]) -> list[Rule]:
    """Those of a T2I-Adapter; the original code numbers residual blocks through, two for each block."""
    rules = [Rule("", "adapter")]
    rules += [Rule(f"body.*.body.*.{part}", f"adapter.body.*.resnets.*.{part}") for part in ("block1", "block2")]
    for i in range(min(_MOST, 1 + max(_numbers(names, r"body\.(\d+)\."), default=0))):
        rules += [
            Rule(f"body.{i}.{part}", f"adapter.body.{i // 2}.resnets.{i % 2}.{part}") for part in ("block1", "block2")
        ]
        if "conv_in.weight" in names:  # light adapters have none
            rules += [Rule(f"body.{i}.{part}", f"adapter.body.{i // 2}.{part}") for part in ("in_conv", "out_conv")]
    return rules


_Z_IMAGE = (
    Rule("x_embedder", "all_x_embedder.2-1"),
    Rule("final_layer", "all_final_layer.2-1"),
    *(
        Rule(f"{blocks}.*.attention.{theirs}", ours)
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for theirs, ours in (
            ("qkv", tuple(f"{blocks}.*.attention.to_{part}" for part in "qkv")),
            ("out", f"{blocks}.*.attention.to_out.0"),
            ("q_norm", f"{blocks}.*.attention.norm_q"),
            ("k_norm", f"{blocks}.*.attention.norm_k"),
        )
    ),
)
Z_IMAGE = Names(_Z_IMAGE)
"""Z-Image's transformer as its authors and ComfyUI store it, with queries, keys and values as one array."""


_IN_A_MODEL = re.compile(r"(model\.)?(language_model\.)?(?=.)")


def whole_name(name: str) -> str:
    """The name that an array of a language model has in files of the whole model, with head and vision encoder."""
    if name.startswith(("lm_head.", "visual.", "model.visual.")):
        return name.removeprefix("model.")
    return _IN_A_MODEL.sub("model.", name, count=1)


LLAMA_CPP = Names(
    [
        Rule("token_embd", "model.embed_tokens"),
        Rule("output_norm", "model.norm"),
        Rule("output", "lm_head"),
        *(
            Rule(f"blk.*.{theirs}", f"model.layers.*.{ours}")
            for theirs, ours in (
                ("attn_norm", "input_layernorm"),
                ("ffn_norm", "post_attention_layernorm"),
                *((f"attn_{part}", f"self_attn.{part}_proj") for part in "qkv"),
                ("attn_output", "self_attn.o_proj"),
                *((f"attn_{part}_norm", f"self_attn.{part}_norm") for part in "qk"),
                *((f"ffn_{part}", f"mlp.{part}_proj") for part in ("gate", "up", "down")),
            )
        ),
    ]
)
"""A language model as llama.cpp stores it. It turns the queries and keys of a Llama around, and not those of a Qwen."""


def flux2_stacks(width: int = 1, inner: int = 3) -> list[Rule]:
    """The layers of FLUX.2's transformer that diffusers stores as one; ``width`` is that of a token, ``inner`` that of
    a feed-forward, or their relation."""
    rules = []
    for mlp in ("transformer_blocks.*.ff", "transformer_blocks.*.ff_context"):
        rules.append(Rule(f"{mlp}.linear_in", (f"{mlp}.gate", f"{mlp}.up")))
        rules.append(Rule(f"{mlp}.linear_out", f"{mlp}.down"))
    return rules + _parallel(width, inner, *(f"{_SINGLE}.attn.{name}" for name in ("to_qkv_mlp_proj", "to_out")))


_SINGLE = "single_transformer_blocks.*"


def _parallel(width: int, inner: int, first: str, last: str) -> list[Rule]:
    """The two arrays of a parallel block."""
    parts = [f"{_SINGLE}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "ff.gate", "ff.up")]
    return [
        Rule(first, tuple(parts), rows=(width, width, width, inner, inner)),
        Rule(last, (f"{_SINGLE}.attn.to_out.0", f"{_SINGLE}.ff.down"), rows=(width, inner), axis=1),
    ]


def flux2_rules(width: int = 1, inner: int = 3) -> list[Rule]:
    """Those of FLUX.2's transformer, as diffusers and as its authors and ComfyUI store it."""
    double = "transformer_blocks.*"
    rules = [
        *flux2_stacks(width, inner),
        Rule("img_in", "x_embedder"),
        Rule("txt_in", "context_embedder"),
        Rule("final_layer.linear", "proj_out"),
        Rule("final_layer.adaLN_modulation.1", "norm_out.linear", "swapped halves"),
    ]
    for kind, ours in (("time_in", "timestep_embedder"), ("guidance_in", "guidance_embedder")):
        for i, layer in enumerate(("in_layer", "out_layer"), 1):
            rules.append(Rule(f"{kind}.{layer}", f"time_guidance_embed.{ours}.linear_{i}"))
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"):
        rules.append(Rule(f"{name}.lin", f"{name}.linear"))
    streams = {
        "img": ("ff", ("to_q", "to_k", "to_v"), "to_out.0", "norm"),
        "txt": ("ff_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "norm_added"),
    }
    for stream, (mlp, projections, out, norm) in streams.items():
        theirs = f"double_blocks.*.{stream}"
        rules += [
            Rule(f"{theirs}_mlp.2", f"{double}.{mlp}.down"),
            Rule(f"{theirs}_mlp.0", (f"{double}.{mlp}.gate", f"{double}.{mlp}.up")),
            Rule(f"{theirs}_attn.qkv", tuple(f"{double}.attn.{name}" for name in projections)),
            Rule(f"{theirs}_attn.proj", f"{double}.attn.{out}"),
            *_norms(f"{theirs}_attn", f"{double}.attn.{norm}"),
        ]
    single = "single_blocks.*"
    rules += _parallel(width, inner, f"{single}.linear1", f"{single}.linear2")
    return rules + _norms(single, f"{_SINGLE}.attn.norm")


def _norms(theirs: str, ours: str) -> list[Rule]:
    """Of queries and keys, whose weight is a scale for the authors and a weight for ComfyUI."""
    pairs = [(f"{theirs}.norm.{part}_norm", f"{ours}_{part[0]}") for part in ("query", "key")]
    return [Rule(f"{their}{end}", f"{our}{weight}") for their, our in pairs
            for end, weight in ((".scale", ".weight"), ("", ""))]  # fmt: skip


_KREA2 = (
    Rule("first", "img_in"),
    Rule("tmlp.0", "time_embed.linear_1"),
    Rule("tmlp.2", "time_embed.linear_2"),
    Rule("tproj.1", "time_mod_proj"),
    Rule("txtmlp.0.scale", "txt_in.norm.weight"),
    Rule("txtmlp.1", "txt_in.linear_1"),
    Rule("txtmlp.3", "txt_in.linear_2"),
    Rule("txtfusion.projector", "text_fusion.projector"),
    Rule("last.linear", "final_layer.linear"),
    Rule("last.norm.scale", "final_layer.norm.weight"),
    Rule("last.modulation.lin", "final_layer.scale_shift_table"),
    *(
        Rule(f"{blocks}.*.{theirs}", f"{our_blocks}.*.{ours}")
        for blocks, our_blocks in (
            ("blocks", "transformer_blocks"),
            ("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
            ("txtfusion.refiner_blocks", "text_fusion.refiner_blocks"),
        )
        for theirs, ours in (
            *((f"attn.w{part}", f"attn.to_{part}") for part in "qkv"),
            ("attn.wo", "attn.to_out.0"),
            ("attn.gate", "attn.to_gate"),
            ("attn.qknorm.qnorm.scale", "attn.norm_q.weight"),
            ("attn.qknorm.knorm.scale", "attn.norm_k.weight"),
            *((f"mlp.{part}", f"ff.{part}") for part in ("gate", "up", "down")),
            ("prenorm.scale", "norm1.weight"),
            ("postnorm.scale", "norm2.weight"),
            ("mod.lin", "scale_shift_table"),
        )
    ),
)
KREA2 = Names(_KREA2)
"""Krea 2's transformer as its authors and ComfyUI store it."""

TRANSFORMERS = Names([*_Z_IMAGE, *flux2_rules(), *_KREA2])
"""The names that layers of transformers have elsewhere, to be asked by ours."""

TAESD = Names(
    [
        Rule("encoder.*", "encoder.layers.*"),
        *(Rule(f"decoder.{i}", f"decoder.layers.{i - 1}") for i in range(1, _MOST)),  # the clamp is number 0
    ]
)


_WAN = {
    "residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}  # fmt: skip


def wan_vae_rules(names: Collection[str]) -> list[Rule]:
    """Those of the autoencoder of Wan and Qwen-Image. The original code numbers all layers of the decoder through."""
    rules = [Rule("conv1", "quant_conv"), Rule("conv2", "post_quant_conv")]
    rules.append(Rule("encoder.downsamples.*", "encoder.down_blocks.*"))
    blocks = [("encoder.downsamples.*", "encoder.down_blocks.*")]
    for side in ("encoder", "decoder"):
        parts = {"conv1": "conv_in", "head.0": "norm_out", "head.2": "conv_out", "middle.1": "mid_block.attentions.0"}
        rules += [Rule(f"{side}.{theirs}", f"{side}.{ours}") for theirs, ours in parts.items()]
        blocks += [(f"{side}.middle.{2 * i}", f"{side}.mid_block.resnets.{i}") for i in range(2)]
    each = 1 + min(_numbers(names, r"decoder\.upsamples\.(\d+)\.resample\."), default=3)
    for i in range(min(numbered(names, r"decoder\.upsamples\.(\d+)\."), _MOST)):
        level, place = f"decoder.up_blocks.{i // each}", i % each
        if place == each - 1:
            rules.append(Rule(f"decoder.upsamples.{i}", f"{level}.upsamplers.0"))
        else:
            blocks.append((f"decoder.upsamples.{i}", f"{level}.resnets.{place}"))
    return rules + [Rule(f"{block}.{part}", f"{ours}.{our}") for block, ours in blocks for part, our in _WAN.items()]


_OLD_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
_OLD_STEP = re.compile(r"\.(to_q|to_k|to_v|to_out\.0)(?=\.(?:weight|bias)$)")
_FLAX_LISTS = {"layers"}
"""Lists whose items Flax stores one level down, ``layers/0``, instead of as ``layers_0``."""

_LEFTOVER = re.compile(r"(text_model\.|(vision_model\.){0,2})embeddings\.position_ids")
"""Not weights: the numbers from 0 on, which older files of encoders hold."""


def spellings(name: str, param: Param) -> Iterator[str]:
    """The names that a parameter has in files in the layout of diffusers, old ones and Flax files; its name first."""
    old = _OLD_STEP.sub(lambda match: f".{_OLD_ATTENTION[match[1]]}", name)
    for spelling in dict.fromkeys((name, old)):
        for spelled in (spelling, flax_name(spelling, param)):
            yield spelled
            yield re.sub(r"^(text_model|vision_model)[./]", "", spelled)


def is_leftover(entry: Entry) -> bool:
    """Whether an array is known to be of no use, so that leaving it unread is right."""
    return _LEFTOVER.fullmatch(entry.name.replace("/", ".")) is not None


def flax_name(name: str, param: Param) -> str:
    """The Flax path of a parameter."""
    *steps, leaf = name.split(".")
    path: list[str] = []
    for step in steps:
        if step.isdigit() and path and path[-1] not in _FLAX_LISTS:
            path[-1] += f"_{step}"
        else:
            path.append(step)
    if leaf == "weight":
        leaf = "kernel" if param.layout != "plain" else "embedding" if len(param.shape) == 2 else "scale"
    return "/".join([*path, leaf])


def accepted_shapes(param: Param, entry: Entry) -> tuple[tuple[int, ...], ...]:
    """The shapes in which the entry's file format may store ``param``; the first is the usual one."""
    if entry.order == "torch":
        return param.checkpoint_shapes
    if param.layout in ("linear", "conv1x1"):
        both = (param.shape, (1, 1, *param.shape))
        return both if param.layout == "linear" else both[::-1]
    return (param.shape,)


def numbered(names: Collection[str], pattern: str) -> int:
    """How many of a numbered list there are."""
    return 1 + max(_numbers(names, pattern), default=-1)


def _numbers(names: Collection[str], pattern: str) -> set[int]:
    matches = map(re.compile(pattern).match, names)
    return {int(match[1]) for match in matches if match}
