"""canvax as a contender of a benchmark; see :mod:`benchmarks.lab.worker`. It uses one device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import canvax
from benchmarks.lab.job import DENOISERS, Job, make_inputs, names_of
from canvax.compile.monitor import compilations, traces
from canvax.families.base import Model
from canvax.families.read import read_model
from canvax.kernels.target import compiled_on, compiling_for
from canvax.models.clip import clip_configs
from canvax.models.configs import VaeConfig
from canvax.models.denoiser import Denoiser, evaluate
from canvax.models.flux2_vae import Flux2VaeConfig, flux2_vae_decode
from canvax.models.text import encode_text
from canvax.models.unet import unet
from canvax.models.vae import vae_decode
from canvax.models.wan_vae import WanVaeConfig, wan_vae_decode
from canvax.parallel.mesh import make_mesh
from canvax.parallel.rules import place
from canvax.params import Params
from canvax.planning.flops import count_flops
from canvax.quantize import compute_dtype
from canvax.weights.cast import parse_dtype
from canvax.weights.load import load_components
from canvax.weights.location import Location
from canvax.weights.open import open_files

Asked = dict[str, Any]
"""A job as the worker reads it."""

Ready = tuple[Callable[[], Any], Callable[[Any], dict[str, np.ndarray]], dict[str, Any]]
Once = tuple[dict[str, Any], Callable[[], Any]]


def prepare(job: Asked, inputs: dict[str, np.ndarray]) -> Ready:
    """Load and compile a part; see :mod:`benchmarks.lab.worker`."""
    began = time.perf_counter()
    if job["part"] == "picture":
        return _picture(job, inputs, began)
    model, params, mesh = _load(job)
    loaded = time.perf_counter()
    function, arguments = _call(job["part"], model, params, inputs)
    arguments = jax.device_put(arguments, mesh.devices.flat[0])
    starts = time.perf_counter()
    compiled = compiled_on(mesh, function, params, *arguments)
    facts = _facts(params) | {"load_s": loaded - began, "compile_s": time.perf_counter() - starts}
    facts["flops"] = _flops(function, params, arguments)
    outputs = partial(_of_prompts, job, inputs) if job["part"] == "text" and not clip_configs(model.text) else _float32
    return lambda: jax.block_until_ready(compiled(params, *arguments)), outputs, facts


def once(job: Asked, began: float) -> Once:
    """Load a checkpoint, or draw a picture from the start of the process on."""
    return _load_once(job) if job["part"] == "load" else _start(job, began)


def device_peak(job: Asked) -> int | None:
    """The most memory that has been in use on the device; None on the CPU, whose memory is the host's."""
    del job
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _load(job: Asked, quantize: str | None = None) -> tuple[Model, Params, Mesh]:
    """The networks of a part, through the loader that the pipeline uses."""
    mesh, dtype = make_mesh(jax.devices()[:1]), parse_dtype(job["dtype"])
    files = open_files(Location(job["folder"]))
    model = read_model(files, dtype, quantize)
    components = [part for part in model.components if part.name in names_of(job["part"], model)]
    params = load_components(files, components, dtype=dtype, place=lambda param, array: place(param, array, mesh))
    return model, jax.block_until_ready(params), mesh


def _call(
    part: str, model: Model, params: Params, inputs: dict[str, np.ndarray]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function of a part, and its arguments after the parameters."""
    if part == "text":
        read: dict[str, dict[str, np.ndarray]] = {}
        for name, array in inputs.items():
            component, _, name = name.partition("/")
            read.setdefault(component, {})[name] = array
        return partial(encode_text, cfg=model.text), (read,)
    dtype = compute_dtype(params)
    latents = inputs["latents"].astype(dtype)
    if part == "vae":
        cfg = getattr(model.vae, "cfg", model.vae)
        decode: Any = _DECODERS[type(cfg)]
        return lambda p, z: decode(p["vae"], z, cfg), (latents,)
    if not clip_configs(model.text):
        conditions = {"text": inputs["text"].astype(dtype), "length": inputs["length"]}
        return partial(_evaluate, model.networks.denoiser), (latents, inputs["timesteps"], conditions)
    added = {name: inputs[name] for name in ("pooled", "time_ids") if name in inputs}
    if added:
        added["pooled"] = added["pooled"].astype(dtype)
    arguments = (latents, inputs["timesteps"], inputs["text"].astype(dtype), added)
    return lambda p, x, t, text, added: unet(p["unet"], x, t, text, model.unet, **added), arguments


_DECODERS = {VaeConfig: vae_decode, Flux2VaeConfig: flux2_vae_decode, WanVaeConfig: wan_vae_decode}
"""By the config of the autoencoder; what they give is in -1..1."""


def _evaluate(denoiser: Denoiser, params: Params, x: Any, timesteps: Any, conditions: Any) -> Any:
    """A whole evaluation of a transformer, with what a picture's other steps need not compute again."""
    return evaluate(denoiser, params[denoiser.component], x, timesteps, conditions)


def _picture(job: Asked, inputs: dict[str, np.ndarray], began: float) -> Ready:
    pipe = _pipeline(job)
    params = jax.block_until_ready(pipe.params)
    loaded = time.perf_counter()
    pipe.compile(job["height"], job["width"], job["batch"], progress=False)
    facts = _facts(params) | {"load_s": loaded - began, "compile_s": time.perf_counter() - loaded}
    facts["flops"] = _picture_flops(job, pipe)
    return (
        partial(_draw, pipe, job, inputs["latents"]),
        partial(_seen, pipe, job, inputs["latents"]),
        facts,
    )


def _pipeline(job: Asked) -> canvax.Pipeline:
    return canvax.load(job["folder"], dtype=job["dtype"], mesh=make_mesh(jax.devices()[:1]), progress=False)


def _draw(pipe: canvax.Pipeline, job: Asked, latents: np.ndarray, callback: Any = None) -> canvax.Result:
    pipe.programs.features.clear()  # the others encode each time
    return pipe(
        job["prompts"],
        height=job["height"],
        width=job["width"],
        num_inference_steps=job["steps"],
        guidance_scale=job["guidance"],
        seed=0,
        sampler=job["sampler"],
        latents=latents,
        options=canvax.Options(progress=False, callback=callback),
    )


def _seen(pipe: canvax.Pipeline, job: Asked, noise: np.ndarray, result: canvax.Result) -> dict[str, np.ndarray]:
    """What is compared; of a model without guidance also one step, see ``benchmarks.lab.measure.DRIFT``."""
    results = {"": result}
    if job["guidance"] <= 1:
        results["one_step_"] = _draw(pipe, job | {"steps": 1}, noise)
    return {f"{of}{name}": getattr(each, name) for of, each in results.items() for name in ("latents", "pixels")}


def _load_once(job: Asked) -> Once:
    _ = canvax.Pipeline  # importing it is no part of loading, nor is starting the device
    jax.devices()
    began = time.perf_counter()
    params = jax.block_until_ready(_pipeline(job).params)
    facts = {"seconds": time.perf_counter() - began} | _facts(params) | {"device_peak_bytes": device_peak(job)}

    def check() -> list[float]:
        assert params is not None
        leaves = jax.tree.leaves([params[name] for name in job["checked"]])
        return [sum(leaf.size for leaf in leaves), sum(map(_square, leaves))]

    return facts, check


def _start(job: Asked, began: float) -> Once:
    """Seconds since the process was started at which each thing was done."""
    moments: dict[str, Any] = {}

    def note(name: str) -> None:
        moments.setdefault(name, time.time() - began)

    _ = canvax.Pipeline
    note("imported")
    with np.load(job["inputs"]) as file:
        latents = file["latents"]
    pipe = _pipeline(job)
    jax.block_until_ready(pipe.params)
    note("loaded")
    pipe.compile(job["height"], job["width"], job["batch"], progress=False)
    note("programs")
    result = _draw(pipe, job, latents, lambda step: note("first_step"))
    result.save(Path(job["pictures"]))
    note("picture")
    facts = _facts(pipe.params) | {"moments": moments, "traces": traces(), "compilations": compilations()}
    return facts, lambda: np.savez(job["outputs"], **_seen(pipe, job, latents, result))  # type: ignore[arg-type]


def _facts(params: Any) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": {"platform": device.platform, "kind": device.device_kind},
        "versions": {"canvax": canvax.__version__, "jax": jax.__version__},
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    }


def _float32(result: Any) -> dict[str, np.ndarray]:
    named = result if isinstance(result, dict) else {"output": result}
    return {name: np.asarray(array, np.float32) for name, array in named.items()}


def _of_prompts(job: Asked, inputs: dict[str, np.ndarray], result: Any) -> dict[str, np.ndarray]:
    """Features without those of padding, which are nobody's, but for those of FLUX.2."""
    tokens, length = np.arange(inputs["text_encoder/ids"].shape[1]), inputs["text_encoder/length"]
    return {"text": _float32(result)["text"] * ((tokens < length[:, None]) | (job["family"] == "flux2"))[..., None]}


def _square(leaf: Any) -> float:
    """Sum of squares, by blocks: a copy in float32 of a whole array would be the largest thing in memory."""
    flat = np.asarray(leaf).reshape(-1)
    blocks = (flat[i : i + (1 << 20)].astype(np.float32) for i in range(0, flat.size, 1 << 20))
    return float(sum(np.dot(block, block) for block in blocks))


def _flops(function: Callable[..., Any], params: Params, arguments: tuple[Any, ...]) -> float:
    """What the model is: kernels that save work count in full, and one that is fused would not be counted at all."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), arguments)
    weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    with compiling_for("none"):
        return count_flops(function, weights, *shapes)


def _picture_flops(job: Asked, pipe: canvax.Pipeline) -> float:
    """All prompts, all steps, decoding. What a transformer prepares counts once."""
    assert pipe.params is not None
    model, params, total = pipe.model, pipe.params, 0.0
    whole = Job(**{field.name: job[field.name] for field in dataclasses.fields(Job)})
    texts = 2 if clip_configs(model.text) else 1
    for part, times in (("text", texts), ("denoiser", job["steps"]), ("vae", 1)):
        numbers = make_inputs(dataclasses.replace(whole, part=part), model)
        function, arguments = _call(part, model, params, numbers)
        total += times * _flops(function, params, arguments)
        if part in DENOISERS and not clip_configs(model.text):
            denoiser, (x, _, conditions) = model.networks.denoiser, arguments
            packing = denoiser.facts.packing
            sizes = packing.sizes(len(x), x.shape[2])
            prepare = partial(denoiser.prepare, latents=packing.shape(x.shape))
            total -= (times - 1) * _flops(prepare, params[denoiser.component], ({**conditions, **sizes},))
    return total
