"""Compare one evaluation of a diffusion transformer with PyTorch diffusers: full width, few layers, random weights.

    python -m benchmarks.transformers [z-image|flux2-klein-4b|krea-2] [--size 512] [--dtype bfloat16] [--device gpu]

Both get the same weights, tokens and text. What canvax computes once for an image (the text's projections, rotary
tables) is timed too, since diffusers computes it in each evaluation. They take turns in one process; a figure is the
median of its turns. Outputs further apart than rounding explains are an error. Whole models: ``python -m benchmarks``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.less_work import narrowed
from canvax.families.known import PRESETS
from canvax.kernels.target import compiled_on
from canvax.models.flux2 import flux2, flux2_context, flux2_spec
from canvax.models.krea2 import krea2, krea2_context, krea2_spec
from canvax.models.z_image import z_image, z_image_context, z_image_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import Params, Spec
from canvax.quantize import quantized_spec
from canvax.train.objectives import cast
from tests.parity.transformers_reference import params_of, stored, unfused

TIME = 500.0
FEWER: dict[str, dict[str, int]] = {
    "z-image": {"n_layers": 2, "n_refiner_layers": 1},
    "flux2-klein-4b": {"num_layers": 1, "num_single_layers": 2},
    "krea-2": {"num_layers": 2, "num_refiner_text_blocks": 1},
}
"""A few layers of each kind: both models and the copy in 8 bits fit into some gigabytes."""

BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Root mean square of the difference over that of the output."""

Call = Callable[[], np.ndarray]


def grid(side: int) -> np.ndarray:
    """Rows (0, y, x) of a square image's tokens."""
    y, x = np.mgrid[:side, :side].reshape(2, -1)
    return np.stack([0 * y, y, x], -1)


def contenders(name: str, side: int, rows: int, dtype: str, device: str) -> dict[str, Call]:
    """An evaluation by each, for an image of ``side`` x ``side`` tokens and a prompt of ``rows``."""
    denoiser: Any = PRESETS[name].denoiser
    cfg = dataclasses.replace(denoiser.cfg, **FEWER[name])
    fields = {key: value for key, value in dataclasses.asdict(cfg).items() if value is not None}
    torch.manual_seed(0)
    diffusers.utils.logging.set_verbosity_error()
    model = getattr(diffusers, cfg.CLASS)(**fields).eval()
    where = "cuda" if device == "gpu" else "cpu"
    mesh, rng, tokens = make_mesh(jax.devices()[:1]), np.random.default_rng(0), side**2

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape, np.float32), dtype))

    def theirs(array: np.ndarray) -> Any:
        return on_device(np.array(array, np.float32)).to(getattr(torch, dtype))

    def on_device(array: np.ndarray) -> Any:
        return torch.from_numpy(array).to(where)

    times = jnp.array([TIME], jnp.float32)
    length, width = jnp.array([rows]), jnp.array([side])
    spec: Spec
    if name == "flux2-klein-4b":
        spec, x, text = flux2_spec(cfg), normal(1, tokens, cfg.in_channels), normal(1, rows, cfg.joint_attention_dim)
        none = jnp.zeros((1, 0, cfg.in_channels), x.dtype), jnp.zeros((1, 0, 4), jnp.int32)
        ids, words = np.pad(grid(side), ((0, 0), (0, 1))), np.pad(np.arange(rows)[:, None], ((0, 0), (3, 0)))

        def ours(p: Params, x: Any, text: Any) -> Any:
            return flux2(p, x, times, flux2_context(p, text, width, *none, cfg, tokens=tokens), cfg)

        their_x, their_text, places = theirs(x), theirs(text), (on_device(ids), on_device(words))

        def evaluate() -> Any:
            return model(
                their_x, their_text, torch.tensor([TIME / 1000], device=where), *places, None, return_dict=False
            )[0]

    elif name == "krea-2":
        text = normal(1, rows, cfg.num_text_layers, cfg.text_hidden_dim)
        spec, x = krea2_spec(cfg), normal(1, tokens, cfg.in_channels)

        def ours(p: Params, x: Any, text: Any) -> Any:
            return krea2(p, x, times, krea2_context(p, text, length, width, cfg, tokens=tokens), cfg)

        their_x, their_text = theirs(x), theirs(text)
        positions = on_device(np.concatenate([np.zeros((rows, 3)), grid(side)]).astype(np.float32))

        def evaluate() -> Any:
            mask = torch.ones(1, rows, dtype=torch.bool, device=where)
            return model(
                their_x, their_text, torch.tensor([TIME / 1000], device=where), positions, mask, return_dict=False
            )[0]

    else:
        spec, x, text = z_image_spec(cfg), normal(1, tokens, 64), normal(1, rows, cfg.cap_feat_dim)

        def ours(p: Params, x: Any, text: Any) -> Any:
            return z_image(p, x, times, z_image_context(p, text, length, width, cfg, tokens=tokens), cfg)

        # Tokens are squares of 2 x 2 latents, channels last.
        latents = theirs(x).reshape(side, side, 2, 2, 16).permute(4, 0, 2, 1, 3).reshape(16, 1, 2 * side, 2 * side)
        caption = theirs(text)[0]

        def evaluate() -> Any:
            out = model([latents], torch.tensor([1 - TIME / 1000], device=where), [caption], return_dict=False)[0][0]
            return -out.reshape(16, side, 2, side, 2).permute(1, 3, 2, 4, 0).reshape(1, tokens, 64)

    state = stored(model)
    params = params_of(unfused(state, spec) if name == "flux2-klein-4b" else state, spec)
    model.to(where, getattr(torch, dtype))

    def compiled(params: Params) -> Call:
        params = jax.device_put(params)
        program = compiled_on(mesh, ours, params, x, text)
        return lambda: np.asarray(jax.block_until_ready(program(params, x, text)), np.float32)

    def peer() -> np.ndarray:
        with torch.inference_mode():
            return evaluate().float().cpu().numpy()

    rounded = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf, dtype)), params)
    return {
        "canvax": compiled(rounded),
        "canvax int8": compiled(cast(narrowed(params, quantized_spec(spec, "int8")), jnp.dtype(dtype))),
        "torch": peer,
    }


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
    calls = contenders(arguments.model, arguments.size // 16, arguments.text, arguments.dtype, arguments.device)
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
