"""Names of an adapter's arrays: the parameter that an array belongs to, and its role.

Trainers flatten a module's name ("down_blocks.0.attentions.0" becomes "down_blocks_0_attentions_0") and add a prefix
and a suffix. A flattened name cannot be split again, since names contain underscores. So the model's modules are
flattened, under each of their names, and looked up.

    kohya       lora_unet_<name>.lora_down.weight, lora_te_, lora_te1_, lora_te2_; of SDXL mostly with the names of ldm
    PEFT        unet.<name>.lora_A.weight, text_encoder.<name>; base_model.model.<name>, or no prefix
    diffusers   unet.<name>.attn1.processor.to_q_lora.down.weight (2023), unet.<name>.lora.down.weight
    LyCORIS     as kohya, and lycoris_<name>
    XLabs       double_blocks.0.processor.qkv_lora1.down.weight, of FLUX.1: 1 for the image, 2 for the text
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from canvax.errors import slip
from canvax.families.base import Family
from canvax.families.known import families
from canvax.models.anima import ADAPTER
from canvax.models.text import FIRST, SECOND
from canvax.params import Param, Spec, flatten
from canvax.weights.formats import unet_rules
from canvax.weights.rules import Names

_DENOISER = (
    *("lora_unet_", "unet_", "lycoris_", "diffusion_model_", "model_diffusion_model_", ""),
    *("base_model_model_", "base_model_model_unet_", "lycoris_unet_"),
    *("transformer_", "lora_transformer_", "base_model_model_transformer_"),
)
_TEXT = {
    FIRST: ("lora_te1_", "text_encoder_", "te1_", "clip_l_transformer_", "text_encoders_clip_l_transformer_"),
    SECOND: (
        "lora_te2_",
        "text_encoder_2_",
        "te2_",
        "clip_g_transformer_",
        "text_encoders_clip_g_transformer_",
        "lora_te3_",
        "text_encoders_t5xxl_transformer_",
    ),
}
_ADAPTER = ("text_conditioner_", *(f"{prefix}llm_adapter_" for prefix in (*_DENOISER, "lora_te_")))
"""Prefixes of Anima's adapter of texts, which is a part of the transformer in other programs."""

_TEXT_ALONE = ("lora_te_", "te_", "base_model_model_text_encoder_", "base_model_model_", "")
"""Prefixes for a single text encoder, in addition to those of the first."""

_OLD_TEXT = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "out_proj": "to_out"}

_DOWN = "lora_down lora_A lora_A.default lora.down lora_linear_layer.down"
_UP = "lora_up lora_B lora_B.default lora.up lora_linear_layer.up"
_SUFFIXES: dict[str, str] = {
    **{f".{name}.weight": "down" for name in _DOWN.split()},
    **{f".{name}.weight": "up" for name in _UP.split()},
    **{f".{name}.bias": "up_bias" for name in _UP.split()},
    "_lora.down.weight": "down",
    "_lora.up.weight": "up",
    ".lora_mid.weight": "mid",
    **{f".lora_magnitude_vector{end}": "magnitude" for end in ("", ".weight", ".default.weight", ".default")},
    **{f".hada_{name}": f"hada_{name}" for name in ["w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"]},
    **{f".lokr_{name}": name for name in ["w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2"]},
    **{f".{name}": name for name in ["alpha", "dora_scale", "scalar"]},
    ".diff": "diff",
    ".w_norm": "diff",
    ".diff_b": "diff_b",
    ".b_norm": "diff_b",
    ".set_weight": "set",
    ".set_bias": "set_b",
}
"""Suffixes of names and the role of their arrays: those of ``canvax.adapters``, and changes of a bias."""

_UNKNOWN: dict[str, str] = {
    **dict.fromkeys([".oft_blocks", ".oft_diag", ".oft_R", ".oft_R.weight", ".rescale"], "OFT"),
    **dict.fromkeys([".boft_R", ".boft_s"], "BOFT"),
    **dict.fromkeys([f".{name}.weight" for name in ("a1", "a2", "b1", "b2", "bm")], "GLoRA"),
    **dict.fromkeys([".ia3_l", ".on_input"], "IA3"),
    ".lokr_t1": "LoKr with two cores",
    ".bias_indices": "a sparse change",
    ".bias_values": "a sparse change",
    ".bias_size": "a sparse change",
    ".lora_embedding_A": "LoRA of an embedding table",
    ".lora_embedding_B": "LoRA of an embedding table",
    ".vera_lambda_b": "VeRA",
    ".vera_lambda_d": "VeRA",
    ".bora_scale": "BoRA",
    ".reshape_weight": "a weight of another shape",
    ".bias": "a bias that is no change",
}
"""Suffixes of algorithms that canvax does not support."""

_XLABS = re.compile(r"(.+\.processor\.(?:qkv|proj)_lora[12])\.(down|up)\.weight")

_LONGEST_FIRST = sorted({**_SUFFIXES, **_UNKNOWN}, key=len, reverse=True)


@cache
def _transformers(families: tuple[Family, ...]) -> Names:
    """Return the names of transformer layers in other programs, by name in the spec."""
    return Names(rule for family in families for rule in family.names)


class Module(NamedTuple):
    """A layer of the model: its component, and its dotted name in it."""

    component: str
    name: str

    def __str__(self) -> str:
        return f"{self.component}.{self.name}"


class Stack(NamedTuple):
    """The modules of the model that one module of a file covers: one, or several whose arrays it stacks.

    Attributes:
        modules: in the order of their parts.
        axis: 0 if their outputs are stacked, 1 if their inputs are.
        swapped: True if the halves of the outputs are swapped.
    """

    modules: tuple[Module, ...] = ()
    axis: int = 0
    swapped: bool = False


class Split(NamedTuple):
    """The parts of an array's name.

    Attributes:
        module: name without the suffix.
        role: role of the array; "" if canvax does not support it.
        unknown: the unsupported algorithm that it belongs to.
    """

    module: str
    role: str
    unknown: str = ""


def split_name(name: str) -> Split | None:
    """Return the parts of an array's name; None if its suffix is unknown."""
    if xlabs := _XLABS.fullmatch(name):
        return Split(xlabs[1], xlabs[2])
    for suffix in _LONGEST_FIRST:
        if name.endswith(suffix) and len(name) > len(suffix):
            return Split(name.removesuffix(suffix), _SUFFIXES.get(suffix, ""), _UNKNOWN.get(suffix, ""))
    return None


_COMMON = ("weight", "alpha", "scalar")


def is_adapters(name: str) -> bool:
    """Return whether an array of this name occurs only in adapters, and not in models."""
    split = split_name(name)
    return split is not None and bool(split.role) and split.role not in _COMMON


def flat(name: str) -> str:
    """Return a name as trainers flatten it."""
    return name.replace(".", "_")


def module_table(specs: Mapping[str, Spec]) -> dict[str, Stack]:
    """Return the modules of a model by flattened name, with every prefix that trainers use.

    Args:
        specs: specs of the denoiser, then of the text encoders, by component. For a component that other
            programs do not have, the names are those of its spec.
    """
    table: dict[str, Stack] = {}
    denoiser = next((component for component in specs if component not in (*_TEXT, ADAPTER)), None)
    for component, spec in specs.items():
        names = modules(spec)
        has = set(names)
        original = Names(unet_rules(names)) if component == "unet" else _transformers(families())
        is_single = component in _TEXT and not (_TEXT.keys() - {component}) & specs.keys()
        prefixes = _ADAPTER if component == ADAPTER else _DENOISER if component == denoiser else ()
        prefixes = (*_TEXT[component], *(_TEXT_ALONE if is_single else ())) if component in _TEXT else prefixes
        prefixes += tuple(f"{start}{flat(component)}_" for start in ("", "lora_", "base_model_model_"))
        for name in names:
            known = _text_names(name) if component in _TEXT else _denoiser_names(name)
            others = [] if component in _TEXT else original.external(name)
            others = [other for other in others if has.issuperset(other[1])]  # other families have other stacks
            for spelled, parts, rule in (*((known_name, (name,), None) for known_name in known), *others):
                swapped = rule is not None and rule.change == "swapped halves"
                stack = Stack(tuple(Module(component, part) for part in parts), rule.axis if rule else 0, swapped)
                for prefix in prefixes:
                    table.setdefault(prefix + flat(spelled), stack)
    return table


def modules(spec: Spec) -> list[str]:
    """Return the dotted names of a network's layers, those with a weight."""
    return [name.removesuffix(".weight") for name, _ in flatten(spec) if name.endswith(".weight")]


def parameters(specs: Mapping[str, Spec]) -> dict[tuple[str, str], Param]:
    """Return all parameters by component and dotted name."""
    return {(component, name): param for component, spec in specs.items() for name, param in flatten(spec)}


def nearest_module(name: str, table: Mapping[str, Stack]) -> str:
    """Return the module with the most similar name, as a clause for errors; "" if none is similar."""
    wanted = flat(name)
    alike = [known for known in table if known[:9] == wanted[:9]] if len(table) > 2000 else list(table)
    close = slip(wanted, alike)
    return f" (nearest: {table[close].modules[0]})" if close else ""


def _denoiser_names(name: str) -> Iterator[str]:
    yield name
    if name.endswith((".to_q", ".to_k", ".to_v", ".to_out.0")):
        attention, _, step = name.removesuffix(".0").rpartition(".")
        yield f"{attention}.processor.{step}"


def _text_names(name: str) -> Iterator[str]:
    attention, _, step = name.rpartition(".")
    for spelled in (name, *([f"{attention}.{_OLD_TEXT[step]}"] if step in _OLD_TEXT else [])):
        yield spelled
        yield spelled.removeprefix("text_model.")
