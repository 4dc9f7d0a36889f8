"""Reads the graph that ComfyUI stores in a PNG as ``prompt``, where it has one sampler, or a second one as hires fix.

    {"3": {"class_type": "KSampler", "inputs": {"seed": 1, "steps": 20, "positive": ["6", 0], ...}}, "6": ...}

Each input is a value or a link ``[id of a node, output]``. Nodes without a counterpart in canvax are listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustomAdvanced")
_CHANGES_NOTHING = {
    "CheckpointLoaderSimple", "UNETLoader", "UnetLoaderGGUF", "CLIPLoader", "CLIPLoaderGGUF", "DualCLIPLoader",
    "VAELoader", "VAEDecode", "VAEDecodeTiled", "SaveImage", "PreviewImage", "CLIPTextEncode", "LoraLoader",
    "LoraLoaderModelOnly", "CLIPSetLastLayer", "ConditioningZeroOut", "RandomNoise", "KSamplerSelect",
    "BasicScheduler", "Flux2Scheduler", "CFGGuider", "BasicGuider", "FluxGuidance", "CLIPTextEncodeFlux",
    "CLIPTextEncodeSDXL",
}  # fmt: skip
"""Nodes that are read here, and those that only move data."""
_TEXTS = (("text", ""), ("text_l", "text_g"), ("clip_l", "t5xxl"), ("prompt", ""))
"""Names of a node's texts for the first and the second text encoder."""
_JOIN = "StringConcatenate"
_CANNOT = "cannot be read"
_WEIGHTS = re.compile(r"\.(?:safetensors|ckpt|pt|gguf|sft)$", re.IGNORECASE)
_CFG_PP = "_cfg_pp"
"""End of the names of samplers with CFG++."""
_MOST_NODES, _MOST_JOINED, _MOST_BETWEEN = 10_000, 50, 8
_RESIZED = {"latent": "bilinear", "pixel": "lanczos"}
"""Methods by which canvax enlarges a first pass, in ComfyUI's words."""

Node = Mapping[str, Any]


def from_comfy_graph(text: str) -> dict[str, Any] | None:
    """Read a graph as the keys of ``canvax.Result.metadata``.

    ``other`` has what canvax cannot use: networks, as A1111 writes them in prompts, and nodes by their class.

    Returns:
        The settings; None if the text is no graph, or has no sampler, or several that are no hires fix.
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
    if len(samplers) == 1:
        return _Graph(nodes, samplers[0]).metadata()
    orders = (samplers, samplers[::-1]) if len(samplers) == 2 else ()
    both = (_Graph(nodes, first).with_second_pass(second) for first, second in orders)
    return next(filter(None, both), None)


class _Graph:
    def __init__(self, nodes: Mapping[str, Node], sampler: Node) -> None:
        self.nodes, self.sampler, self.used = nodes, sampler, {*_CHANGES_NOTHING, *_SAMPLERS}

    def metadata(self) -> dict[str, Any]:
        """Return the nodes that the sampler's inputs come from."""
        sampler = self.sampler
        noise, guider = self._node(sampler, "noise") or sampler, self._node(sampler, "guider") or sampler
        choice, sigmas = self._node(sampler, "sampler") or sampler, self._node(sampler, "sigmas") or sampler
        latents = self._node(sampler, "latent_image")
        model = list(self._chain(self._node(guider, "model"), "model"))
        read = {
            "prompt": None,
            "negative_prompt": None,
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
        other: dict[str, str] = {}
        conditions = list(self._conditions(guider, "positive", "conditioning"))
        self._read_text(conditions, "prompt", read, options, other)
        self._read_text(list(self._conditions(guider, "negative")), "negative_prompt", read, options, other)
        other |= dict.fromkeys(self._loras(model), "")
        embedded = next((scale for node in conditions if (scale := self._value(node, "guidance")) is not None), None)
        if embedded is not None:  # a model that reads the scale as an input
            if read["guidance_scale"] not in (None, 1):
                options["true_cfg_scale"] = read["guidance_scale"]
            read["guidance_scale"] = embedded
        denoise = self._value(sigmas, "denoise")
        if denoise not in (None, 1, 1.0):
            read["strength"], options["strength_rule"] = denoise, "exact"
        if latents is not None and "width" in latents["inputs"]:
            self.used.add(str(latents.get("class_type")))
        kinds = {str(node.get("class_type")) for node in self.nodes.values()}
        other |= {f"node {kind}": "" for kind in sorted(kinds - self.used)}
        if isinstance(batch := self._value(latents, "batch_size"), int) and batch > 1:
            other["batch size"] = str(batch)
        decoders = [node for node in self.nodes.values() if str(node.get("class_type")).startswith("VAEDecode")]
        vaes = [name for node in decoders if (name := self._value(self._node(node, "vae"), "vae_name"))]
        if vaes and model and "ckpt_name" in model[-1]["inputs"]:  # instead of that in the checkpoint
            read["vae"] = vaes[0]
        known = {name: value for name, value in read.items() if value is not None}
        return {**known, "noise": "torch", "options": options, "other": other}

    def with_second_pass(self, second: Node) -> dict[str, Any] | None:
        """Return the settings with a second sampler that runs on the enlarged image or latents of the first.

        Returns:
            The settings; None if the second sampler does something else.
        """
        first, method, resizing, further = self.sampler, "latent", None, False
        if any(first["inputs"].get(name) != second["inputs"].get(name) for name in ("model", "positive", "negative")):
            return None
        if {first.get("class_type"), second.get("class_type")} != {"KSampler"}:
            return None
        node = self._node(second, "latent_image")
        for _ in range(_MOST_BETWEEN):
            if node is None or node is first:
                break
            kind = str(node.get("class_type"))
            if "upscale_method" in node["inputs"]:
                if resizing is not None:
                    return None
                resizing = node
                self.used.add(kind)
            elif kind.startswith("VAE"):
                method = "pixel"
                self.used.add(kind)
            else:
                further = True  # e.g. a network that enlarges by its factor
            node = next(filter(None, (self._node(node, name) for name in ("samples", "pixels", "image"))), None)
        strength = self._value(second, "denoise")
        if node is not first or resizing is None or not isinstance(strength, int | float) or not 0 < strength <= 1:
            return None
        read = self.metadata()
        times = self._value(resizing, "scale_by")
        sides = [(self._value(resizing, name), read.get(name)) for name in ("width", "height")]
        if times is None and all(isinstance(side, int) and side > 0 for pair in sides for side in pair):
            times, across = (new / old for new, old in sides)
            times = round(times, 4) if abs(times - across) < 0.02 else None
        elif further:
            return None
        if not isinstance(times, int | float) or not 1 < times <= 8 or "width" not in read or "strength" in read:
            return None
        read["options"] |= {"hires": times, "hires_method": method, "hires_strength": strength}
        differs = {
            name: value
            for name in ("steps", "sampler_name", "scheduler", "cfg", "seed")
            if (value := self._value(second, name)) not in (None, self._value(first, name))
        }
        for name, option in (("steps", "hires_steps"), ("sampler_name", "hires_sampler")):
            if name in differs and not str(differs[name]).endswith(_CFG_PP):
                read["options"][option] = differs.pop(name)
        if (resize := self._value(resizing, "upscale_method")) != _RESIZED[method]:
            differs["upscale_method"] = resize
        read["other"] |= {f"hires {name}": str(value) for name, value in differs.items()}
        return read

    def _read_text(
        self,
        conditions: Sequence[Node],
        name: str,
        read: dict[str, Any],
        options: dict[str, Any],
        other: dict[str, str],
    ) -> None:
        """Read the prompt behind a conditioning, the text of the second encoder and the layers left out.

        Zeros instead of a text are no prompt.
        """
        if any(node.get("class_type") == "ConditioningZeroOut" for node in conditions):
            return
        if not conditions and name == "negative_prompt":
            return
        node = conditions[-1] if conditions else {"inputs": {}}
        first, second = next((names for names in _TEXTS if names[0] in node["inputs"]), _TEXTS[0])
        text, text_2 = self._text(node, first), self._text(node, second) if second else None
        label = name.replace("_", " ")
        if text is None:
            other[label] = _CANNOT
        else:
            read[name] = text
        if second and text_2 is None:
            other[f"{label}, {second}"] = _CANNOT
        elif text_2 not in (None, text):
            options[f"{name}_2"] = text_2
        is_sdxl = second == "text_g"
        if is_sdxl:
            sizes = [
                (side, self._value(node, f"{part}{side}")) for part in ("", "target_") for side in ("width", "height")
            ]
            crops = [self._value(node, f"crop_{axis}") for axis in "wh"]
            if any(value not in (None, read[side]) for side, value in sizes) or any(crops):
                other[f"{label}, sizes"] = "are not read"
        layers = (self._value(each, "stop_at_clip_layer") for each in self._chain(node, "clip"))
        layer = next((layer for layer in layers if layer is not None), -1)
        skip = -layer - 1 if isinstance(layer, int) else 0
        if name == "prompt" and skip > 0:
            options["clip_skip"] = skip
        elif skip != options.get("clip_skip", 0):
            other[f"{label}, stop_at_clip_layer"] = str(layer)

    def _text(self, node: Node, name: str, joined: set[int] | None = None) -> str | None:
        """Return the text in an input of a node, which may be joined from the texts of other nodes.

        Args:
            node: the node.
            name: name of its input.
            joined: ids of the joining nodes before this one, so that a circle of nodes ends.

        Returns:
            The text; None if it cannot be read.
        """
        source = self._node(node, name)
        if source is None or source.get("class_type") != _JOIN:
            value = self._value(node, name)
            return value if isinstance(value, str) else None
        joined = set() if joined is None else joined
        if id(source) in joined or len(joined) > _MOST_JOINED:
            return None
        joined.add(id(source))
        first, second = (self._text(source, part, joined) for part in ("string_a", "string_b"))
        self.used.add(_JOIN)
        delimiter = self._value(source, "delimiter") or ""
        return None if first is None or second is None else f"{first}{delimiter}{second}"

    def _conditions(self, node: Node, *names: str) -> Iterator[Node]:
        """Yield the nodes from an input to its text. Those with two inputs pass the first to their first output."""
        link = next((link for name in names if isinstance(link := node["inputs"].get(name), list)), None)
        seen: set[int] = set()
        while link and (source := self.nodes.get(str(link[0]))) is not None and id(source) not in seen:
            seen.add(id(source))
            yield source
            side = "negative" if link[1:] == [1] else "positive"
            link = next(
                (each for name in (side, "conditioning") if isinstance(each := source["inputs"].get(name), list)), None
            )

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

    def _chain(self, node: Node | None, name: str) -> Iterator[Node]:
        """Yield a node and those behind it, along an input: a model through its LoRAs to its file."""
        seen: set[int] = set()
        while node is not None and id(node) not in seen:
            seen.add(id(node))
            yield node
            node = self._node(node, name)

    def _loras(self, model: list[Node]) -> Iterator[str]:
        """Yield LoRAs as A1111 writes them, with the strength for the text encoders first, if that is another."""
        for node in reversed(model):
            if (name := self._value(node, "lora_name")) is not None:
                weight, text = self._value(node, "strength_model"), self._value(node, "strength_clip")
                if "strength_clip" not in node["inputs"]:
                    text = 0  # it is for the model alone
                yield f"<lora:{_stem(name)}:{'' if text in (None, weight) else f'{text}:'}{weight}>"


def _name(file: Any) -> Any:
    """Return the name of a file without its ending; folders stay, since other files may have the same name."""
    return _WEIGHTS.sub("", file).replace("\\", "/") if isinstance(file, str) else file


def _stem(file: Any) -> Any:
    return _name(file).split("/")[-1] if isinstance(file, str) else file
