"""Whether canvax gives on a GPU what it gives on the CPU, which is compared with PyTorch elsewhere.

    python -m benchmarks.gpu_checks --json out/checks.json [--small] [--only attention ...]

Each line is a figure and the most it may be; the file is written after each. Ends with 1 if one is over. ``--small`` is
to try it on any machine: networks of a few channels in place of Stable Diffusion 1.5 and XL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import canvax
from canvax.families.known import PRESETS
from canvax.files import written
from canvax.kernels import gpu
from canvax.kernels.attention import attention
from canvax.kernels.target import compiled_on
from canvax.models.configs import VaeConfig
from canvax.models.denoiser import UNetDenoiser
from canvax.models.networks import Networks
from canvax.models.unet import unet
from canvax.models.vae import vae_decode
from canvax.parallel.mesh import make_mesh
from canvax.params import init_params

Check = tuple[str, float, float]
"""What, the figure, and the most it may be."""

WIDTHS = (8, 40, 64, 80, 128, 160, 512)
"""Of a head: of Stable Diffusion 1.x, 2.x and XL, the largest that cuDNN takes, and two that it does not."""

rng = np.random.default_rng(0)


def rms(got: Any, want: Any) -> float:
    """Root mean square of the difference over that of what is wanted."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def on(device: Any, function: Callable[..., Any], *arguments: Any, precision: str | None = None) -> Any:
    """What a function gives there."""
    arguments = jax.device_put(arguments, device)
    with jax.default_matmul_precision(precision or "default"):
        program = compiled_on(make_mesh([device]), function, *arguments)
    return np.asarray(jax.block_until_ready(program(*arguments)), np.float32)


def check_attention(_: bool) -> Iterator[Check]:
    """Every width of a head, among pixels and towards the 77 tokens of a prompt, against float64."""
    for width in WIDTHS:
        for keys in (1024, 77):
            q, k, v = (jnp.asarray(normal(2, n, 2, width), jnp.bfloat16) for n in (1024, keys, keys))
            exact = [np.asarray(x, np.float64) for x in (q, k, v)]
            scores = np.einsum("bqnd,bknd->bnqk", exact[0], exact[1]) * width**-0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            want = np.einsum("bnqk,bknd->bqnd", weights / weights.sum(-1, keepdims=True), exact[2])
            yield (
                f"attention, head of {width}, {keys} keys, bfloat16",
                rms(on(jax.devices()[0], attention, q, k, v), want),
                1e-2,
            )


def networks(name: str, *, small: bool) -> Networks:
    """Of a preset, or with its kinds of blocks and a few channels."""
    preset = PRESETS[name]
    if not small:
        return preset
    from dataclasses import replace

    assert isinstance(preset.denoiser, UNetDenoiser)
    levels = len(preset.config.block_out_channels)
    cfg = replace(preset.config, block_out_channels=(32,) * levels, attention_head_dim=4, sample_size=16)
    return replace(preset, denoiser=UNetDenoiser(cfg), vae=replace(preset.vae, block_out_channels=(32,) * 4))


def check_networks(name: str, small: bool) -> Iterator[Check]:
    """UNet and decoder on both, in float32 that is float32, and in bfloat16."""
    nets = networks(name, small=small)
    cfg, side = nets.config, 16 if small else 64  # type: ignore[union-attr]
    x, text, t = normal(1, side, side, 4), normal(1, 77, cfg.cross_attention_dim), np.array([500.0], np.float32)
    added = {}
    if cfg.addition_embed_type:
        added = {"pooled": normal(1, 1280), "time_ids": np.array([[512, 512, 0, 0, 512, 512]], np.float32)}
    specs, decoder = nets.specs(), nets.vae
    assert isinstance(decoder, VaeConfig)
    parts: dict[str, tuple[Callable[..., Any], Any, tuple[Any, ...]]] = {
        "UNet": (
            lambda p, x, text, t, added, cfg=cfg: unet(p, x, t, text, cfg, **added),
            specs["unet"],
            (x, text, t, added),
        ),
        "decoder": (lambda p, x, cfg=decoder: vae_decode(p, x, cfg), specs["vae"], (x,)),
    }
    for part, (function, spec, given) in parts.items():
        params = init_params(spec, 0)
        want = on(jax.devices("cpu")[0], function, params, *given)
        yield (
            f"{name} {part}, float32",
            rms(on(jax.devices()[0], function, params, *given, precision="highest"), want),
            1e-4,
        )
        if small:  # so few channels round too much
            continue
        half = jax.tree.map(_halved, (params, given))
        yield f"{name} {part}, bfloat16", rms(on(jax.devices()[0], function, half[0], *half[1]), want), 5e-2


def _halved(leaf: Any) -> Any:
    """In bfloat16, as a pipeline has it: timesteps and sizes, of one axis or two in a call, stay as they are."""
    return leaf if leaf.dtype != np.float32 or leaf.shape in ((1,), (1, 6)) else jnp.asarray(leaf, jnp.bfloat16)


def psnr(one: canvax.Result, other: canvax.Result) -> float:
    """Of the pixels, in dB; 200 for the same."""
    error = float(np.mean((one.pixels - other.pixels) ** 2))
    return -10 * np.log10(error) if error else 200.0


def check_pictures(_: bool) -> Iterator[Check]:
    """The bundled model: the same seed on both, the same call twice, and without cuDNN's attention."""
    say = {"seed": 1, "progress": False, "num_inference_steps": 20}
    prompts = ["a red apple", "a dog face"]
    there, here = (make_mesh([jax.devices(*kind)[0]]) for kind in (("cpu",), ()))
    want = canvax.load("emoji", dtype="float32", mesh=there)
    exact = canvax.load("emoji", dtype="float32", mesh=here, precision="highest")
    half = canvax.load("emoji", dtype="bfloat16", mesh=here)
    for sampler in ("DDIM", "DPM++ 2M Karras", "Euler a"):
        wanted = want(prompts, sampler=sampler, **say)
        yield f"{sampler}, float32: 100 dB less PSNR", 100 - psnr(exact(prompts, sampler=sampler, **say), wanted), 50.0
        yield f"{sampler}, bfloat16: 100 dB less PSNR", 100 - psnr(half(prompts, sampler=sampler, **say), wanted), 75.0
    one, two = (half(prompts, **say) for _ in range(2))
    yield "the same call again: values that differ", float((one.latents != two.latents).sum()), 0.0
    yield "the same call again: compilations", float(two.compilations), 0.0
    fused, gpu.supports_cudnn = gpu.supports_cudnn, lambda q: False
    try:
        plain = canvax.load("emoji", dtype="bfloat16", mesh=here)(prompts, **say)
    finally:
        gpu.supports_cudnn = fused
    yield "without cuDNN's attention: 100 dB less PSNR", 100 - psnr(plain, one), 70.0


def check_cache(_: bool) -> Iterator[Check]:
    """A second process finds the programs of the first, and gives the same images."""
    with tempfile.TemporaryDirectory() as folder:
        told = []
        for i in range(2):
            command = [
                sys.executable,
                "-m",
                "canvax",
                "generate",
                "a red apple",
                "--seed",
                "1",
                "--json",
                "-q",
                "-o",
                f"{folder}/{i}",
            ]
            environment = os.environ | {"CANVAX_CACHE_DIR": f"{folder}/cache"}
            told.append(json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout))
        yield "second process: compilations", float(told[1]["compilations"]), 0.0
        files = [next(Path(folder, str(i)).iterdir()).read_bytes() for i in range(2)]
        yield "second process: files that differ", float(files[0] != files[1]), 0.0


CHECKS: dict[str, Callable[[bool], Iterator[Check]]] = {
    "attention": check_attention, "pictures": check_pictures, "cache": check_cache,
    "sd15": partial(check_networks, "sd15"), "sdxl": partial(check_networks, "sdxl"),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    arguments = parser.parse_args()
    device = jax.devices()[0]
    report: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "checks": []}
    failed = False
    for name in arguments.only:
        for row in _rows(partial(CHECKS[name], arguments.small), name):
            report["checks"].append(row)
            failed |= not row["passed"]
            print(
                ("ok   " if row["passed"] else "OVER ")
                + " ".join(f"{row[key]}" for key in ("check", "figure", "most")),
                flush=True,
            )
            if arguments.json:
                with written(arguments.json) as temporary:
                    temporary.write_text(json.dumps(report, indent=1))
    return int(failed)


def _rows(check: Callable[[], Iterator[Check]], name: str) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    try:
        for what, figure, most in check():
            passed, seconds = bool(figure <= most), time.perf_counter() - began
            yield {"check": what, "figure": figure, "most": most, "passed": passed, "seconds": round(seconds, 2)}
            began = time.perf_counter()
    except Exception as error:  # the other checks are worth their time all the same
        yield {"check": name, "figure": f"{type(error).__name__}: {error}"[:500], "most": 0, "passed": False}


if __name__ == "__main__":
    sys.exit(main())
