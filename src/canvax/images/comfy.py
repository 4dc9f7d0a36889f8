"""Reads the graph that ComfyUI stores in a PNG as ``prompt``, where it has one sampler.

    {"3": {"class_type": "KSampler", "inputs": {"seed": 1, "steps": 20, "positive": ["6", 0], ...}}, "6": ...}

Each input is a value or a link ``[id of a node, output]``. Nodes without a counterpart in canvax are listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustomAdvanced")
_CHANGES_NOTHING = {
    "CheckpointLoaderSimple", "UNETLoader", "UnetLoaderGGUF", "CLIPLoader", "CLIPLoaderGGUF", "DualCLIPLoader",
    "VAELoader", "VAEDecode", "VAEDecodeTiled", "SaveImage", "PreviewImage", "CLIPTextEncode", "LoraLoader",
    "LoraLoaderModelOnly", "CLIPSetLastLayer", "ConditioningZeroOut", "RandomNoise", "KSamplerSelect",
    "BasicScheduler", "Flux2Scheduler", "CFGGuider", "BasicGuider",
}  # fmt: skip
"""Nodes that are read here, and those that only move data."""
_WEIGHTS = re.compile(r"\.(?:safetensors|ckpt|pt|gguf|sft)$", re.IGNORECASE)
_CFG_PP = "_cfg_pp"
"""End of the names of samplers with CFG++."""
_MOST_NODES = 10_000

Node = Mapping[str, Any]


def from_comfy_graph(text: str) -> dict[str, Any] | None:
    """Read a graph as the keys of ``canvax.Result.metadata``.

    ``other`` has what canvax cannot use: networks, as A1111 writes them in prompts, and nodes by their class.

    Returns:
        The settings; None if the text is no graph, or has no sampler or several of them.
    """
    try:
        graph = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(graph, dict) or len(graph) > _MOST_NODES:
        return None
    nodes = {
        key: node for key, node in graph.items() if isinstance(node, dict) and isinstance(node.get("inputs"), dict)
    }
    samplers = [node for node in nodes.values() if node.get("class_type") in _SAMPLERS]
    return _Graph(nodes, samplers[0]).metadata() if len(samplers) == 1 else None


class _Graph:
    def __init__(self, nodes: Mapping[str, Node], sampler: Node) -> None:
        self.nodes, self.sampler = nodes, sampler

    def metadata(self) -> dict[str, Any]:
        """Return the nodes that the sampler's inputs come from."""
        sampler = self.sampler
        noise, guider = self._node(sampler, "noise") or sampler, self._node(sampler, "guider") or sampler
        choice, sigmas = self._node(sampler, "sampler") or sampler, self._node(sampler, "sigmas") or sampler
        latents = self._node(sampler, "latent_image")
        model = list(self._chain(self._node(guider, "model")))
        positive = self._node(guider, "positive") or self._node(guider, "conditioning")
        read = {
            "prompt": self._text(positive) or "",
            "negative_prompt": self._text(self._node(guider, "negative")),
            "seed": self._value(noise, "seed", "noise_seed"),
            "num_inference_steps": self._value(sigmas, "steps"),
            "guidance_scale": self._value(guider, "cfg"),
            "sampler": self._value(choice, "sampler_name"),
            "model": _name(self._value(model[-1], "ckpt_name", "unet_name")) if model else None,
            "width": self._value(latents, "width"),
            "height": self._value(latents, "height"),
        }
        options = {"prompt_syntax": "comfy", "noise": "torch"}  # ComfyUI draws noise as PyTorch does on a CPU
        if isinstance(name := read["sampler"], str) and name.endswith(_CFG_PP):
            read["sampler"], options["guidance_method"] = name.removesuffix(_CFG_PP), "cfg_pp"
        scheduler = self._value(sigmas, "scheduler")
        if scheduler is not None:
            options["sigmas"] = scheduler
        other = {f"<lora:{_stem(name)}:{weight}>": "" for name, weight in self._loras(model)}
        denoise = self._value(sigmas, "denoise")
        if denoise not in (None, 1, 1.0):
            read["strength"], options["strength_rule"] = denoise, "exact"
        used = {*_CHANGES_NOTHING, *_SAMPLERS}
        if latents is not None and "width" in latents["inputs"]:
            used.add(str(latents.get("class_type")))
        kinds = {str(node.get("class_type")) for node in self.nodes.values()}
        other |= {f"node {kind}": "" for kind in sorted(kinds - used)}
        if isinstance(batch := self._value(latents, "batch_size"), int) and batch > 1:
            other["batch size"] = str(batch)
        decoders = [node for node in self.nodes.values() if str(node.get("class_type")).startswith("VAEDecode")]
        vaes = [name for node in decoders if (name := self._value(self._node(node, "vae"), "vae_name"))]
        if vaes and model and "ckpt_name" in model[-1]["inputs"]:  # instead of that in the checkpoint
            read["vae"] = vaes[0]
        known = {name: value for name, value in read.items() if value is not None}
        return {**known, "noise": "torch", "options": options, "other": other}

    def _node(self, node: Node | None, name: str) -> Node | None:
        """Return the node that an input is linked to."""
        link = node["inputs"].get(name) if node else None
        return self.nodes.get(str(link[0])) if isinstance(link, list) and link else None

    def _value(self, node: Node | None, *names: str) -> Any:
        """Return the first of the inputs that has a value; through a link, the only value of that node."""
        if node is None:
            return None
        for name in names:
            value = node["inputs"].get(name)
            if isinstance(value, list):
                source = self._node(node, name)
                values = [each for each in source["inputs"].values() if not isinstance(each, list)] if source else []
                value = values[0] if len(values) == 1 else None
            if isinstance(value, str | int | float):
                return value
        return None

    def _text(self, node: Node | None) -> str | None:
        """Return the text behind a conditioning; None if it is zeros or not a plain text."""
        for each in self._chain(node, "conditioning"):
            if each.get("class_type") == "ConditioningZeroOut":
                return None
            if (text := self._value(each, "text")) is not None:
                return str(text)
        return None

    def _chain(self, node: Node | None, *further: str) -> Iterator[Node]:
        """Yield a node and those behind it, along inputs of its kind: a model through its LoRAs to its file."""
        seen: list[Node] = []
        while node is not None and node not in seen:
            seen.append(node)
            yield node
            node = next(filter(None, (self._node(node, name) for name in (*further, "model"))), None)

    def _loras(self, model: list[Node]) -> Iterator[tuple[Any, Any]]:
        for node in reversed(model):
            if (name := self._value(node, "lora_name")) is not None:
                yield _stem(name), self._value(node, "strength_model")


def _name(file: Any) -> Any:
    """Return the name of a file without its ending; folders stay, since other files may have the same name."""
    return _WEIGHTS.sub("", file).replace("\\", "/") if isinstance(file, str) else file


def _stem(file: Any) -> Any:
    return _name(file).split("/")[-1] if isinstance(file, str) else file
