"""``canvax bench``: how fast this machine generates images, compiling apart."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from canvax.cli.arguments import versions
from canvax.cli.plan import parse_size
from canvax.cli.terminal import complain, say, table
from canvax.errors import check_count

PROMPT = "a red apple"


def run(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Time whole images, text to pixels, and print a table."""
    width, height = parse_size(arguments.size)
    rounds, batch = check_count("--rounds", arguments.rounds), check_count("--batch", arguments.batch)
    import canvax
    from canvax.parallel.mesh import mesh_of
    from canvax.planning.chips import peak_flops

    if not arguments.quiet:
        complain(f"loading {arguments.model}")
    pipe = canvax.load(
        arguments.model,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        revision=arguments.revision,
        variant=arguments.variant,
        token=arguments.token,
        cache_dir=arguments.cache_dir,
        local_files_only=arguments.local_files_only,
        mesh=mesh_of(arguments.mesh),
        progress=not arguments.quiet,
    )
    options, results = canvax.Options(progress=False), []
    for turn in range(rounds + 1):  # the first one compiles
        if not arguments.quiet:
            complain("compiling" if turn == 0 else f"round {turn} of {rounds}")
        results.append(
            pipe([PROMPT] * batch, height=height, width=width, num_inference_steps=arguments.steps, seed=0,
                 options=options)
        )  # fmt: skip
    first, *warm = [result.timings for result in results]
    seconds = [timings["total"] for timings in warm]
    devices, meta = pipe.programs.mesh.devices, results[0].metadata[0]
    kind, median = devices.flat[0].device_kind, statistics.median(seconds)
    peak = peak_flops(kind, pipe.model.dtype)
    flops = picture_flops(pipe, meta["height"], meta["width"], batch, round(warm[0]["denoise"] / warm[0]["step"]))
    report |= {
        "model": pipe.model.name, "dtype": pipe.model.dtype, "width": meta["width"], "height": meta["height"],
        "batch": batch, "steps": meta["num_inference_steps"], "sampler": meta["sampler"],
        "guidance_scale": meta["guidance_scale"], "mesh": dict(pipe.programs.mesh.shape),
        "device": {"platform": devices.flat[0].platform, "kind": kind, "count": devices.size},
        "compile_s": first["compile"], "seconds": seconds, "median_s": median, "images_per_s": batch / median,
        "step_s": statistics.median(timings["step"] for timings in warm), "flops_per_s": flops / median,
        "share_of_peak": flops / median / (peak * devices.size) if peak else None,
        "memory_bytes": pipe.memory(meta["height"], meta["width"], batch, guidance=meta["guidance_scale"] > 1).total,
        "versions": versions(),
    }  # fmt: skip
    if not arguments.json:
        for line in lines(report):
            say(line)


def picture_flops(pipe: Any, height: int, width: int, batch: int, evaluations: int) -> float:
    """FLOPs of the denoising of a batch with guidance, by the model as it is written down, whatever the kernels."""
    import jax
    import jax.numpy as jnp

    from canvax.kernels.target import compiling_for
    from canvax.planning.flops import count_flops

    networks = pipe.model.networks
    shape = networks.latent_shape(2 * batch, height, width)
    conditions = pipe.programs.step_inputs(pipe.params, shape, guided=False).conditions
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), pipe.params[networks.denoiser.component]
    )
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), conditions)

    def network(p: Any, x: Any, timestep: Any, conditions: Any) -> Any:
        return networks.denoiser.apply(p, x, timestep, networks.denoiser.prepare(p, conditions))

    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with compiling_for("none"):
        each = count_flops(network, weights, x, jax.ShapeDtypeStruct(shape[:1], jnp.float32), arguments)
    return evaluations * each


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    device, share = report["device"], report["share_of_peak"]
    rows = [
        ("images a second", f"{report['images_per_s']:.3g}"),
        (
            "seconds for a batch",
            f"{report['median_s']:.3g} ({min(report['seconds']):.3g}-{max(report['seconds']):.3g})",
        ),
        ("seconds a step", f"{report['step_s']:.3g}"),
        ("TFLOP/s", f"{report['flops_per_s'] / 1e12:.3g}" + (f", {share:.0%} of the peak" if share else "")),
        ("memory on each device", f"{report['memory_bytes'] / 1e9:.2f} GB"),
        ("compiling, once", f"{report['compile_s']:.1f} s"),
    ]
    what = f"{report['steps']} steps of {report['sampler']}, guidance {report['guidance_scale']:g}, {report['dtype']}"
    size = f"{report['batch']} of {report['width']} x {report['height']}"
    head = f"{report['model']}: {size}, {what}; {device['count']} x {device['kind']}"
    return [head, "", *table(rows, right=(1,))]
