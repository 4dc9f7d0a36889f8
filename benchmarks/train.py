"""Training a LoRA beside PyTorch diffusers and PEFT: steps a second, and the most memory on the way.

    python -m benchmarks.train --model out/sdxl --size 1024 --batch 1 4 --json out/train.json
    python -m benchmarks.train --model out/klein --size 1024 --remat both --against torch torch-vae

canvax trains by ``train_lora``, as ``canvax train lora`` does. The peer is a loop over the networks of diffusers with
PEFT's layers in the same places, and does what the training scripts of diffusers do: AdamW, a frozen model in
``--dtype`` under autocast, clipped gradients, CLIP in each step, a language model before the first, checkpointing with
``--remat``. Latents are computed once; by "torch-vae" in each step, as those scripts do by default.

Each contender is a process of its own, one after the other. The first ``--chunk`` steps of both have the same latents,
times, noise and factors: means of their losses further apart than rounding explains are an error. The chunks after that
are timed, and their median counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lab.worker import host_peak

CAPTIONS = ("a red apple", "two cats on a sofa", "a lemon", "a blue house by the sea")
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2}
"""How far the mean losses of the first chunk may be apart, relative to the peer's, which rounds FLUX.2's times too."""

LEARNING_RATE, DECAY, CLIP = 1e-4, 1e-2, 1.0

Figures = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What both train.

    Attributes:
        model: a folder in the diffusers layout.
        scratch: folder of images, of the run, and of what the peer repeats.
        size: side of the images.
        batch: images of a step.
        rank: of the factors.
        remat: whether activations are recomputed.
        dtype: of the computation.
        device: "cpu" or "gpu".
        chunk: steps that are timed together.
        rounds: chunks that are timed.
    """

    model: Path
    scratch: Path
    size: int
    batch: int
    rank: int
    remat: bool
    dtype: str
    device: str
    chunk: int
    rounds: int

    @property
    def pictures(self) -> Path:
        """Folder of the images."""
        return self.scratch / "pictures"

    @property
    def same(self) -> Path:
        """File of the inputs of the first chunk."""
        return self.scratch / "same.npz"


def write_pictures(folder: Path, size: int) -> None:
    """Images of noise with captions, twice as many as captions."""
    from PIL import Image

    folder.mkdir(parents=True)
    rng, lines = np.random.default_rng(0), []
    for i in range(2 * len(CAPTIONS)):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        coarse.resize((size, size)).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": CAPTIONS[i % len(CAPTIONS)]}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines), encoding="utf-8")


def ours(work: Work) -> Figures:
    """canvax; also writes what the peer repeats."""
    import jax

    from canvax.parallel.mesh import make_mesh
    from canvax.train import task
    from canvax.train.lora import Lora, train_lora

    began, device = time.perf_counter(), jax.devices()[0]
    facts: Figures = {}
    ends: list[float] = []
    losses: list[float] = []

    def peak() -> int | None:
        return (device.memory_stats() or {}).get("peak_bytes_in_use")

    def log(step: int, values: Any, images: Any) -> None:
        ends.append(time.perf_counter())
        losses.append(values["loss"])

    real = task.fit

    def fit(start: Any, loss: Any, data: Any, samples: int, plan: Any, session: Any, shared: Any) -> Any:
        facts.update(ready_s=time.perf_counter() - began, device_peak_before_bytes=peak())
        _write_same(work, start, data, samples, plan, shared)
        facts["begun"] = time.perf_counter()
        return real(start, loss, data, samples, plan, replace(session, log=log), shared)

    plan = replace(
        task.PLAN, steps=work.chunk * (1 + work.rounds), batch=work.batch, chunk=work.chunk, seed=0,
        learning_rate=LEARNING_RATE, weight_decay=DECAY, clip=CLIP,
    )  # fmt: skip
    training = task.Training(
        work.model, work.pictures, work.scratch / "run", plan, work.size, empty=0.0, remat=work.remat, dtype=work.dtype,
        times="uniform",  # as the peers draw them
    )  # fmt: skip
    task.fit = fit
    try:
        train_lora(training, Lora(rank=work.rank, layers="attention"), make_mesh([device]))
    finally:
        task.fit = real
    facts["first_chunk_s"] = ends[0] - facts.pop("begun")
    return facts | _figures(work, ends, losses, peak())


def _write_same(work: Work, start: Any, data: Any, samples: int, plan: Any, shared: Any) -> None:
    """The factors, and what each step of the first chunk draws."""
    import jax

    from canvax.train.diffusion import draw
    from canvax.train.loop import step_key

    chosen = plan.indices(0, samples)[:, 0]
    drawn = []
    for step, indices in enumerate(chosen):
        batch = jax.tree.map(lambda leaf, indices=indices: jax.numpy.asarray(leaf[indices]), data)
        empty = {"empty": jax.tree.map(jax.numpy.asarray, shared["empty"])}
        drawn.append(draw(batch, empty, step_key(plan.seed, step), 1000, focus=None, empty=0.0))
    arrays = {name: np.stack([getattr(one, name) for one in drawn]) for name in ("x0", "noise", "times")}
    ((_, factors),) = start.items()
    arrays |= {f"factor {name}": np.asarray(pair["down"]) for name, pair in factors.items()}
    np.savez(work.same, which=chosen, **arrays)


def _figures(work: Work, ends: Sequence[float], losses: Sequence[float], device_peak: int | None) -> Figures:
    chunks = np.diff(ends).tolist()
    return {
        "steps_per_s": work.chunk / statistics.median(chunks),
        "images_per_s": work.batch * work.chunk / statistics.median(chunks),
        "chunks_s": chunks,
        "first_loss": losses[0],
        "losses": list(losses),
        "host_peak_bytes": host_peak(),
        "device_peak_bytes": device_peak,
    }


def theirs(work: Work, *, vae: bool = False) -> Figures:
    """PyTorch diffusers and PEFT; with ``vae``, the autoencoder runs in each step."""
    import diffusers
    import torch

    began, device = time.perf_counter(), "cuda" if work.device == "gpu" else "cpu"
    dtype = getattr(torch, work.dtype)
    torch.backends.cuda.matmul.allow_tf32 = True
    with np.load(work.same) as file:
        same = dict(file)
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(work.model, torch_dtype=dtype)
    if not vae:
        pipe.vae = None
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).to(device)
    family = _Flux2(pipe, device) if hasattr(pipe, "transformer") else _StableDiffusion(pipe, device, work.size)
    network = family.network.train()
    trained = _with_factors(network, same, work.rank)
    if work.remat:
        network.enable_gradient_checkpointing()
    if dtype != torch.float32:
        network.forward = torch.autocast(device, dtype)(network.forward)  # as Accelerate does
    pixels = _pixels(work.pictures).to(device) if vae else None
    gc.collect()
    facts: Figures = {"ready_s": time.perf_counter() - began}
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        facts["device_peak_before_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, betas=(0.9, 0.999), weight_decay=DECAY, eps=1e-8)
    tensors = {name: torch.from_numpy(same[name]).permute(0, 1, 4, 2, 3).to(device) for name in ("x0", "noise")}
    tensors["times"] = torch.from_numpy(same["times"]).long().to(device)

    def step(number: int) -> float:
        row, first = number % work.chunk, number < work.chunk
        x0, which = tensors["x0"][row], same["which"][row].tolist()
        if pixels is not None:
            with torch.no_grad():
                x0 = family.encode(pixels[which]).float()
        noise = tensors["noise"][row] if first else torch.randn_like(x0)
        times = tensors["times"][row] if first else torch.randint(0, 1000, (work.batch,), device=device)
        output, target = family.evaluate(x0, noise, times, which, dtype)
        loss = torch.nn.functional.mse_loss(output.float(), target.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    begun, ends, losses = time.perf_counter(), [], []
    for chunk in range(1 + work.rounds):
        losses.append(statistics.mean(step(chunk * work.chunk + i) for i in range(work.chunk)))
        if on_gpu:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    facts["first_chunk_s"] = ends[0] - begun
    return facts | _figures(work, ends, losses, torch.cuda.max_memory_allocated() if on_gpu else None)


def _with_factors(network: Any, same: dict[str, np.ndarray], rank: int) -> list[Any]:
    """PEFT's layers where canvax has factors, which begin alike; the parameters that are trained."""
    import torch
    from peft import LoraConfig

    downs = {name.removeprefix("factor "): down for name, down in same.items() if name.startswith("factor ")}
    exactly = "|".join(name.replace(".", r"\.") for name in downs)
    network.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=f"({exactly})"))
    layers = dict(network.named_modules())
    with torch.no_grad():
        for name, down in downs.items():
            layers[name].lora_A["default"].weight.copy_(torch.from_numpy(down.T.copy()))
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def _pixels(folder: Path) -> Any:
    """All images [N, 3, H, W] in -1..1."""
    import torch
    from PIL import Image

    images = [np.asarray(Image.open(folder / f"{i}.png")) for i in range(2 * len(CAPTIONS))]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


class _StableDiffusion:
    """1.x, 2.x and XL, whose text encoders run in each step."""

    def __init__(self, pipe: Any, device: str, size: int) -> None:
        import diffusers
        import torch

        self._pipe, self.network = pipe, pipe.unet
        self._schedule: Any = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
        self._vae = pipe.vae and pipe.vae.float()
        names = [name for name in ("tokenizer", "tokenizer_2") if getattr(pipe, name, None) is not None]
        options = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "pt"}
        self._ids = [getattr(pipe, name)(list(CAPTIONS), **options).input_ids.to(device) for name in names]
        self._encoders = [pipe.text_encoder, *([pipe.text_encoder_2] if len(names) > 1 else [])]
        self._sizes = torch.tensor([[size, size, 0, 0, size, size]], device=device)

    def encode(self, pixels: Any) -> Any:
        """Latents of pixels, in float32 as in the script of SDXL."""
        return self._vae.encode(pixels).latent_dist.sample() * self._vae.config.scaling_factor

    def evaluate(self, x0: Any, noise: Any, times: Any, which: list[int], dtype: Any) -> tuple[Any, Any]:
        """Output and target."""
        import torch

        rows = [i % len(CAPTIONS) for i in which]
        more: Figures = {}
        with torch.no_grad():
            if len(self._encoders) == 1:
                text = self._encoders[0](self._ids[0][rows])[0]
            else:
                found = [
                    encoder(ids[rows], output_hidden_states=True)
                    for encoder, ids in zip(self._encoders, self._ids, strict=True)
                ]
                text = torch.cat([one.hidden_states[-2] for one in found], -1)
                sizes = self._sizes.expand(len(rows), -1)
                more = {"added_cond_kwargs": {"text_embeds": found[-1].text_embeds, "time_ids": sizes}}
        noisy = self._schedule.add_noise(x0, noise, times)
        velocity = self._schedule.config.prediction_type == "v_prediction"
        target = self._schedule.get_velocity(x0, noise, times) if velocity else noise
        return self.network(noisy.to(dtype), times, encoder_hidden_states=text, **more).sample, target


class _Flux2:
    """FLUX.2 klein, whose captions are encoded once; then the language model goes."""

    def __init__(self, pipe: Any, device: str) -> None:
        import torch

        self._pipe, self.network, self._vae = pipe, pipe.transformer, pipe.vae
        with torch.no_grad():
            self._text, self._text_ids = pipe.encode_prompt(list(CAPTIONS))
        pipe.text_encoder = None
        schedule = pipe.scheduler
        self._sigmas = (schedule.timesteps / schedule.config.num_train_timesteps).flip(0).to(device)

    def encode(self, pixels: Any) -> Any:
        """Latents of pixels as the transformer has them: squares, normalised."""
        latents = self._pipe._patchify_latents(self._vae.encode(pixels.to(self._vae.dtype)).latent_dist.mode())
        norm = self._vae.bn
        spread = (norm.running_var + self._vae.config.batch_norm_eps).sqrt()
        return (latents - norm.running_mean[:, None, None]) / spread[:, None, None]

    def evaluate(self, x0: Any, noise: Any, times: Any, which: list[int], dtype: Any) -> tuple[Any, Any]:
        """Output and target."""
        rows, sigmas = [i % len(CAPTIONS) for i in which], self._sigmas[times]
        level = sigmas[:, None, None, None]
        noisy = ((1 - level) * x0 + level * noise).to(dtype)
        output = self.network(
            hidden_states=self._pipe._pack_latents(noisy), timestep=sigmas, guidance=None,
            encoder_hidden_states=self._text[rows], txt_ids=self._text_ids[rows],
            img_ids=self._pipe._prepare_latent_ids(noisy).to(noisy.device), return_dict=False,
        )[0]  # fmt: skip
        return output.transpose(1, 2).reshape(noisy.shape), noise - x0


def theirs_with_vae(work: Work) -> Figures:
    """As the scripts do by default."""
    return theirs(work, vae=True)


PEERS: dict[str, Callable[[Work], Figures]] = {"torch": theirs, "torch-vae": theirs_with_vae}


def measure(work: Work, peers: Sequence[str]) -> Figures:
    """Figures of canvax and of the peers, each in a process of its own; of one that fails, "failed" and why."""
    work.scratch.mkdir(parents=True)
    write_pictures(work.pictures, work.size)
    contenders: Figures = {}
    for name, run in (("canvax", ours), *((name, PEERS[name]) for name in peers)):
        if name != "canvax" and not work.same.exists():
            break  # canvax failed before its first step: there is nothing to repeat
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                contenders[name] = pool.submit(run, work).result()
            except Exception as error:  # of any library, want of memory above all
                contenders[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(f"batch {work.batch}, remat {work.remat}, {name}: {_in_words(contenders[name])}", file=sys.stderr)
    return {"batch": work.batch, "remat": work.remat, "contenders": contenders} | compared(contenders, work.dtype)


def compared(contenders: Figures, dtype: str) -> Figures:
    """canvax against each peer: speed, memory and loss; "failed" where the losses differ."""
    found: Figures = {}
    mine = contenders["canvax"]
    for name, peer in contenders.items():
        if name == "canvax" or "failed" in mine or "failed" in peer:
            continue
        kind = "device_peak_bytes" if mine["device_peak_bytes"] else "host_peak_bytes"
        found[name] = {"ratio": mine["steps_per_s"] / peer["steps_per_s"], "memory_ratio": mine[kind] / peer[kind]}
        if name == "torch":  # the other one draws its latents itself
            differs = abs(mine["first_loss"] / peer["first_loss"] - 1)
            found[name]["losses_differ_by"] = differs
            if not differs <= BOUNDS[dtype]:
                found[name] = {"failed": f"losses differ by {differs:.1e}: the work is not the same"}
    return {"against": found}


def _in_words(figures: Figures) -> str:
    if "failed" in figures:
        return figures["failed"]
    peak = figures["device_peak_bytes"] or figures["host_peak_bytes"]
    return f"{figures['steps_per_s']:.3g} steps/s, {peak / 1e9:.2f} GB, loss {figures['first_loss']:.5f}"


def main() -> None:
    """See the top of the file."""
    arguments = _parser().parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CANVAX_CACHE_DIR": "off"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    if arguments.programs:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(arguments.programs)
    if arguments.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    model = Path(arguments.model)
    if arguments.model == "emoji":
        from canvax.weights.location import BUNDLED

        model = BUNDLED["emoji"]
    report: Figures = {name: str(getattr(arguments, name)) for name in ("model", "dtype", "device")}
    report |= {name: getattr(arguments, name) for name in ("size", "rank", "chunk", "rounds")} | {"runs": []}
    remats = {"no": [False], "yes": [True], "both": [False, True]}[arguments.remat]
    with tempfile.TemporaryDirectory(prefix="canvax-train-") as folder:
        for number, (batch, remat) in enumerate(product(arguments.batch, remats)):
            work = Work(
                model, Path(folder) / str(number), arguments.size, batch, arguments.rank, remat, arguments.dtype,
                arguments.device, arguments.chunk, arguments.rounds,
            )  # fmt: skip
            report["runs"].append(measure(work, arguments.against))
            if arguments.json:  # what is there, even if the next one is ended
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report["runs"])))
    every = [found for run in report["runs"] for found in (*run["contenders"].values(), *run["against"].values())]
    if any("failed" in found for found in every):
        raise SystemExit(1)


def table(runs: Sequence[Figures]) -> list[str]:
    """The figures as Markdown."""
    lines = ["| batch | recomputed | | steps/s | GB | canvax / it | memory |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        for name, figures in run["contenders"].items():
            start = f"| {run['batch']} | {'yes' if run['remat'] else 'no'} | {name} |"
            if "failed" in figures:
                lines.append(f"{start} failed | | | |")
                continue
            peak = (figures["device_peak_bytes"] or figures["host_peak_bytes"]) / 1e9
            beside = run["against"].get(name, {})
            ratios = [f"{beside[key]:.2f}" if key in beside else "" for key in ("ratio", "memory_ratio")]
            lines.append(f"{start} {figures['steps_per_s']:.3g} | {peak:.2f} | {ratios[0]} | {ratios[1]} |")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji", help="emoji, or a folder such as benchmarks.lab.models writes")
    parser.add_argument("--size", type=int, default=256, help="side of the images (256)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--remat", choices=["no", "yes", "both"], default="no", help="recompute activations")
    parser.add_argument("--dtype", choices=list(BOUNDS), default="float32")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--against", nargs="*", choices=list(PEERS), default=["torch"])
    parser.add_argument("--chunk", type=int, default=5, help="steps that are timed together (5)")
    parser.add_argument("--rounds", type=int, default=4, help="chunks that are timed (4)")
    parser.add_argument("--programs", type=Path, help="folder where XLA keeps compiled programs")
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser


if __name__ == "__main__":
    main()
