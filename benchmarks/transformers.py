"""Compare one evaluation of a diffusion transformer with PyTorch diffusers: full width, few layers, random weights.

    python -m benchmarks.transformers MODEL [--size 512] [--text 512] [--dtype bfloat16] [--device gpu]

Both get the same weights, latents and text. What canvax computes once for an image (the text's projections, rotary
tables) is timed too, since diffusers computes it in each evaluation. They take turns in one process; a figure is the
median of its turns. Outputs further apart than rounding explains are an error. Whole models: ``python -m benchmarks``.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.less_work import narrowed
from canvax.families import qwen_image_1
from canvax.families.known import FAMILIES, PRESETS
from canvax.kernels.target import compiled_on
from canvax.models import krea2, qwen_image
from canvax.models.denoiser import evaluate
from canvax.models.flux3 import WINDOW
from canvax.parallel.mesh import make_mesh
from canvax.params import Params
from canvax.quantize import quantized_spec
from canvax.train.objectives import cast
from tests.parity.transformers_reference import params_of, stored, unfused, without_torchvision

TIME, GUIDANCE = 500.0, 3.5
BOTH = {"num_layers": 1, "num_single_layers": 2}
FEWER: dict[str, dict[str, int]] = {
    "z-image": {"n_layers": 2, "n_refiner_layers": 1},
    "flux2-klein-4b": BOTH,
    "flux3-klein-base": BOTH,
    "krea-2": {"num_layers": 1, "num_refiner_text_blocks": 1},
    "flux1-dev": BOTH,
    "chroma1": BOTH,
    "qwen-image": {"num_layers": 2},
    "qwen-image-2.1": {"num_layers": 2},
    "anima": {"num_layers": 4},
}
"""A few layers of each kind: both models and the copy in 8 bits fit into some gigabytes."""

BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Root mean square of the difference over that of the output."""

Call = Callable[[], np.ndarray]


class Inputs(NamedTuple):
    """What the reference's transformer is called with.

    Attributes:
        x: latents as tokens [1, L, C].
        latents: latents [1, C, h, w].
        text: [1, S, D].
        side: tokens along each side of the image.
        time: 0.5 of 0..1 [1].
        more: further conditions of canvax.
    """

    x: torch.Tensor
    latents: torch.Tensor
    text: torch.Tensor
    side: int
    time: torch.Tensor
    more: dict[str, torch.Tensor]

    def grid(self, first: int, axes: int) -> torch.Tensor:
        """Positions of the image's tokens along so many axes, rows along ``first``."""
        ids = torch.zeros(self.side, self.side, axes, device=self.x.device)
        ids[..., first] += torch.arange(self.side, device=self.x.device)[:, None]
        ids[..., first + 1] += torch.arange(self.side, device=self.x.device)[None]
        return ids.flatten(0, 1)

    def line(self, axes: int) -> torch.Tensor:
        """Positions of the text along the last of so many axes."""
        index = torch.arange(self.text.shape[1], device=self.x.device)
        return torch.nn.functional.pad(index[:, None], (axes - 1, 0)).float()

    @property
    def nowhere(self) -> torch.Tensor:
        """Positions of a text whose tokens are all in one place."""
        return torch.zeros(self.text.shape[1], 3, device=self.x.device)

    @property
    def shapes(self) -> list[list[tuple[int, int, int]]]:
        """Frames, rows and columns of the image's tokens."""
        return [[(1, self.side, self.side)]]


def of_z_image(model: Any, i: Inputs) -> Any:
    return -torch.stack(model([i.latents[0][:, None]], 1 - i.time, [i.text[0]], return_dict=False)[0])[:, :, 0]


def of_krea2(model: Any, i: Inputs) -> Any:
    ids = torch.cat([i.nowhere, i.grid(1, 3)])
    text = i.text.unflatten(-1, (model.config.num_text_layers, model.config.text_hidden_dim))
    mask = torch.ones(1, text.shape[1], dtype=torch.bool, device=text.device)
    return model(i.x, text, i.time, ids, mask, return_dict=False)[0]


def of_flux(model: Any, i: Inputs) -> Any:
    places = {"img_ids": i.grid(1, 3), "txt_ids": i.nowhere}
    return model(
        i.x, i.text, i.more["pooled"], i.time, guidance=i.more["guidance"], **places, return_dict=False
    )[0]  # fmt: skip


def of_chroma(model: Any, i: Inputs) -> Any:
    mask = torch.ones(1, i.text.shape[1] + i.x.shape[1], dtype=i.x.dtype, device=i.x.device)
    places = {"img_ids": i.grid(1, 3), "txt_ids": i.nowhere}
    return model(i.x, i.text, i.time, **places, attention_mask=mask, return_dict=False)[0]


def of_qwen_2(model: Any, i: Inputs) -> Any:
    tokens = i.x.shape[1]
    slots = torch.arange(i.text.shape[1] + tokens // 4, device=i.x.device)[None] >= i.text.shape[1]
    return model(i.x, i.text, i.time, img_shapes=i.shapes, img_mask=slots, return_dict=False)[0][:, -tokens:]


def of_anima(model: Any, i: Inputs) -> Any:
    padding = i.latents.new_zeros(1, 1, *i.latents.shape[2:])
    return model(i.latents[:, :, None], i.time, i.text, padding_mask=padding, return_dict=False)[0][:, :, 0]


PEERS: dict[str, Callable[[Any, Inputs], Any]] = {
    "z-image": of_z_image,
    "flux2-klein-4b": lambda model, i: model(
        i.x, i.text, i.time, i.grid(1, 4), i.line(4), None, return_dict=False
    )[0],
    "flux3-klein-base": lambda model, i: model(
        i.x, i.text, i.time, i.grid(1, 4) / 2, i.line(4), return_dict=False
    )[0],
    "krea-2": of_krea2,
    "flux1-dev": of_flux,
    "chroma1": of_chroma,
    "qwen-image": lambda model, i: model(i.x, i.text, None, i.time, i.shapes, return_dict=False)[0],
    "qwen-image-2.1": of_qwen_2,
    "anima": of_anima,
}  # fmt: skip
"""The reference's velocity, as tokens or as latents [1, C, h, w]."""

DROPPED = {"krea-2": krea2.DROPPED, "qwen-image": qwen_image_1.DROPPED, "qwen-image-2.1": qwen_image.DROPPED}
"""Tokens before the text, whose features canvax drops."""


def contenders(name: str, size: int, rows: int, dtype: str, device: str) -> dict[str, Call]:
    """An evaluation by each, for an image of ``size`` x ``size`` pixels and a prompt of ``rows`` tokens."""
    networks, family = PRESETS[name], next(family for family in FAMILIES if name in family.presets)
    cfg = dataclasses.replace(networks.config, **FEWER[name])
    denoiser: Any = networks.denoiser
    denoiser = dataclasses.replace(denoiser, cfg=cfg)
    kind: Any = getattr(diffusers, cfg.CLASS)
    known = inspect.signature(kind.__init__).parameters
    fields = {key: value for key, value in dataclasses.asdict(cfg).items() if value is not None and key in known}
    if name == "anima":
        fields["extra_pos_embed_type"] = None
        without_torchvision()
    torch.manual_seed(0)
    diffusers.utils.logging.set_verbosity_error()
    model = kind(**fields).eval()
    where = "cuda" if device == "gpu" else "cpu"
    mesh, rng = make_mesh(jax.devices()[:1]), np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape, np.float32), dtype))

    def theirs(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array, np.float32)).to(where, getattr(torch, dtype))

    rows = -(-rows // WINDOW) * WINDOW if name.startswith("flux3") else rows
    latents = normal(*networks.latent_shape(1, size, size))
    text, before = normal(1, rows, networks.text.width), DROPPED.get(name, 0)
    more = {"pooled": normal(1, networks.text.pooled_width), "guidance": np.full(1, GUIDANCE, np.float32)}
    conditions = {
        "text": np.pad(text, ((0, 0), (before, 0), (0, 0))), "length": np.array([before + rows], np.int32), **more,
    }  # fmt: skip
    packing, times = networks.packing, jnp.array([TIME], jnp.float32)
    tokens = np.asarray(packing.pack(jnp.asarray(latents)))[:, 0]
    inputs = Inputs(
        theirs(tokens), theirs(latents.transpose(0, 3, 1, 2)), theirs(text), size // networks.size_step,
        torch.tensor([TIME / 1000], device=where), {key: theirs(value) for key, value in more.items()},
    )  # fmt: skip

    def ours(p: Params, latents: Any, conditions: Any) -> Any:
        return evaluate(denoiser, p, latents, times, conditions)

    spec = denoiser.spec
    params = params_of(unfused(stored(model), spec, family.stacks), spec)
    model.to(where, getattr(torch, dtype))

    def compiled(params: Params) -> Call:
        given = jax.device_put((params, latents, conditions))
        program = compiled_on(mesh, ours, *given)
        return lambda: np.asarray(jax.block_until_ready(program(*given)), np.float32)

    def peer() -> np.ndarray:
        with torch.inference_mode():
            out = PEERS[name](model, inputs).float().cpu().numpy()
        return out.transpose(0, 2, 3, 1) if out.ndim == 4 else packing.unpack(out[:, None], *latents.shape[1:3])

    eight = {}
    if dtype != "float32":
        narrow = narrowed(params, quantized_spec(spec, "int8"))
        eight["canvax int8"] = compiled(cast(narrow, jnp.dtype(dtype)))
    rounded = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf, dtype)), params)
    return {"canvax": compiled(rounded), **eight, "torch": peer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=FEWER, default="flux2-klein-4b")
    parser.add_argument("--size", type=int, default=512, help="pixels of each side (512)")
    parser.add_argument("--text", type=int, default=512, help="tokens of the prompt (512)")
    parser.add_argument("--dtype", choices=BOUNDS, default="float32")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch takes its turns on the same GPU
    jax.config.update("jax_platforms", "cuda,cpu" if arguments.device == "gpu" else "cpu")
    torch.set_float32_matmul_precision("high")
    calls = contenders(arguments.model, arguments.size, arguments.text, arguments.dtype, arguments.device)
    outputs = {name: call() for name, call in calls.items()}
    want, seconds = outputs["torch"], {name: list[float]() for name in calls}
    differences = {name: float(np.sqrt(np.mean((out - want) ** 2) / np.mean(want**2))) for name, out in outputs.items()}
    # On a GPU both may use TensorFloat-32.
    bound = max(BOUNDS[arguments.dtype], 1e-2 if arguments.device == "gpu" else 0.0)
    if not differences["canvax"] < bound:
        raise SystemExit(f"the outputs differ by {differences['canvax']:.1e}: nothing was timed")
    for _ in range(arguments.rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    report = vars(arguments) | {
        "layers": FEWER[arguments.model], "device_kind": jax.devices()[0].device_kind, "unit": "s",
        "contenders": {
            name: {
                "seconds": seconds[name], "median_s": middle, "ratio": middle / medians["torch"],
                "differs_by_rms": differences[name],
            }
            for name, middle in medians.items()
        },
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(report))
        return
    print(f"{arguments.model} {report['layers']}, {arguments.size} px, {arguments.text} tokens, {arguments.dtype}")
    for name, row in report["contenders"].items():
        middle, ratio, difference = row["median_s"], row["ratio"], row["differs_by_rms"]
        print(f"{name:12} {middle:7.3f} s  {ratio:5.2f} of torch  differs by {difference:.1e}")


if __name__ == "__main__":
    main()
