"""Compile programs for TPUs and GPUs that are not here, for the tables of docs/tpu.md and docs/gpu.md.

    python benchmarks/plans.py tpu [--only v5e] [--output plans.json]
    python benchmarks/plans.py gpu
    JAX_PLATFORMS=cpu python benchmarks/plans.py bounds
    JAX_PLATFORMS=cpu python benchmarks/plans.py lora

The models of ``PARTS`` are too large to compile whole. For a TPU their denoisers are compiled with few layers and
with more, and the figures of all layers are computed from both; their text encoders count at their bounds. For a GPU
there are only ``bounds``, which compile nothing: they count the FLOPs of denoiser and decoder as written. ``lora``
compiles steps of training for an H100, for the memory in docs/training.md. All but ``bounds`` need
``pip install ".[tpu]"`` or ``".[cuda]"`` and no device. An SDXL plan takes some three minutes for a TPU on two cores,
half of one for a GPU; what the same code has compiled before is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh

import canvax
from canvax.compile.kinds import Kinds
from canvax.compile.programs import Programs
from canvax.families.known import FAMILIES, PRESETS
from canvax.kernels.target import compiled_on
from canvax.models.decode import decode_images
from canvax.models.networks import Networks
from canvax.models.text import encode_text
from canvax.parallel.mesh import AXES, make_mesh
from canvax.parallel.rules import abstract_params, device_bytes
from canvax.planning.compiling import compile_programs
from canvax.planning.flops import count_flops, evaluation_flops
from canvax.planning.job import Job
from canvax.planning.modes import modes
from canvax.planning.plan import Plan, compiler_version
from canvax.planning.program import ProgramPlan
from canvax.planning.targets import parse_target
from canvax.samplers import from_scheduler_config
from canvax.train import low_rank, make_step
from canvax.train.diffusion import denoising_loss


class Case(NamedTuple):
    """What is planned, and the seconds for the batch that ``source`` published; ``split`` chips share the weights."""

    model: str
    target: str
    batch: int
    side: int
    steps: int
    published: float | None = None
    source: str = ""
    guided: bool = True
    quantize: str | None = None
    split: int = 1


BLOG = "diffusers Flax, SDXL on TPU v5e, 2023"
GUIDE = "diffusers Flax, Stable Diffusion guide, 2022"
MAXDIFFUSION = "MaxDiffusion, 8 chips, an image on each"
CASES = [
    Case("sd14", "tpu-v2:2x2", 8, 512, 50, 7.0, GUIDE),
    Case("sdxl", "tpu-v5e:2x2", 4, 1024, 20, 2.33, BLOG),
    Case("sdxl", "tpu-v5e:2x4", 8, 1024, 20),
    Case("sdxl", "tpu-v4:2x2x1", 4, 1024, 20, 2.16, BLOG),
    Case("sdxl", "tpu-v5e:2x2", 8, 1024, 20, 4.99, BLOG),
    Case("sdxl", "tpu-v4:2x2x1", 8, 1024, 20, 4.17, BLOG),
    Case("sdxl", "tpu-v6e:2x2", 4, 1024, 20),
    Case("sdxl", "tpu-v5p:2x2x1", 4, 1024, 20),
    Case("flux2-klein-4b", "tpu-v6e:1x1", 1, 1024, 4, guided=False),
    Case("z-image", "tpu-v6e:1x1", 1, 1024, 8, 2.24, MAXDIFFUSION, guided=False),
    Case("krea-2", "tpu-v6e:1x1", 1, 1024, 8, guided=False, quantize="int8"),
    Case("flux2-klein-4b", "tpu-v5e:1x1", 1, 1024, 4, guided=False, quantize="int8"),
    Case("z-image", "tpu-v5e:1x1", 1, 1024, 8, guided=False, quantize="int8"),
    Case("flux1-dev", "tpu-v6e:1x1", 1, 1024, 28, 6.0, "torch_xla, 4 chips, an image on each", guided=False,
         quantize="int8"),
    Case("flux1-dev", "tpu-v5e:1x1", 1, 1024, 28, guided=False, quantize="int8"),
    Case("anima", "tpu-v6e:1x1", 1, 1024, 30),
    Case("anima", "tpu-v5e:1x1", 1, 1024, 30, 21.0, "a fork of MaxDiffusion"),
    Case("qwen-image-2.1", "tpu-v6e:1x1", 1, 1024, 8, guided=False, quantize="int8"),
    Case("qwen-image-2.1", "tpu-v6e:1x1", 1, 1024, 40, guided=False, quantize="int8"),
    Case("qwen-image-2.1", "tpu-v5e:1x1", 1, 1024, 8, guided=False, quantize="int8"),
    Case("qwen-image-2.1", "tpu-v5e:1x1", 1, 1024, 40, guided=False, quantize="int8"),
    Case("qwen-image", "tpu-v6e:1x1", 1, 1024, 8, guided=False, quantize="int8"),
    Case("qwen-image", "tpu-v6e:1x1", 1, 1024, 50, quantize="int8"),
    Case("qwen-image", "tpu-v5e:1x1", 1, 1024, 8, guided=False, quantize="int8"),
    Case("qwen-image", "tpu-v6e:2x2", 1, 1024, 50, split=4),
    *(Case("sd15", f"gpu-{name}", 1, 512, 50) for name in ("l4", "rtx4090", "a100-40gb", "h100")),
    *(Case("sdxl", f"gpu-{name}", 1, 1024, 30) for name in ("l4", "rtx4090", "a100-40gb", "h100")),
    *(Case("sdxl", f"gpu-{name}", 8, 1024, 20) for name in ("l4", "a100-40gb", "h200")),
    Case("sdxl", "gpu-h100:8", 8, 1024, 30),
    Case("flux1-dev", "gpu-h200", 1, 1024, 28, 3.50, "SGLang", guided=False),
    Case("flux1-dev", "gpu-h100", 1, 1024, 28, 4.30, "xDiT", guided=False),
    Case("flux1-dev", "gpu-rtx4090", 1, 1024, 28, guided=False, quantize="int8"),
    Case("anima", "gpu-h200", 1, 1024, 30),
    Case("anima", "gpu-rtx4090", 1, 1024, 30),
]  # fmt: skip
PARTS = {"flux1-dev": 19, "anima": 28, "qwen-image-2.1": 32, "qwen-image": 60}
"""Equal parts of the denoiser's blocks, of models that are computed from two depths."""
FEW = 2
"""Parts of the shallower denoiser: only from the third on does each take the same time and memory."""

LORAS = [
    ("sdxl", None), ("sdxl", "int8"), ("flux2-klein-4b", "int8"), ("flux2-klein-4b", None), ("z-image", "int8"),
    ("z-image", None), ("krea-2", "int8"), ("krea-2", None),
]  # fmt: skip
"""Models and the kind of their frozen weights."""

RANK = 16
GIB = 2**30


def main() -> None:
    """Plan each case, writing the results as they come; the tables go to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=["tpu", "gpu", "bounds", "lora"])
    parser.add_argument("--only", default="", help="cases whose model, target and batch contain this")
    parser.add_argument("--output", type=Path, help="also write everything as JSON")
    arguments = parser.parse_args()
    if arguments.platform == "lora":
        print("| model | weights | arguments GB | temporary GB | together GB |\n|---|---|---|---|---|")
        for model, quantize in LORAS:
            if arguments.only in f"{model} {quantize}":
                print(lora(model, quantize), flush=True)
        return
    bounded = arguments.platform == "bounds"
    cases = [
        case for case in CASES
        if arguments.only in f"{case.model} {case.target} {case.batch}"
        and (bounded or case.target.startswith(arguments.platform))
        and (case.model in PARTS if bounded else case.target.startswith("tpu") or case.model not in PARTS)
    ]  # fmt: skip
    if bounded:
        print("\n".join(bounds(cases)))
        return
    results = []
    for case in cases:
        plan = extrapolated(case) if case.model in PARTS else canvax.plan(
            case.model,
            case.target,
            batch=case.batch,
            height=case.side,
            width=case.side,
            steps=case.steps,
            guided=case.guided,
            quantize=case.quantize,
            mesh={"model": case.split},
            announce=progress,
        )  # fmt: skip
        for program in plan.programs:
            if program.collectives_in_loop and case.split == 1:
                raise SystemExit(f"{case.model} on {case.target}: {program.collectives_in_loop} in the loop over steps")
        results.append({**plan.to_dict(), "published_seconds": case.published, "published_by": case.source})
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for table in (whole(results), parts(results)):
        print("\n".join(table), end="\n\n")
    for model in dict.fromkeys(case.model for case in cases if case.model in PARTS):
        count = sum(layers(PRESETS[model]).values())
        few, more = (count * times // PARTS[model] for times in (FEW, FEW + 1))
        print(f"* {model}: computed from denoisers of {few} and {more} of {count} blocks")


def bounds(cases: Iterable[Case]) -> list[str]:
    """A row for each case: the least time of a step and of decoding, by FLOPs at the peak and weights read once."""
    lines = ["| model | chip | weights | steps | TFLOP a step | a step ms | decoding ms | bound s | published s |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for case in cases:
        networks, chip, mesh = PRESETS[case.model], parse_target(case.target).chip, make_mesh(jax.devices()[:1])
        params = {name: abstract_params(spec, "bfloat16", mesh) for name, spec in networks.specs().items()}
        latents = networks.latent_shape(case.batch, case.side, case.side)
        step = evaluation_flops(Programs(networks, mesh), params, latents, guided=case.guided)
        shape = jax.ShapeDtypeStruct(latents, jnp.float32)
        decoding = count_flops(partial(decode_images, cfg=networks.vae), params["vae"], shape) / chip.flops
        component, axes = networks.denoiser.component, {"data": 1, "model": case.split}
        weights = device_bytes(networks.specs(case.quantize)[component], jnp.dtype("bfloat16"), axes)
        least = max(step / chip.flops / case.split, weights / chip.bandwidth)
        lines.append(
            f"| {case.model} | {case.target} | {case.quantize or 'bfloat16'} | {case.steps} | {step / 1e12:.1f} "
            f"| {least * 1e3:.0f} | {decoding * 1e3:.1f} | {case.steps * least + decoding:.2f} "
            f"| {seconds(case.published)} |"
        )
    return lines


def layers(networks: Networks) -> dict[str, int]:
    """The number of the denoiser's blocks of each kind, by the field of its config."""
    denoiser: Any = networks.denoiser
    kinds = ("num_layers", "num_single_layers")
    return {name: getattr(denoiser.cfg, name) for name in kinds if hasattr(denoiser.cfg, name)}


def shallow(networks: Networks, parts: int, times: int) -> Networks:
    """The networks with ``times`` of ``parts`` equal parts of each kind of the denoiser's blocks."""
    denoiser: Any = networks.denoiser
    cfg = replace(denoiser.cfg, **{name: count * times // parts for name, count in layers(networks).items()})
    return replace(networks, denoiser=replace(denoiser, cfg=cfg))


def extrapolated(case: Case) -> Plan:
    """The plan of a case, with the denoiser computed from two depths and the text encoder at its bound."""
    networks, target, parts = PRESETS[case.model], parse_target(case.target), PARTS[case.model]
    mesh, axes = (1, case.split), {"data": 1, "model": case.split}
    job = Job(networks, str(target), mesh, case.batch, case.side, case.side, case.guided, "bfloat16", case.quantize)
    versions = {"canvax": canvax.__version__, "jax": jax.__version__, **compiler_version(target)}
    compiled = partial(compile_programs, versions=versions, reuse=True, announce=progress)
    weights, small = (
        {name: device_bytes(spec, jnp.dtype("bfloat16"), axes) for name, spec in networks.specs(kind).items()}
        for kind in (case.quantize, "int8")
    )
    streamed = weights[networks.denoiser.component] > target.chip.usable
    one, two = (
        compiled(replace(job, model=shallow(networks, parts, times), streamed=streamed), names=["denoise"])["denoise"]
        for times in (FEW, FEW + 1)
    )

    def total(few: Any, more: Any) -> Any:
        return few + (parts - FEW) * (more - few)

    numbers = [name for name, value in one.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    found = {"denoise": {name: total(one[name], two[name]) for name in numbers}}
    found["denoise"]["unpriced"] = tuple({*one["unpriced"], *two["unpriced"]})
    inside = [Counter(result["collectives_in_loop"]) for result in (one, two)]
    found["denoise"]["collectives_in_loop"] = {name: total(inside[0][name], count) for name, count in inside[1].items()}
    found["decode"] = compiled(job, names=["decode"])["decode"]
    alone = make_mesh(jax.devices()[:1])
    params = {name: abstract_params(spec, "bfloat16", alone) for name, spec in networks.specs().items()}
    latents = networks.latent_shape(case.batch, case.side, case.side)
    encode = Programs(networks, alone).wanted(params, latents, Kinds())["text encoder"]
    flops = count_flops(partial(encode_text, cfg=networks.text), params, *encode.inputs) / case.split
    size = sum(weights[name] for name in networks.text.names)
    found["encode"] = {
        "compile_seconds": 0.0,
        "flops": flops,
        "hbm_bytes": size,
        "argument_bytes": size,
        "seconds": max(flops / target.chip.flops, size / target.chip.bandwidth),
    }
    runs = {"encode": 2 if case.guided else 1, "denoise": case.steps, "decode": 1}
    programs = tuple(ProgramPlan(name, runs[name], **found[name]) for name in runs)
    held: dict[str, Any] = {"streamed": ["denoise"] * streamed, "quantize": case.quantize, "dtype": "bfloat16"}
    settings = (case.model, target, axes, case.batch, case.side, case.side, case.steps, case.guided, "bfloat16")
    ways = modes(networks, programs, target.chip, axes=axes, **held)
    return Plan(*settings, case.quantize, weights, sum(small.values()), programs, versions, modes=ways)


def lora(model: str, quantize: str | None) -> str:
    """A row with the memory of a step of training a LoRA with --remat, for one image of 1024 x 1024 on an H100."""
    topology = topologies.get_topology_desc(**parse_target("gpu-h100").topology)
    mesh = Mesh(np.asarray(topology.devices, dtype=object).reshape(1, 1), AXES)
    networks, family = PRESETS[model], next(family for family in FAMILIES if model in family.presets)
    component, unet, dtype, specs = networks.denoiser.component, networks.unet, jnp.bfloat16, networks.specs(quantize)
    chosen = low_rank.targets({component: networks.denoiser.spec}, "attention", family.stacks)
    config: Any = family.single_file.configs.get("scheduler") if family.single_file else None
    config = config or {"_class_name": "EulerDiscreteScheduler"}
    loss = denoising_loss(
        None, unet or networks.denoiser, from_scheduler_config(config).schedule, gamma=None,
        dtype=dtype, remat=True,
        assemble=lambda trained, frozen: low_rank.with_factors(trained, frozen, chosen, scale=1.0),
    )  # fmt: skip
    step = make_step(loss, optax.adamw(1e-4))

    def array(shape: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind)

    conditions = networks.text.conditions(1, [dtype] * len(networks.text.encoders))  # captions are encoded before
    captions = {name: array(leaf.shape[1:], leaf.dtype) for name, leaf in conditions.items()}
    samples: dict[str, Any] = {
        "latents": array((1, 1, *networks.latent_shape(1, 1024, 1024)[1:]), jnp.float16),
        "captions": {name: array((1, 1, *leaf.shape), leaf.dtype) for name, leaf in captions.items()},
    }
    if unet:
        samples["time_ids"] = array((1, networks.size_numbers), jnp.float32)
    shared = {"empty": captions, "frozen": {component: abstract_params(specs[component], dtype, mesh)}}
    state = jax.eval_shape(step.init, jax.eval_shape(lambda: low_rank.new_factors(chosen, RANK, 0)))
    compiled = compiled_on(mesh, step, state, samples, shared, jax.eval_shape(jax.random.key, 0), donate_argnums=0)
    memory: Any = compiled.memory_analysis()
    held, working = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return (
        f"| {model} | {quantize or 'bfloat16'} | {held / 1e9:.1f} | {working / 1e9:.1f} "
        f"| {(held + working) / 1e9:.1f} |"
    )


def progress(what: str, seconds: float | None) -> None:
    """A line on stderr for each compilation."""
    print(f"{what}: compiling" if seconds is None else f"{what}: {seconds:.0f} s", file=sys.stderr, flush=True)


def whole(results: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each plan: the fastest place of the weights that fits, the computed and the published time."""
    lines = [
        "| model | chips | images | weights | GiB of each | bound s | estimate s | published s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        images = f"{one['batch']} of {one['width']} x {one['height']}, {one['steps']} steps"
        fitting = [mode for mode in one["modes"] if mode["fits"] and mode["quantize"] == one["quantize"]]
        if not fitting:
            lines.append(f"| {marked(one)} | {one['target']} | {images} | do not fit | | | | |")
            continue
        mode = min(fitting, key=lambda mode: mode["seconds"])
        compiled = all(program["seconds"] is not None for program in one["programs"])
        lines.append(
            f"| {marked(one)} | {one['target']} | {images} | {mode['quantize'] or one['dtype']}, {mode['place']} "
            f"| {mode['bytes'] / GIB:.1f} of {one['device']['usable_bytes'] / GIB:.2f} | {one['bound_seconds']:.2f} "
            f"| {seconds(mode['seconds'] if compiled else None)} | {seconds(one['published_seconds'])} |"
        )
    return lines


def marked(plan: dict[str, Any]) -> str:
    """The model, with a star if its denoiser was computed from two depths."""
    return plan["model"] + "*" * (plan["model"] in PARTS)


def seconds(amount: float | None) -> str:
    """A figure, or nothing."""
    return "" if amount is None else f"{amount:.2f}"


def parts(results: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each program of each plan, on one device."""
    priced = all(one["estimated_seconds"] for one in results)
    last = "before ms | estimate ms | of the peak" if priced else "kernels"
    lines = [
        f"| model, chips, images | program | TFLOP | GB moved | temporaries GiB | bound ms | {last} | collectives |",
        "|---|---|---|---|---|---|---|" + "---|" * (1 + last.count("|")),
    ]
    for one in results:
        for program in one["programs"]:
            inside = program["collectives_in_loop"] or program["collectives"]
            kinds = ", ".join(f"{count} {name}" for name, count in inside.items()) or "none"
            figure = program["kernels"]
            if priced:
                share = program["flops"] / program["seconds"] / one["device"]["peak_flops_per_second"]
                times = f"{program['setup_seconds'] * 1e3:.1f} | {program['seconds'] * 1e3:.1f}"
                figure = f"{times} | {share:.0%}"
            lines.append(
                f"| {marked(one)}, {one['target']}, {one['batch']} | {program['name']} "
                f"| {program['flops'] / 1e12:.2f} | {program['hbm_bytes'] / 1e9:.1f} "
                f"| {program['temporary_bytes'] / GIB:.2f} | {program['bound_seconds'] * 1e3:.1f} | {figure} "
                f"| {kinds} |"
            )
    return lines


if __name__ == "__main__":
    main()
