"""How cost grows: time and memory against batch, size, steps and devices, for docs/performance.md.

    python benchmarks/growth.py [--rounds 3] [--output docs/images]
    python benchmarks/growth.py --parts plan --target v5e --chips 1x1 2x2 4x4     # needs libtpu, and hours
    python benchmarks/growth.py --parts batch --rows 100000

Five kinds of figures. "measured": the model in the package on this CPU, points taking turns. "full-size": guided
evaluations of Stable Diffusion 1.5's UNet on this CPU, random weights in float32 (10 GB and minutes). "traced": Stable
Diffusion 1.5 and XL at full size, FLOPs and memory of a guided evaluation in bfloat16, from traces alone. "plan": what
``canvax plan`` says of TPUs, a picture on each chip (weak scaling); minutes for each program not planned before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

BATCHES = (1, 2, 4, 8, 16, 32)
SIDES = (32, 64, 128, 256)
STEPS = (5, 10, 20, 40)
DEVICES = (1, 2, 4, 8)
FULL_SIDES = (256, 512, 768, 1024, 1536)
TIMED_BATCHES, TIMED_SIDES = (1, 2, 4, 8), (256, 512, 768, 1024)
USUAL = {"batch": 1, "side": 64, "steps": 10}
Points = dict[str, dict[int, float]]


def measured(rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Seconds of denoising, and bytes of the denoiser's temporaries, of the model in the package."""
    import canvax

    pipe = canvax.load("emoji", progress=False)
    points = [("batch", n) for n in BATCHES] + [("side", n) for n in SIDES] + [("steps", n) for n in STEPS]

    def draw(name: str, value: int) -> float:
        how = USUAL | {name: value}
        result = pipe(
            ["a cat"] * how["batch"], height=how["side"], width=how["side"], num_inference_steps=how["steps"], seed=1,
            sampler="ddim", options=canvax.Options(progress=False),
        )  # fmt: skip
        return result.timings["denoise"]

    seconds: dict[tuple[str, int], list[float]] = {point: [] for point in points}
    for number in range(rounds + 1):
        for point in points:
            taken = draw(*point)
            if number:  # the first round compiles
                seconds[point].append(taken)
    found: dict[str, dict[int, dict[str, float]]] = {}
    for (name, value), each in seconds.items():
        how = USUAL | {name: value}
        memory = pipe.memory(how["side"], how["side"], how["batch"])
        found.setdefault(name, {})[value] = {"seconds": statistics.median(each), "bytes": memory.programs["denoiser"]}
    return found


def on_devices(rounds: int) -> dict[int, dict[str, float]]:
    """Eight pictures on so many virtual devices, each count in a process of its own, taking turns."""
    runs: dict[int, list[float]] = {count: [] for count in DEVICES}
    for _ in range(rounds):
        for count in DEVICES:
            flags = f"--xla_force_host_platform_device_count={count}"
            done = subprocess.run(
                [sys.executable, __file__, "--worker"], check=True, capture_output=True, text=True,
                env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
            runs[count].append(float(done.stdout.splitlines()[-1]))
    return {count: {"seconds": statistics.median(each)} for count, each in runs.items()}


def worker() -> None:
    """Eight pictures over all devices of this process."""
    import canvax

    pipe = canvax.load("emoji", progress=False)
    options = canvax.Options(progress=False)
    results = [pipe(["a cat"] * 8, num_inference_steps=10, seed=1, sampler="ddim", options=options) for _ in range(3)]
    print(results[-1].timings["denoise"])


def full_size(rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Seconds of a guided evaluation of Stable Diffusion 1.5's UNet in float32, and bytes beside the weights."""
    import jax
    import jax.numpy as jnp

    from canvax.families.known import PRESETS
    from canvax.models.unet import unet, unet_spec
    from canvax.params import init_params

    cfg = PRESETS["sd15"].config
    params = jax.device_put(init_params(unet_spec(cfg), 0))
    points = [("batch", n) for n in TIMED_BATCHES] + [("side", n) for n in TIMED_SIDES]
    program, made = jax.jit(partial(unet, cfg=cfg)), {}
    for name, value in points:
        n, side = (2 * value, 64) if name == "batch" else (2, value // 8)
        arrays = (jnp.ones((n, side, side, 4)), jnp.full(n, 500.0), jnp.ones((n, 77, cfg.cross_attention_dim)))
        made[name, value] = program.lower(params, *arrays).compile(), arrays
    seconds: dict[tuple[str, int], list[float]] = {point: [] for point in points}
    for _ in range(rounds):
        for point, (compiled, arrays) in made.items():
            began = time.perf_counter()
            jax.block_until_ready(compiled(params, *arrays))
            seconds[point].append(time.perf_counter() - began)
    found: dict[str, dict[int, dict[str, float]]] = {"batch": {}, "side": {}}
    for (name, value), (compiled, _) in made.items():
        temporary = compiled.memory_analysis().temp_size_in_bytes
        found[name][value] = {"seconds": statistics.median(seconds[name, value]), "bytes": temporary}
    return found


def traced(model: str) -> dict[str, dict[int, dict[str, float]]]:
    """FLOPs of a guided evaluation: against batch and against size."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractMesh, AxisType

    from canvax.families.known import PRESETS
    from canvax.kernels.target import compiling_for
    from canvax.models.unet import unet, unet_spec
    from canvax.parallel.mesh import AXES
    from canvax.parallel.rules import abstract_params
    from canvax.planning.flops import count_flops

    preset, dtype = PRESETS[model], jnp.bfloat16
    mesh: Any = AbstractMesh((1, 1), AXES, axis_types=(AxisType.Auto,) * 2)
    params = abstract_params(unet_spec(preset.config), dtype, mesh)
    native = preset.native_size[0]
    shape = partial(jax.ShapeDtypeStruct, dtype=dtype)

    def one(batch: int, side: int) -> dict[str, float]:
        n, pooled = 2 * batch, preset.text.pooled_width
        conditions: dict[str, Any] = {}
        if pooled:
            conditions = {"pooled": shape((n, pooled)), "time_ids": shape((n, preset.config.time_ids(pooled)))}
        arguments = (shape((n, side // 8, side // 8, 4)), shape((n,)), shape((n, 77, preset.text.width)), conditions)

        def evaluate(p: Any, x: Any, t: Any, text: Any, conditions: Any) -> Any:
            return unet(p, x, t, text, preset.config, **conditions)

        with compiling_for("none"):  # the work of the model, not of a kernel
            return {"flops": count_flops(evaluate, params, *arguments)}

    return {
        "batch": {batch: one(batch, native) for batch in BATCHES},
        "side": {side: one(1, side) for side in FULL_SIDES},
    }


def planned(model: str, target: str, wirings: list[str]) -> dict[int, dict[str, float]]:
    """A picture on each chip of ever more TPUs."""
    import canvax

    found = {}
    for wiring in wirings:
        plan = canvax.plan(model, f"tpu-{target}:{wiring}", steps=20)
        found[plan.target.chips] = {"seconds": plan.seconds, "bytes": plan.peak_bytes,
                                    "bound_seconds": plan.bound_seconds}  # fmt: skip
    return found


def batch_job(rows: int, into: Any, shard_size: int = 1000) -> dict[int, dict[str, float]]:
    """Seconds of a row, by tenths of a batch job whose images cost nothing: reading, writing, the manifest."""
    from tempfile import TemporaryDirectory

    from PIL import Image

    from canvax.images.formats import GeneratedImage
    from canvax.scale.batch import Plan, run, windows
    from canvax.scale.output import Output
    from canvax.scale.rows import digest_of, settings_of
    from canvax.scale.work import Made, image_file

    record = {"prompt": "a cat", "negative_prompt": "", "sampler": "ddim", "model": "stub", "height": 8, "width": 8,
              "num_inference_steps": 1, "seed": 1, "guidance_scale": 1.0, "id": "r"}  # fmt: skip
    data = image_file(GeneratedImage.of(Image.new("RGB", (8, 8)), record), "png")

    def generate(window: Any) -> Any:
        for start in range(0, len(window), 64):
            part = window[start : start + 64]
            yield len(part), [Made(row, digest_of(settings_of(row, {})), record, data) for row in part]

    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        with file.open("w", encoding="utf-8") as lines:
            lines.writelines(f'{{"id": "r{i:07d}", "prompt": "a cat, number {i}"}}\n' for i in range(rows))
        plan = Plan.read(file, {})
        output = Output(Path(folder) / "out", {}, into=into, shard_size=shard_size)
        ends = [(0, 0.0)]
        for tally in run(plan, plan.left(output.known), output, windows(generate)):
            ends.append((tally.done, tally.seconds))
        output.close(done=True)
    found, begun = {}, ends[0]
    for done, seconds in ends:
        if done - begun[0] >= rows // 10 or done == rows:
            found[done] = {"seconds": (seconds - begun[1]) / (done - begun[0])}
            begun = (done, seconds)
    return found


def table(title: str, points: dict[int, dict[str, float]], unit: int = 1) -> None:
    """Rows of Markdown; the last column is cost over what proportional growth would be, from the first row on."""
    first, *_ = points
    names = list(points[first])
    print(f"\n| {title} | {' | '.join(names)} | {names[0]}, over proportional |")
    print("|---" * (len(names) + 2) + "|")
    for value, one in points.items():
        work = (value / first) ** unit
        cells = " | ".join(f"{figure:.3g}" for figure in one.values())
        print(f"| {value} | {cells} | {one[names[0]] / points[first][names[0]] / work:.2f} |")


def chart(everything: dict[str, Any], folder: Path) -> None:
    """Cost against work, both over those of the first point."""
    from benchmarks.lab.chart import line_chart

    series = {}
    for name, axes in everything.items():
        for axis, points in axes.items():
            first, *_ = points
            figure, power = next(iter(points[first])), 2 if axis == "side" else 1
            base, label = points[first][figure], "pixels" if axis == "side" else axis
            series[f"{name}, {label}"] = [((v / first) ** power, one[figure] / base) for v, one in points.items()]
    image = line_chart(series, title="cost against work, over the first point", x_label="times the work",
                       y_label="times the cost", size=(900, 520), log_x=True, log_y=True)  # fmt: skip
    image.save(folder / "growth.png", optimize=True)


def main() -> None:
    """Make the tables asked for, and the chart if all its lines are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["measured", "devices", "full-size", "traced", "plan", "batch"],
                        default=["measured", "devices", "traced"])  # fmt: skip
    parser.add_argument("--models", nargs="+", default=["sd15", "sdxl"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", default="v5e", help="TPU of the plans")
    parser.add_argument("--chips", nargs="+", default=["1x1", "2x2", "4x4", "8x8", "16x16"], help="how they are wired")
    parser.add_argument("--rows", type=int, default=100_000, help="of the batch job")
    parser.add_argument("--output", type=Path, help="folder for the chart and growth.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    began, drawn, everything = time.perf_counter(), {}, {}
    if "measured" in options.parts:
        drawn["measured"] = measured(options.rounds)
        for axis, points in drawn["measured"].items():
            table(f"measured, emoji: {axis}", points, 2 if axis == "side" else 1)
    if "devices" in options.parts:
        everything["devices"] = on_devices(options.rounds)
        table("measured, 8 pictures of emoji on devices", everything["devices"], 0)
    if "full-size" in options.parts:
        drawn["sd15, measured"] = full_size(options.rounds)
        for axis, points in drawn["sd15, measured"].items():
            table(f"measured, sd15: {axis}", points, 2 if axis == "side" else 1)
    for model in options.models if "traced" in options.parts else ():
        drawn[model] = traced(model)
        for axis, points in drawn[model].items():
            table(f"traced, {model}: {axis}", points, 2 if axis == "side" else 1)
    for model in options.models if "plan" in options.parts else ():
        everything[f"plan {model}"] = planned(model, options.target, options.chips)
        table(f"plan, {model}: chips of {options.target}", everything[f"plan {model}"], 0)
    for into in ("files", "tar") if "batch" in options.parts else ():
        everything[f"batch {into}"] = batch_job(options.rows, into)
        table(f"a row of a batch job, {into}", everything[f"batch {into}"], 0)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "growth.json").write_text(json.dumps(drawn | everything, indent=1) + "\n")
        if drawn:
            chart(drawn, options.output)
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
