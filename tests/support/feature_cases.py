"""Calls in which many features meet: the levels of every feature, and how a row of levels becomes a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

import canvax
from canvax import ImagePrompt
from canvax.parallel.mesh import make_mesh
from canvax.pipelines.safety import SafetyChecker, load_safety_checker
from canvax.weights.location import Location
from tests.support import control_files, small_sdxl
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.control_files import adapter, controlnet, union
from tests.support.covering import Row
from tests.support.ip_adapter_files import encoder, ip_adapter
from tests.support.small_checkpoint import write_small_checker, write_small_checkpoint

HEIGHT, WIDTH = 48, 64  # not square: a transposed size fails
STEPS = 4
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"

FACTORS: dict[str, dict[str, str]] = {
    "model": {"sd": "sd", "xl": "xl"},
    "weights": {"float32": "float32", "int8": "int8"},
    "devices": {"1": "1", "8": "8"},
    "adapters": {"none": "", "merged": "", "word": "", "beside": "beside"},
    "control": {"none": "", "net": "net", "lora": "net", "t2i": "t2i", "both": "both", "union": "union"},
    "control_form": dict.fromkeys(("none", "window", "guess", "prompt"), ""),
    "image_prompt": {"none": "", "plain": "plain", "masked": "masked", "embeds": "plain"},
    "start": {
        "text": "", "latents": "", "resumed": "",
        "image": "image", "renoised": "image",
        "hard": "mask", "filled": "mask", "cropped": "mask", "outpainted": "mask",
    },
    "guidance": {
        "cfg": "", "steps": "", "cfg_pp": "", "off": "off", "interval": "interval", "momentum": "momentum",
        "pag": "pag",
    },
    "prompt": {
        "plain": "", "comfy": "", "scheduled": "", "encoded": "", "long": "long", "and": "and",
    },
    "unet": {"plain": "", "reuse": "reuse"},
    "end": {"whole": "", "stopped": "", "tiled": "tiled", "pixel": "hires", "latent": "hires"},
    "sampler": dict.fromkeys(("own", "ddim eta", "heun", "dpmpp_sde", "flow_euler"), ""),
    "schedule": dict.fromkeys(("own", "karras", "timesteps"), ""),
    "noise": dict.fromkeys(("philox", "torch", "variation", "seed_size"), ""),
    "clip_skip": {"0": "", "1": ""},
    "negative": dict.fromkeys(("none", "shared", "each"), ""),
    "texts": dict.fromkeys(("none", "second", "sizes", "hires"), ""),
    "watch": dict.fromkeys(("none", "callback", "steered", "checker"), ""),
    "output": dict.fromkeys(("pil", "np", "latent"), ""),
    "images": dict.fromkeys(("listed", "of one prompt"), ""),
}  # fmt: skip
"""Levels of each feature, the plain one first, and which programs each needs: levels of one class share them."""

PLAIN: Row = {name: next(iter(levels)) for name, levels in FACTORS.items()}

PROMPTS = ("a cat", "a red dog on a hill", "two boats", "an old tree")
LONG = " ".join(f"word{i} and" for i in range(45))
SEEDS = (11, 22, 33, 44)
STRENGTHS = (0.5, 1.0, 0.8, 0.3)
"""Of image prompts."""


def reproducible(row: Row) -> bool:
    """Whether the metadata of an image is all that it takes to generate it again."""
    arrays = row["start"] in ("latents", "resumed") or row["prompt"] == "encoded" or row["image_prompt"] == "embeds"
    return not arrays and row["end"] != "stopped" and row["watch"] != "steered"


@cache
def photo(seed: int, width: int = WIDTH) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT // 8, width // 8, 3), np.uint8)
    return Image.fromarray(np.kron(pixels, np.ones((8, 8, 1), np.uint8)))


@cache
def edges(seed: int) -> Image.Image:
    return control_files.edges(seed, (WIDTH, HEIGHT))


@cache
def mask(kind: str, seed: int) -> Image.Image:
    pixels = np.zeros((HEIGHT, 48 if kind == "outpainted" else WIDTH), np.uint8)
    pixels[8 + 4 * seed : 32 + 4 * seed, 8 + 8 * seed : 40] = 255
    return Image.fromarray(pixels)


def array(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@dataclass
class Studio:
    """Small models and all networks for them in files, and pipelines of both, each made once."""

    root: Path
    pipes: dict[Any, canvax.Pipeline] = field(default_factory=dict)

    def file(self, name: str, image: Image.Image) -> str:
        """An image as a file."""
        path = self.root / f"{name}.png"
        if not path.exists():
            image.save(path)
        return str(path)

    def base(self, model: str, weights: str, devices: str) -> canvax.Pipeline:
        """A model on devices, with adapters that are ready but weigh nothing."""
        key = (model, weights, devices)
        if key in self.pipes:
            return self.pipes[key]
        folder = self.root / model
        if not folder.exists():
            (write_small_checkpoint if model == "sd" else small_sdxl.build)(folder)
            write_small_checker(folder / "safety_checker")
        more: dict[str, Any] = {"quantize": "int8"} if weights == "int8" else {"dtype": weights}
        mesh = make_mesh(jax.devices()[: int(devices)])
        self.pipes[key] = pipe = canvax.load(folder, mesh=mesh, progress=False, **more)
        self._write_networks(model, pipe)
        pipe.adapters.beside(rank=8, places=2)
        for name in ("clay", "wool"):
            pipe.adapters.load(name, self.root / f"{model}-{name}.safetensors", 0.0, beside=True)
        pipe.adapters.load("ink", self.root / f"{model}-ink.safetensors", 0.0)
        return pipe

    def checker(self, model: str) -> SafetyChecker:
        """Of a model; it refuses nothing."""
        return load_safety_checker(Location(self.root / model))

    def _write_networks(self, model: str, pipe: canvax.Pipeline) -> None:
        root = self.root
        if (root / f"{model}-ink.safetensors").exists():
            return
        controlnet(root / f"{model}-net", pipe, 1, strength=0.5)
        if model == "xl":
            union(root / "xl-union", pipe, 3)
        kind = {} if model == "sd" else {"adapter_type": "full_adapter_xl", "downscale_factor": 16}
        adapter(root / f"{model}-t2i", pipe, 2, **kind)
        file, added = {"lora_controlnet": np.zeros(1, np.float32)}, Draw(5)
        whole = load_file(controlnet(root / f"{model}-whole", pipe, 4, strength=0.5) / WEIGHTS_FILE)
        for name, value in whole.items():
            if value.ndim > 1 and not name.startswith("controlnet_"):
                stem = name.removesuffix(".weight")
                ends = (len(value), 2, *[1] * (value.ndim - 2)), (2, *value.shape[1:])
                file |= {f"{stem}.up": added(*ends[0], scale=0.1), f"{stem}.down": added(*ends[1], scale=0.1)}
            else:
                file[name] = value
        save_file(file, root / f"{model}-lora.safetensors")
        if not (root / "image_encoder").exists():
            encoder(root / "image_encoder")
        for kind in ("plain", "plus"):
            ip_adapter(root / f"{model}-{kind}.safetensors", kind, pipe.model.unet)
        for seed, name in enumerate(("ink", "clay", "wool")):
            draw, arrays = Draw(seed), {}
            for (component, module), shape in layers(pipe.model.networks.specs()).items():
                if name == "ink" or "attn" in module:
                    made = lora(draw, shape).arrays
                    arrays |= {f"{component}.{module}{end}": part for end, part in made.items()}
            write(root / f"{model}-{name}.safetensors", arrays)
        widths = {"clip_l": 16, "clip_g": 24} if model == "xl" else {"emb_params": 48}
        save_file(
            {name: 0.1 * array(9, 2, width) for name, width in widths.items()}, root / f"{model}-blob.safetensors"
        )

    def networks(self, row: Row) -> list[Path]:
        """Files of the networks that read control images."""
        model = row["model"]
        one = self.root / f"{model}-{row['control']}"
        return {
            "none": [],
            "lora": [self.root / f"{model}-lora.safetensors"],
            "both": [self.root / f"{model}-net", self.root / f"{model}-t2i"],
        }.get(row["control"], [one])

    def image_adapters(self, row: Row) -> list[Path]:
        kinds = {"none": [], "masked": ["plain", "plus"]}.get(row["image_prompt"], ["plain"])
        return [self.root / f"{row['model']}-{kind}.safetensors" for kind in kinds]

    def pipe(self, row: Row, devices: str) -> canvax.Pipeline:
        """The pipeline of a row."""
        nets, prompts = self.networks(row), self.image_adapters(row)
        key = (row["model"], row["weights"], devices, *nets, *prompts)
        if key not in self.pipes:
            base = self.base(row["model"], row["weights"], devices)
            pipe = base.with_controlnet(nets) if nets else base
            pipe = pipe.with_ip_adapter(prompts, self.root / "image_encoder", progress=False) if prompts else pipe
            self.pipes[key] = pipe
        return self.pipes[key]

    @contextmanager
    def call(self, row: Row, people: Sequence[int], devices: str) -> Iterator[tuple[canvax.Pipeline, Any]]:
        """The pipeline with what a row merges into it, and the keywords of the call for some images."""
        pipe = self.pipe(row, devices)
        with ExitStack() as stack:
            if row["adapters"] == "merged":
                pipe.adapters.set({"ink": 0.7})
                stack.callback(pipe.adapters.set, {"ink": 0.0})
            if row["adapters"] == "word":
                pipe.adapters.load_embedding(self.root / f"{row['model']}-blob.safetensors", "blob")
                stack.callback(pipe.adapters.remove, "blob")
            if row["watch"] == "checker":  # a pipeline has it from the beginning; another one would compile all anew
                object.__setattr__(pipe, "safety_checker", self.checker(row["model"]))
                stack.callback(object.__setattr__, pipe, "safety_checker", None)
            yield pipe, self.keywords(row, people, pipe)

    def keywords(self, row: Row, people: Sequence[int], pipe: canvax.Pipeline) -> dict[str, Any]:
        """Arguments of the call for some images, of which each has all of its arguments to itself."""
        options: dict[str, Any] = {"progress": False, **_options(row)}
        call: dict[str, Any] = {
            "height": HEIGHT, "width": WIDTH, "num_inference_steps": STEPS,
            "seed": [SEEDS[p] for p in people], "output_type": row["output"],
        }  # fmt: skip
        call |= _texts(row, people, options)
        if row["prompt"] == "encoded":
            negative = call["negative_prompt"]
            call["prompt"] = pipe.encode(call["prompt"], clip_skip=int(row["clip_skip"]))
            call["negative_prompt"] = negative
        call["guidance_scale"] = {"off": 1.0, "cfg_pp": 0.6}.get(row["guidance"], 4.0)
        if row["schedule"] == "timesteps":
            del call["num_inference_steps"]
        if row["sampler"] != "own":
            call["sampler"] = row["sampler"].partition(" ")[0]
        if row["adapters"] == "beside":
            own = [{"clay": 0.8}, {"wool": -0.5, "clay": 0.2}, None, {"wool": 1.0}]
            call["adapters"] = [own[p] for p in people]
        call |= _start(row, people)
        if row["control"] == "union":
            shown = [
                {"depth": edges(p), "canny:0.5": edges(p + 4)} if p % 2 == 0 else {"tile": edges(p)} for p in people
            ]
            call["control"] = shown
        elif row["control"] == "both":
            call["control"] = [[edges(p) for p in people], [edges(p + 4) for p in people]]
        elif row["control"] != "none":
            call["control"] = [edges(p) for p in people]
        strengths = [STRENGTHS[p] for p in people]
        if row["image_prompt"] == "embeds":
            call["image_prompt"] = ImagePrompt(embeds=np.stack([array(p, 24) for p in people]), scale=strengths)
        elif row["image_prompt"] != "none":
            call["image_prompt"] = [ImagePrompt([photo(10 + p) for p in people], strengths)]
        if row["image_prompt"] == "masked":
            images, masks = [photo(20 + p) for p in people], [mask("", p) for p in people]
            call["image_prompt"].append(ImagePrompt(images, [STRENGTHS[::-1][p] for p in people], masks, adapter=1))
        call["options"] = canvax.Options(**options)
        return call

    def names(self, row: Row, person: int) -> dict[str, str]:
        """The files of a call by the names that ``canvax info`` writes in their place."""
        start, files = row["start"], {}
        if FACTORS["start"][start]:
            width = 48 if start == "outpainted" else WIDTH
            files["IMAGE"] = self.file(f"photo{person}-{width}", photo(person, width))
        if row["image_prompt"] == "masked":
            files["PROMPT2"] = self.file(f"photo{20 + person}", photo(20 + person))
            files["MASK2"] = self.file(f"mask{person}", mask("", person))
        if FACTORS["start"][start] == "mask" or start == "renoised":
            files["MASK"] = self.file(f"mask{start}{person}", mask(start, person))
        shown = [self.file(f"edges{person + 4 * i}", edges(person + 4 * i)) for i in range(2)]
        files |= {f"CONTROL{i + 1}": image for i, image in enumerate(shown)}
        if row["image_prompt"] != "none":
            files["PROMPT1"] = self.file(f"photo{10 + person}", photo(10 + person))
        return files

    def flags(self, row: Row, person: int) -> list[str]:
        """What the command line needs besides an image to generate it again."""
        words, files = list[str](), self.names(row, person)
        for name in ("IMAGE", "MASK"):
            words += [f"--{name.lower()}", files[name]] if name in files else []
        for i, net in enumerate(self.networks(row)):
            control = files[f"CONTROL{i + 1}"]
            if row["control"] == "union":
                both = f"depth={control},canny:0.5={files['CONTROL2']}"
                control = both if person % 2 == 0 else f"tile={control}"
            words += ["--controlnet", str(net), "--control", control]
        if row["image_prompt"] != "none":
            words += ["--ip-image", f"{files['PROMPT1']}:{STRENGTHS[person]}"]
        if row["image_prompt"] == "masked":
            words += ["--ip-image", f"{files['PROMPT2']}:{STRENGTHS[::-1][person]}", "--ip-mask", "none"]
            words += ["--ip-mask", files["MASK2"]]
        for file in self.image_adapters(row):
            words += ["--ip-adapter", str(file)]
        return words


def _options(row: Row) -> dict[str, Any]:
    options: dict[str, Any] = {
        "guidance": {
            "steps": {"guidance_steps": (5.0, 4.0, 1.0, 2.0)},
            "interval": {"guidance_interval": (0.2, 0.7), "guidance_rescale": 0.6},
            "cfg_pp": {"guidance_method": "cfg_pp"},
            "momentum": {"guidance_method": "apg", "guidance_settings": {"norm": 0, "momentum": -0.5}},
            "pag": {"pag_scale": 2.0, "pag_adaptive_scale": 0.5},
        },
        "unet": {"reuse": {"reuse": 2}},
        "end": {
            "stopped": {"denoising_end": 0.8}, "tiled": {"tiling": "on"}, "pixel": {"hires": 1.5},
            "latent": {"hires": 1.5, "hires_method": "latent", "hires_steps": 5, "hires_sampler": "euler"},
        },
        "sampler": {"ddim eta": {"eta": 0.5}},
        "schedule": {
            "karras": {"sigmas": "karras"}, "timesteps": {"sampler_settings": {"timesteps": [950, 700, 400, 100]}},
        },
        "noise": {
            "variation": {"variation_seed": 70, "variation_strength": 0.4},
            "torch": {"noise": "torch"}, "seed_size": {"seed_size": (40, 72)},
        },
        "clip_skip": {"1": {"clip_skip": 1}},
        "control_form": {
            "window": {"control_scale": 0.7, "control_start": 0.2, "control_end": 0.8},
            "guess": {"control_mode": "guess"}, "prompt": {"control_mode": "prompt"},
        },
        "start": {
            "image": {"image_encoding": "sample", "strength_rule": "a1111"},
            "renoised": {"mask_blend": "renoised", "mask_mode": "soft"}, "filled": {"mask_fill": "noise"},
            "cropped": {"padding_mask_crop": 8}, "outpainted": {"outpaint": (16, 0, 0, 0), "mask_fill": "fill"},
            "resumed": {"denoising_start": 0.2},
        },
        "texts": {
            "sizes": {"original_size": (90, 80), "crops_coords_top_left": (3, 5), "negative_original_size": (30, 20)},
        },
        "watch": {"callback": {"callback": lambda step: None}, "steered": {"callback": _steer}},
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, levels in options.items():
        more = levels.get(row[name], {})
        if "sampler_settings" in more:
            more = {"sampler_settings": {**found.get("sampler_settings", {}), **more["sampler_settings"]}}
        found |= more
    return found


def _steer(step: Any) -> Any:
    return step.latents * np.float32(0.9) if step.index == 1 else None


def _texts(row: Row, people: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
    blob = " blob" if row["adapters"] == "word" else ""

    def text(p: int) -> str:
        own = PROMPTS[p]
        found = {
            "comfy": f"({own}:1.{p + 2}) in (rain:0.7)",

            "scheduled": f"[{own}:{PROMPTS[p - 1]}:0.{p + 4}] with [a hat|a bow] in ([rain]:1.3)",
            # The first prompt is short, its neighbours are not.
            "long": own if p == 0 else f"{own} {LONG}", "and": own if p == 1 else f"{own} AND a {p + 1} :0.{p + 5}",
        }.get(row["prompt"], own)  # fmt: skip
        return found + blob

    syntax = {"scheduled": "a1111", "and": "a1111", "comfy": "comfy"}
    if row["prompt"] in syntax:
        options["prompt_syntax"] = syntax[row["prompt"]]
    negatives: Any = {"none": None, "shared": "grey sky"}.get(row["negative"], ["", "grey", "sky and rain", "snow"])
    call: dict[str, Any] = {"prompt": [text(p) for p in people]}
    each = negatives if negatives is None or isinstance(negatives, str) else [negatives[p] for p in people]
    call["negative_prompt"] = each
    if row["texts"] == "second":
        options["prompt_2"] = [f"a painting of {PROMPTS[p]}" for p in people]
        options["negative_prompt_2"] = [f"photo {p}" for p in people]
    if row["texts"] == "hires":
        options["hires_prompt"] = [f"large {PROMPTS[p]}" for p in people]
    if row["images"] == "of one prompt":  # the first person's
        call["prompt"], call["num_images_per_prompt"] = text(0), len(people)
        call["negative_prompt"] = negatives[0] if isinstance(negatives, list) else negatives
        for name in ("prompt_2", "negative_prompt_2", "hires_prompt"):
            if name in options:
                options[name] = options[name][list(people).index(0)]
    return call


def _start(row: Row, people: Sequence[int]) -> dict[str, Any]:
    start = row["start"]
    if start in ("latents", "resumed"):
        return {"latents": np.stack([array(p, HEIGHT // 8, WIDTH // 8, 4) for p in people])}
    if not FACTORS["start"][start]:
        return {}
    images = [photo(p, 48 if start == "outpainted" else WIDTH) for p in people]
    call: dict[str, Any] = {"image": images}
    strengths = {"image": 0.6, "renoised": 0.8, "filled": 0.9}
    if start in strengths:
        call["strength"] = strengths[start]
    if FACTORS["start"][start] == "mask" or start == "renoised":
        call["mask"] = [mask(start, p) for p in people]
    return call


def _refusals() -> dict[frozenset[tuple[str, str]], tuple[str, ...]]:
    """Pairs of levels that no call can have, and what their error has to name; nothing where there is no such thing."""
    found: dict[frozenset[tuple[str, str]], tuple[str, ...]] = {}

    def refuse(one: str, some: Sequence[str], other: str, others: Sequence[str], *names: str) -> None:
        for a in some:
            for b in others:
                found[frozenset({(one, a), (other, b)})] = names

    nets, forms = [list(FACTORS[name])[1:] for name in ("control", "control_form")]
    images = [level for level, kind in FACTORS["start"].items() if kind]
    hires, single = ("pixel", "latent"), ("whole", "stopped", "tiled")
    refuse("model", ["sd"], "control", ["union"])
    refuse("model", ["sd"], "texts", ["second"], "prompt_2", "SDXL")
    refuse("model", ["sd"], "texts", ["sizes"], "crops_coords_top_left", "SDXL")
    refuse("weights", ["int8"], "control", ["lora"], "control-LoRA", "quantize")
    refuse("control", ["none"], "control_form", forms, "control_", "control image")
    refuse("control", nets, "start", ["cropped"], "control", "padding_mask_crop")
    refuse("control_form", forms, "start", ["cropped"], "control", "padding_mask_crop")
    refuse("control", nets, "unet", ["reuse"], "control", "reuse")
    refuse("control_form", forms, "unet", ["reuse"], "control", "reuse")
    refuse("image_prompt", ["masked"], "start", ["cropped"], "image_prompt", "padding_mask_crop")
    refuse("start", images, "end", hires, "hires", "image")
    refuse("start", images, "texts", ["hires"], "hires", "image")
    refuse("start", ["resumed"], "end", hires, "hires", "denoising_start")
    refuse("start", ["resumed"], "texts", ["hires"], "hires", "denoising_start")
    refuse("start", ["latents", "resumed"], "noise", ["variation", "seed_size"], "latents", "variation_strength")
    refuse("guidance", ["pag"], "unet", ["reuse"], "pag_scale", "reuse")
    refuse("guidance", ["cfg_pp"], "sampler", ["own", "heun", "dpmpp_sde"], "guidance_method", "sampler")
    refuse("guidance", ["steps"], "end", hires, "guidance_steps", "hires")
    refuse("guidance", ["steps"], "texts", ["hires"], "guidance_steps", "hires")
    refuse("prompt", ["and"], "unet", ["reuse"], "AND", "reuse")
    refuse("prompt", ["encoded"], "images", ["of one prompt"], "conditions", "images")
    refuse("end", ["latent"], "sampler", ["ddim eta"], "eta", "hires")
    refuse("end", hires, "schedule", ["timesteps"], "sampler_settings", "hires")
    refuse("texts", ["hires"], "schedule", ["timesteps"], "sampler_settings", "hires")
    refuse("end", single, "texts", ["hires"], "hires_prompt", "hires")
    return found


REFUSED = _refusals()
