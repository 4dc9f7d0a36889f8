"""The peers of a benchmark: PyTorch diffusers, eager and compiled, and OpenVINO; see ``worker.py``.

The only file here that imports PyTorch, and no other file imports this one: ``worker.py`` loads it, in a process of its
own, in an interpreter that need not have canvax. Each gets the settings that its own documentation gives for speed, no
more and no less: channels last; compiled, also fused projections and the compiler's settings for diffusion. These take
many minutes for SDXL; "torch-compile-default" has the compiler's defaults, and takes one. OpenVINO converts diffusers'
networks for processors; it is asked for short times of single calls, in the dtype of the job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

Job = dict[str, Any]
Ready = tuple[Callable[[], Any], Callable[[Any], dict[str, np.ndarray]], dict[str, Any]]
Once = tuple[dict[str, Any], Callable[[], Any]]


def prepare(job: Job, inputs: dict[str, np.ndarray], *, compiled: str) -> Ready:
    """Load a part, and compile it if wanted; the first run is what compiles."""
    import torch

    _settle(job, compiled)
    began = time.perf_counter()
    with torch.no_grad():
        run, outputs, modules = _PARTS[job["part"]](job, inputs, compiled)
    _wait(job)
    facts = _facts(job, modules) | {"load_s": time.perf_counter() - began}
    # Compiled graphs are not meant to see inference tensors; eager ones are a little faster with them.
    mode = torch.no_grad if compiled else torch.inference_mode

    def synchronised() -> Any:
        with mode():
            result = run()
        _wait(job)
        return result

    return synchronised, outputs, facts


def prepare_openvino(job: Job, inputs: dict[str, np.ndarray]) -> Ready:
    """The UNet or the decoder, converted and compiled."""
    import diffusers
    import openvino
    import torch

    if job["device"] != "cpu" or job["part"] not in ("unet", "vae") or job["family"] in _TRANSFORMERS:
        raise SystemExit("openvino takes part in unet and vae of Stable Diffusion, with --device cpu")
    began = time.perf_counter()
    loaded = job | {"dtype": "float32"}
    tensors = [_images(loaded, inputs["latents"])]
    if job["part"] == "unet":
        model = _network(diffusers.UNet2DConditionModel, loaded, "unet")
        names = [name for name in ("timesteps", "text", "pooled", "time_ids") if name in inputs]
        tensors += [_tensor(loaded, inputs[name]) for name in names]

        def call(x: Any, timesteps: Any, text: Any, *added: Any) -> Any:
            kinds = dict(zip(("text_embeds", "time_ids"), added, strict=True)) if added else None
            return model(x, timesteps, encoder_hidden_states=text, added_cond_kwargs=kinds, return_dict=False)[0]
    else:
        model = _network(diffusers.AutoencoderKL, loaded, "vae")

        def call(latents: Any) -> Any:
            return model.decode(latents / model.config.scaling_factor, return_dict=False)[0]

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, *given: Any) -> Any:
            return call(*given)

    with torch.no_grad():
        converted = openvino.convert_model(Network(), example_input=tuple(tensors))
    facts = _facts(loaded, [model])
    facts["versions"] |= {"openvino": openvino.__version__}
    starts = time.perf_counter()
    precision = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[job["dtype"]]
    compiled = openvino.compile_model(
        converted, "CPU", {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    )
    facts |= {"load_s": starts - began, "compile_s": time.perf_counter() - starts}
    arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
    return lambda: compiled(arrays)[0], lambda result: {"output": np.moveaxis(np.asarray(result), 1, -1)}, facts


def once(job: Job, began: float) -> Once:
    """Load a checkpoint, or draw a picture from the start of the process on."""
    return _load_once(job) if job["part"] == "load" else _start(job, began)


def device_peak(job: Job) -> int | None:
    """The most memory that tensors have had on the GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if job["device"] == "gpu" else None


def _denoiser(job: Job, inputs: dict[str, np.ndarray], compiled: str) -> Any:
    """An evaluation of a transformer, as its pipeline calls it; its velocity is noise minus image for all families."""
    import diffusers
    import torch

    model = _from_pretrained(getattr(diffusers, _TRANSFORMERS[job["family"]]), job, "transformer").eval()
    called = _compile_transformer(model, compiled) if compiled else model
    _, h, w, _ = inputs["latents"].shape
    latents = _tensor(job, np.moveaxis(inputs["latents"], -1, 1), job["dtype"])
    text, times = _tensor(job, inputs["text"], job["dtype"]), _tensor(job, inputs["timesteps"]) / 1000
    rows = torch.arange(text.shape[1], device=text.device)
    if job["family"] == "z-image":
        images, captions = list(latents[:, :, None].unbind()), list(text.unbind())
        run = partial(called, images, 1 - times, captions, return_dict=False)
        return run, lambda result: {"output": -_channels_last(torch.stack(result[0])[:, :, 0])}, [model]
    places = torch.cartesian_prod(torch.arange(1), torch.arange(h), torch.arange(w)).to(text.device)
    if job["family"] == "flux2":
        tokens = latents.flatten(2).mT.contiguous()
        places = torch.nn.functional.pad(places, (0, 1))[None].expand(len(tokens), -1, -1)
        words = torch.nn.functional.pad(rows[:, None], (3, 0))[None].expand(len(tokens), -1, -1)
        run = partial(called, tokens, text, times.to(text.dtype), places, words, None, return_dict=False)
        return run, lambda result: {"output": _channels_last(result[0].mT.unflatten(2, (h, w)))}, [model]
    kept = text[:, KREA2_DROPPED:].unflatten(2, (model.config.num_text_layers, -1))
    places = torch.cartesian_prod(torch.arange(1), torch.arange(h // 2), torch.arange(w // 2)).to(text.device)
    places = torch.cat([torch.zeros(kept.shape[1], 3, device=text.device), places.float()])
    mask = torch.ones(kept.shape[:2], dtype=torch.bool, device=text.device)
    run = partial(called, _squares(latents), kept, times.to(text.dtype), places, mask, return_dict=False)
    return run, lambda result: {"output": _channels_last(_from_squares(result[0], h, w))}, [model]


def _squares(latents: Any) -> Any:
    """[B, C, h, w] -> squares of 2 x 2 latents as tokens [B, L, C * 4], as Krea 2's pipeline packs them."""
    return latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _from_squares(tokens: Any, h: int, w: int) -> Any:
    """The inverse."""
    squares = tokens.unflatten(2, (-1, 2, 2)).unflatten(1, (h // 2, w // 2))
    return squares.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def _unet(job: Job, inputs: dict[str, np.ndarray], compiled: str) -> Any:
    import diffusers

    if job["family"] in _TRANSFORMERS:
        return _denoiser(job, inputs, compiled)
    model = _network(diffusers.UNet2DConditionModel, job, "unet")
    if compiled:
        model.fuse_qkv_projections()
        model = _compile(model, compiled)
    x, text = _images(job, inputs["latents"]), _tensor(job, inputs["text"], job["dtype"])
    timesteps, added = _tensor(job, inputs["timesteps"]), None
    if "pooled" in inputs:
        pooled, time_ids = _tensor(job, inputs["pooled"], job["dtype"]), _tensor(job, inputs["time_ids"])
        added = {"text_embeds": pooled, "time_ids": time_ids}

    def run() -> Any:
        return model(x, timesteps, encoder_hidden_states=text, added_cond_kwargs=added, return_dict=False)[0]

    return run, lambda result: {"output": _channels_last(result)}, [model]


def _vae(job: Job, inputs: dict[str, np.ndarray], compiled: str) -> Any:
    import diffusers

    latents = _images(job, inputs["latents"])
    if job["family"] == "krea-2":
        model = _from_pretrained(diffusers.AutoencoderKLQwenImage, job, "vae").eval()
        mean, deviation = (
            _tensor(job, np.float32(model.config[name]), job["dtype"])[None, :, None, None, None]
            for name in ("latents_mean", "latents_std")
        )
        decode = _compile(model.decode, compiled, whole=False) if compiled else model.decode
        return (
            lambda: decode(latents[:, :, None] * deviation + mean, return_dict=False)[0][:, :, 0],
            lambda result: {"output": _channels_last(result)},
            [model],
        )
    cls = diffusers.AutoencoderKLFlux2 if job["family"] == "flux2" else diffusers.AutoencoderKL
    model = _network(cls, job, "vae")
    if job["family"] == "flux2":
        statistics = model.bn.running_mean, (model.bn.running_var + model.config.batch_norm_eps).sqrt()
        mean, deviation = (value.to(latents)[None, :, None, None] for value in statistics)

        def scaled() -> Any:
            return diffusers.Flux2KleinPipeline._unpatchify_latents(latents * deviation + mean)
    else:

        def scaled() -> Any:
            return latents / model.config.scaling_factor + (getattr(model.config, "shift_factor", None) or 0.0)

    decode = model.decode
    if compiled:
        model.fuse_qkv_projections()
        decode = _compile(model.decode, compiled)
    return (
        lambda: decode(scaled(), return_dict=False)[0],
        lambda result: {"output": _channels_last(result)},
        [model],
    )


def _text(job: Job, inputs: dict[str, np.ndarray], compiled: str) -> Any:
    """As the pipelines read them: SDXL takes the last layer but one of each, and the second gives a pooled vector."""
    import torch
    import transformers

    if job["family"] in _TRANSFORMERS:
        return _language_model(job, inputs["text_encoder/ids"], inputs["text_encoder/length"], compiled)
    tokens = {name.removesuffix("/ids"): array for name, array in inputs.items() if name.endswith("/ids")}
    encoders = {}
    for name in tokens:
        cls = transformers.CLIPTextModelWithProjection if name.endswith("_2") else transformers.CLIPTextModel
        encoders[name] = _from_pretrained(cls, job, name)
    modules = list(encoders.values())
    ids = {name: torch.from_numpy(array.astype(np.int64)).to(_device(job)) for name, array in tokens.items()}
    xl = "text_encoder_2" in tokens
    called = {name: _compile(model, compiled, whole=False) if compiled else model for name, model in encoders.items()}

    def run() -> dict[str, Any]:
        out = {name: called[name](ids[name], output_hidden_states=xl) for name in called}
        if not xl:
            return {"text": out["text_encoder"].last_hidden_state}
        text = torch.cat([one.hidden_states[-2] for one in out.values()], dim=-1)
        return {"text": text, "pooled": out["text_encoder_2"].text_embeds}

    return run, lambda result: {name: _numpy(tensor) for name, tensor in result.items()}, modules


def _language_model(job: Job, tokens: np.ndarray, length: np.ndarray, compiled: str) -> Any:
    """The layers that the pipelines read of it, side by side."""
    import torch
    import transformers

    index = json.loads((Path(job["folder"]) / "model_index.json").read_text())
    model = _from_pretrained(getattr(transformers, index["text_encoder"][1]), job, "text_encoder").eval()
    called = _compile(model, compiled, whole=False) if compiled else model
    taps = {"z-image": (-2,), "flux2": (9, 18, 27)}.get(job["family"]) or index["text_encoder_select_layers"]
    read = np.arange(tokens.shape[1]) < length[:, None]
    ids = torch.from_numpy(tokens.astype(np.int64)).to(_device(job))
    mask = torch.from_numpy(read.astype(np.int64)).to(_device(job))

    def run() -> Any:
        states = called(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
        return torch.stack([states[tap] for tap in taps], dim=2).flatten(2)

    # Features of padding are nobody's, but for those of FLUX.2.
    seen = np.ones_like(tokens) if job["family"] == "flux2" else read
    return run, lambda result: {"text": _numpy(result) * seen[..., None]}, [model]


def _picture(job: Job, inputs: dict[str, np.ndarray], compiled: str) -> Any:
    import torch

    pipe, whole = _pipeline(job), job["family"] != "krea-2"  # whose autoencoder is for videos
    if whole:
        pipe.vae.to(memory_format=torch.channels_last)
    modules = _modules(pipe)
    if job["family"] not in _TRANSFORMERS:
        pipe.unet.to(memory_format=torch.channels_last)
        if compiled:
            pipe.fuse_qkv_projections()
            pipe.unet = _compile(pipe.unet, compiled)
    elif compiled:
        pipe.transformer = _compile_transformer(pipe.transformer, compiled)
    if compiled:
        pipe.vae.decode = _compile(pipe.vae.decode, compiled, whole=whole)
    return (
        partial(_draw, pipe, job, inputs["latents"]),
        partial(_seen, pipe, job, inputs["latents"]),
        modules,
    )


_TRANSFORMERS = {
    "z-image": "ZImageTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "krea-2": "Krea2Transformer2DModel",
}
"""Classes of denoisers by family; other families have a UNet."""

KREA2_DROPPED = 34
"""Tokens of the template before a prompt, whose features Krea 2 does not read."""

_PARTS = {"denoiser": _unet, "unet": _unet, "vae": _vae, "text": _text, "picture": _picture}


def _draw(pipe: Any, job: Job, noise: np.ndarray, first_step: Callable[[], object] | None = None) -> dict[str, Any]:
    """Pictures as arrays and as PIL images, which canvax makes both too."""
    seen = {}

    def after_step(_: Any, index: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if first_step is not None and index == 0:
            _wait(job)
            first_step()
        seen["latents"] = values["latents"]
        return {}

    family, (_, h, w, _) = job["family"], noise.shape
    # Z-Image's pipeline keeps latents in float32.
    latents = _tensor(job, np.moveaxis(noise, -1, 1), "float32" if family == "z-image" else job["dtype"])
    pixels = pipe(
        prompt=list(job["prompts"]),  # which Z-Image's pipeline writes into
        height=job["height"],
        width=job["width"],
        num_inference_steps=job["steps"],
        guidance_scale=job["guidance"],
        latents=_squares(latents) if family == "krea-2" else latents,
        output_type="np",
        callback_on_step_end=after_step,
        **({"max_sequence_length": job["text_rows"]} if job["text_rows"] else {}),
    ).images
    images, last = pipe.numpy_to_pil(pixels), seen["latents"]
    if family == "krea-2":
        last = _from_squares(last, h, w)
    elif family == "flux2":
        last = last.mT.unflatten(2, (h, w))
    return {"latents": _channels_last(last), "pixels": pixels, "images": images}


def _seen(pipe: Any, job: Job, noise: np.ndarray, result: dict[str, Any]) -> dict[str, Any]:
    """What is compared; of a model without guidance also one step."""
    import torch

    results = {"": result}
    if job["guidance"] <= 1:
        with torch.no_grad():
            results["one_step_"] = _draw(pipe, job | {"steps": 1}, noise)
    return {f"{of}{name}": each[name] for of, each in results.items() for name in ("latents", "pixels")}


def _pipeline(job: Job) -> Any:
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    pipe = _from_pretrained(diffusers.DiffusionPipeline, job, "")
    if job["family"] not in _TRANSFORMERS:
        pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _modules(pipe: Any) -> list[Any]:
    import torch

    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def _network(cls: Any, job: Job, name: str) -> Any:
    import torch

    return _from_pretrained(cls, job, name).eval().to(memory_format=torch.channels_last)


def _from_pretrained(cls: Any, job: Job, name: str) -> Any:
    import torch

    dtype = getattr(torch, job["dtype"])
    return cls.from_pretrained(Path(job["folder"]) / name, torch_dtype=dtype, local_files_only=True).to(_device(job))


def _compile(function: Any, mode: str, *, whole: bool = True) -> Any:
    import torch

    return torch.compile(function, mode=mode, fullgraph=whole)


def _compile_transformer(model: Any, mode: str) -> Any:
    """FLUX.2's with fused projections, which the others do not read."""
    import torch

    if type(model).__name__ == "Flux2Transformer2DModel":
        model.fuse_qkv_projections()
    if hasattr(getattr(model, "rope_embedder", None), "freqs_cis"):
        # Z-Image's makes tables of positions in its first call, in a way that cannot be compiled.
        model.rope_embedder(torch.zeros(1, 3, dtype=torch.int32, device=model.device))
    return _compile(model, mode)


def _settle(job: Job, compiled: str) -> None:
    """Settings of a GPU. float32 may use TensorFloat-32, as it may in JAX; convolutions are chosen by trying them.

    Compiled to the utmost, also what diffusers' documentation sets for diffusion models.
    """
    import torch

    if job["device"] != "gpu":
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"PyTorch {torch.__version__} sees no GPU; install its CUDA build, or say --device cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    if compiled == "max-autotune":
        import torch._inductor.config as config

        config.conv_1x1_as_mm = True
        config.coordinate_descent_tuning = True
        config.epilogue_fusion = False
        config.coordinate_descent_check_all_directions = True


def _device(job: Job) -> str:
    return "cuda" if job["device"] == "gpu" else "cpu"


def _wait(job: Job) -> None:
    if job["device"] == "gpu":
        import torch

        torch.cuda.synchronize()


def _images(job: Job, array: np.ndarray) -> Any:
    """[B, h, w, C] -> a channels-last tensor [B, C, h, w] in the dtype of the weights."""
    import torch

    return _tensor(job, np.moveaxis(array, -1, 1), job["dtype"]).contiguous(memory_format=torch.channels_last)


def _tensor(job: Job, array: np.ndarray, dtype: str = "float32") -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(_device(job), getattr(torch, dtype))


def _numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def _channels_last(tensor: Any) -> np.ndarray:
    return np.moveaxis(_numpy(tensor), 1, -1)


def _facts(job: Job, modules: list[Any]) -> dict[str, Any]:
    import diffusers
    import torch
    import transformers

    kind = torch.cuda.get_device_name() if job["device"] == "gpu" else f"{torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "diffusers": diffusers.__version__}
    weights = [weight for module in modules for weight in module.parameters()]
    return {
        "device": {"platform": job["device"], "kind": kind},
        "versions": versions | {"transformers": transformers.__version__},
        "weight_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
    }


def _load_once(job: Job) -> Once:
    import diffusers
    import torch
    import transformers

    index = json.loads((Path(job["folder"]) / "model_index.json").read_text())
    getattr(diffusers, index["_class_name"].removeprefix("Flax"))  # importing it is no part of loading
    for library, name in (value for value in index.values() if isinstance(value, list) and isinstance(value[-1], str)):
        getattr({"diffusers": diffusers, "transformers": transformers}.get(library), name, None)
    _settle(job, compiled="")
    if job["device"] == "gpu":
        torch.cuda.init()
    began = time.perf_counter()
    pipe = _pipeline(job)
    _wait(job)
    facts = {"seconds": time.perf_counter() - began}
    modules = _modules(pipe)

    def check() -> list[float]:
        checked = [getattr(pipe, name) for name in job["checked"]]
        weights = [weight.detach().flatten() for module in checked for weight in module.parameters()]
        squares = sum(float(part.float().square().sum()) for one in weights for part in one.split(1 << 20))
        return [sum(weight.numel() for weight in weights), squares]

    return facts | _facts(job, modules) | {"device_peak_bytes": device_peak(job)}, check


def _start(job: Job, began: float) -> Once:
    import diffusers

    _ = diffusers.DiffusionPipeline  # imports PyTorch too
    moments = {"imported": time.time() - began}
    _settle(job, compiled="")
    with np.load(job["inputs"]) as file:
        noise = file["latents"]
    pipe = _pipeline(job)
    _wait(job)
    moments["loaded"] = time.time() - began
    result = _draw(pipe, job, noise, lambda: moments.setdefault("first_step", time.time() - began))
    os.makedirs(job["pictures"])
    for number, image in enumerate(result["images"]):
        image.save(Path(job["pictures"]) / f"{number}.png")
    moments["picture"] = time.time() - began
    facts = _facts(job, _modules(pipe)) | {"moments": moments}
    return facts, lambda: np.savez(job["outputs"], **_seen(pipe, job, noise, result))


CONTENDERS = {
    "torch": SimpleNamespace(prepare=partial(prepare, compiled=""), once=once, device_peak=device_peak),
    "torch-compile": SimpleNamespace(prepare=partial(prepare, compiled="max-autotune"), device_peak=device_peak),
    "openvino": SimpleNamespace(prepare=prepare_openvino, device_peak=device_peak),
    "torch-compile-default": SimpleNamespace(prepare=partial(prepare, compiled="default"), device_peak=device_peak),
}
