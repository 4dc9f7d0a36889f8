"""One contender of a benchmark in a process of its own, so that its peak memory is its own too.

    python benchmarks/workers.py CONTENDER PART FOLDER

CONTENDER is canvax, torch or flax (the old Flax classes of diffusers 0.35, in their own environment); PART is unet or
vae; FOLDER is a checkpoint in the diffusers layout. It loads, runs once, writes its output to FOLDER and prints a line
of JSON; after that each line on stdin makes it run once more and print the seconds.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

SIZES = {"unet": (2, 64, 64, 4), "vae": (1, 64, 64, 4)}


def inputs(part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same latents [B, h, w, C], timesteps and text for every contender."""
    rng = np.random.default_rng(0)
    latents = rng.standard_normal(SIZES[part], dtype=np.float32)
    text = rng.standard_normal((SIZES[part][0], 77, 768), dtype=np.float32)
    return latents, np.full(SIZES[part][0], 500, np.float32), text


def canvax(part: str, folder: Path):
    """Through the loader and the model functions that the pipeline uses."""
    import jax

    from canvax.models.unet import unet
    from canvax.models.vae import vae_decode
    from canvax.pipelines.checkpoint import read_checkpoint
    from canvax.weights.hub import resolve
    from canvax.weights.load import load_components

    checkout = resolve(folder)
    checkpoint = read_checkpoint(checkout, np.float32)
    component = [c for c in checkpoint.components if c.name == part]
    params = load_components(checkout, component, dtype=np.float32, place=lambda _, a: jax.device_put(a))[part]
    latents, timesteps, text = inputs(part)
    if part == "unet":
        arguments = (params, latents, timesteps, text)
        function = jax.jit(lambda p, x, t, c: unet(p, x, t, c, checkpoint.unet))
    else:
        arguments = (params, latents)
        function = jax.jit(lambda p, z: vae_decode(p, z, checkpoint.vae))
    arguments = jax.device_put(arguments)
    began = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    return lambda: np.asarray(compiled(*arguments)), time.perf_counter() - began


def torch(part: str, folder: Path):
    """PyTorch diffusers, eager, channels last."""
    import diffusers
    import torch

    cls = diffusers.UNet2DConditionModel if part == "unet" else diffusers.AutoencoderKL
    model = cls.from_pretrained(folder / part).eval().to(memory_format=torch.channels_last)
    latents, timesteps, text = inputs(part)
    x = torch.from_numpy(np.moveaxis(latents, -1, 1)).contiguous(memory_format=torch.channels_last)

    @torch.inference_mode()
    def run() -> np.ndarray:
        if part == "unet":
            out = model(x, torch.from_numpy(timesteps), torch.from_numpy(text)).sample
        else:
            out = model.decode(x / model.config.scaling_factor).sample
        return np.moveaxis(out.numpy(), 1, -1)

    return run, 0.0


def flax(part: str, folder: Path):
    """The old Flax classes, jitted, with the same weights renamed as their converter did."""
    import diffusers
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    cls = diffusers.FlaxUNet2DConditionModel if part == "unet" else diffusers.FlaxAutoencoderKL
    model = cls.from_config(cls.load_config(folder / part))
    tree: dict = {}
    for name, array in load_file(folder / part / "diffusion_pytorch_model.safetensors").items():
        *steps, leaf = name.split(".")
        path: list[str] = []
        for step in steps:
            if step.isdigit():
                path[-1] += f"_{step}"
            else:
                path.append(step)
        if leaf == "weight":
            leaf = "scale" if array.ndim == 1 else "kernel"
            array = array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0) if array.ndim == 4 else array
        if part == "vae" and "attentions_0" in path:
            names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out_0": "proj_attn"}
            path[-1] = names.get(path[-1], path[-1])
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        node[leaf] = jnp.asarray(array)
    latents, timesteps, text = inputs(part)
    x = jnp.asarray(np.moveaxis(latents, -1, 1))
    if part == "unet":
        arguments = ({"params": tree}, x, jnp.asarray(timesteps), jnp.asarray(text))
        function = jax.jit(lambda p, *a: model.apply(p, *a).sample)
    else:
        arguments = ({"params": tree}, x / model.scaling_factor)
        function = jax.jit(lambda p, z: model.apply(p, z, method=model.decode).sample)
    began = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    return lambda: np.moveaxis(np.asarray(compiled(*arguments)), 1, -1), time.perf_counter() - began


def main() -> None:
    contender, part, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    began = time.perf_counter()
    run, compile_seconds = {"canvax": canvax, "torch": torch, "flax": flax}[contender](part, folder)
    load_seconds = time.perf_counter() - began - compile_seconds
    output = run()
    np.save(folder / f"{contender}_{part}.npy", output)
    print(json.dumps({"compile": compile_seconds, "load": load_seconds}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
