"""Tables of the names that files use. Specs have the names of current PyTorch diffusers files.

    UNet              input_blocks.4.1.norm.weight            down_blocks.1.attentions.0.norm.weight
    VAE               decoder.up.3.block.0.nin_shortcut.bias  decoder.up_blocks.0.resnets.0.conv_shortcut.bias
    OpenCLIP          transformer.resblocks.0.mlp.c_fc.bias   text_model.encoder.layers.0.mlp.fc1.bias
    ControlNet        zero_convs.1.0.weight                   controlnet_down_blocks.1.weight
    T2I-Adapter       body.3.block1.weight                    adapter.body.1.resnets.1.block1.weight
    TAESD             decoder.1.weight                        decoder.layers.0.weight
    llama.cpp         blk.0.attn_q.weight                     model.layers.0.self_attn.q_proj.weight

The first three are those of the original Stable Diffusion code, as in single files. (Rombach et al. 2022,
"High-Resolution Image Synthesis with Latent Diffusion Models"; Ilharco et al. 2021, "OpenCLIP".) Flax files, old files
and files without a prefix are read by ``spellings``. Names of transformers belong to their families.
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


def _resnet(external: str, internal: str) -> list[Rule]:
    return [Rule(f"{external}.{old}", f"{internal}.{new}") for old, new in _RESNET.items()]


MOST = 100
"""Largest number of blocks for which rules are made, whatever a file contains."""


def unet_rules(names: Collection[str]) -> list[Rule]:
    """Return the rules for a UNet; ``names`` in either layout determine the number of blocks."""
    stride = _numbers(names, r"input_blocks\.(\d+)\.0\.op\.")
    each = min(stride, default=2 + max(_numbers(names, r"down_blocks\.0\.resnets\.(\d+)\."), default=1))
    each = max(1, min(each, MOST))  # resnets of a level, and the resizing layer
    last = max(_numbers(names, r"(?:input|output)_blocks\.(\d+)\."), default=0) // each
    levels = 1 + max(last, max(_numbers(names, r"(?:down|up)_blocks\.(\d+)\."), default=0))
    attends = _numbers(names, r"up_blocks\.(\d+)\.attentions\.")
    rules = [
        *_UNET,
        *_resnet("middle_block.0", "mid_block.resnets.0"),
        *_resnet("middle_block.2", "mid_block.resnets.1"),
    ]
    for level in range(min(levels, MOST)):
        for i in range(each):
            at = level * each + i
            rules += _resnet(f"input_blocks.{at + 1}.0", f"down_blocks.{level}.resnets.{i}")
            rules += _resnet(f"output_blocks.{at}.0", f"up_blocks.{level}.resnets.{i}")
            rules.append(Rule(f"input_blocks.{at + 1}.1", f"down_blocks.{level}.attentions.{i}"))
            rules.append(Rule(f"output_blocks.{at}.1", f"up_blocks.{level}.attentions.{i}"))
        end = (level + 1) * each
        rules.append(Rule(f"input_blocks.{end}.0.op", f"down_blocks.{level}.downsamplers.0.conv"))
        # Upsampling follows the attention of its level, if there is any.
        for place in (2, 1) if level in attends else (1, 2):
            rules.append(Rule(f"output_blocks.{end - 1}.{place}.conv", f"up_blocks.{level}.upsamplers.0.conv"))
    return rules


def vae_rules(names: Collection[str]) -> list[Rule]:
    """Return the rules for an autoencoder, from names as for a UNet; decoders count their levels in reverse."""
    top = max(_numbers(names, r"decoder\.up(?:_blocks)?\.(\d+)\."), default=0)
    rules = []
    for side, way, sampler in (("encoder", "down", "downsample"), ("decoder", "up", "upsample")):
        for level in range(min(top, MOST) + 1):
            external = f"{side}.{way}.{level}"
            internal = f"{side}.{way}_blocks.{level if way == 'down' else top - level}"
            rules += [
                Rule(f"{external}.block.*", f"{internal}.resnets.*"),
                Rule(f"{external}.block.*.nin_shortcut", f"{internal}.resnets.*.conv_shortcut"),
                Rule(f"{external}.{sampler}", f"{internal}.{sampler}rs.0"),
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
"""Rules for OpenCLIP's text encoder, which stores queries, keys and values as one array."""


def controlnet_rules(names: Collection[str]) -> list[Rule]:
    """Return the rules for a ControlNet, half of which is a UNet."""
    last = max(_numbers(names, r"input_hint_block\.(\d+)\."), default=0)
    hint = "controlnet_cond_embedding"
    rules = unet_rules(names)
    rules += [Rule(f"input_hint_block.{at}", f"{hint}.blocks.{at // 2 - 1}") for at in range(2, min(last, MOST), 2)]
    rules += [
        Rule("input_hint_block.0", f"{hint}.conv_in"),
        Rule(f"input_hint_block.{last}", f"{hint}.conv_out"),
        Rule("zero_convs.*.0", "controlnet_down_blocks.*"),
        Rule("middle_block_out.0", "controlnet_mid_block"),
    ]
    return rules


def t2i_adapter_rules(names: Collection[str]) -> list[Rule]:
    """Return the rules for a T2I-Adapter; the original code numbers all residual blocks, two per block."""
    rules = [Rule("", "adapter")]
    rules += [Rule(f"body.*.body.*.{part}", f"adapter.body.*.resnets.*.{part}") for part in ("block1", "block2")]
    for i in range(min(MOST, 1 + max(_numbers(names, r"body\.(\d+)\."), default=0))):
        rules += [
            Rule(f"body.{i}.{part}", f"adapter.body.{i // 2}.resnets.{i % 2}.{part}") for part in ("block1", "block2")
        ]
        if "conv_in.weight" in names:  # absent from light adapters
            rules += [Rule(f"body.{i}.{part}", f"adapter.body.{i // 2}.{part}") for part in ("in_conv", "out_conv")]
    return rules


_IN_A_MODEL = re.compile(r"(model\.)?(language_model\.)?(?=.)")


def whole_name(name: str) -> str:
    """Return the name of a language model's array in files of the whole model, with head and vision encoder."""
    if name.startswith(("lm_head.", "visual.", "model.visual.")):
        return name.removeprefix("model.")
    return _IN_A_MODEL.sub("model.", name, count=1)


LLAMA_CPP = Names(
    [
        Rule("token_embd", "model.embed_tokens"),
        Rule("output_norm", "model.norm"),
        Rule("output", "lm_head"),
        *(
            Rule(f"blk.*.{external}", f"model.layers.*.{internal}")
            for external, internal in (
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
"""Rules for a language model of llama.cpp, which reorders the queries and keys of a Llama, but not of a Qwen."""


T5_CPP = Names(
    [
        Rule("token_embd", "shared"),
        Rule("enc.output_norm", "encoder.final_layer_norm"),
        *(
            Rule(f"enc.blk.*.{external}", f"encoder.block.*.layer.{internal}")
            for external, internal in (
                *((f"attn_{part}", f"0.SelfAttention.{part}") for part in "qkvo"),
                ("attn_rel_b", "0.SelfAttention.relative_attention_bias"),
                ("attn_norm", "0.layer_norm"),
                ("ffn_norm", "1.layer_norm"),
                *((f"ffn_{external}", f"1.DenseReluDense.{internal}")
                  for external, internal in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo"))),
            )
        ),
    ]
)  # fmt: skip
"""Rules for T5's encoder of llama.cpp."""


TAESD = Names(
    [
        Rule("encoder.*", "encoder.layers.*"),
        *(Rule(f"decoder.{i}", f"decoder.layers.{i - 1}") for i in range(1, MOST)),  # the clamp has number 0
    ]
)


_OLD_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
_OLD_STEP = re.compile(r"\.(to_q|to_k|to_v|to_out\.0)(?=\.(?:weight|bias)$)")
_FLAX_LISTS = {"layers"}
"""Lists whose items Flax stores one level deeper, as ``layers/0`` instead of ``layers_0``."""

LEFTOVER = re.compile(r"(text_model\.|(vision_model\.){0,2})embeddings\.position_ids")
"""Buffers without weights: position ids, in older files of encoders."""


def spellings(name: str, param: Param) -> Iterator[str]:
    """Return the names of a parameter in diffusers files, old ones and Flax files; the current name is first."""
    old = _OLD_STEP.sub(lambda match: f".{_OLD_ATTENTION[match[1]]}", name)
    for spelling in dict.fromkeys((name, old)):
        for spelled in (spelling, flax_name(spelling, param)):
            yield spelled
            yield re.sub(r"^(text_model|vision_model)[./]", "", spelled)


def flax_name(name: str, param: Param) -> str:
    """Return the Flax path of a parameter."""
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
    """Return the shapes in which the entry's file format may store ``param``; the usual one is first."""
    if entry.order == "torch":
        return param.checkpoint_shapes
    if param.layout in ("linear", "conv1x1"):
        both = (param.shape, (1, 1, *param.shape))
        return both if param.layout == "linear" else both[::-1]
    return (param.shape,)


def numbered(names: Collection[str], pattern: str) -> int:
    """Return the length of a numbered list."""
    return 1 + max(_numbers(names, pattern), default=-1)


def _numbers(names: Collection[str], pattern: str) -> set[int]:
    matches = map(re.compile(pattern).match, names)
    return {int(match[1]) for match in matches if match}
