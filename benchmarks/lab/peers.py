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

    if job["device"] != "cpu" or job["part"] not in ("unet", "vae"):
        raise SystemExit("openvino takes part in unet and vae, with --device cpu")
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


def _unet(job: Job, inputs: dict[str, np.ndarray], compiled: str) -> Any:
    import diffusers

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

    model = _network(diffusers.AutoencoderKL, job, "vae")
    latents, scale = _images(job, inputs["latents"]), model.config.scaling_factor
    decode = model.decode
    if compiled:
        model.fuse_qkv_projections()
        decode = _compile(model.decode, compiled)
    return (
        lambda: decode(latents / scale, return_dict=False)[0],
        lambda result: {"output": _channels_last(result)},
        [model],
    )


def _text(job: Job, inputs: dict[str, np.ndarray], compiled: str) -> Any:
    """As the pipelines read them: SDXL takes the last layer but one of each, and the second gives a pooled vector."""
    import torch
    import transformers

    encoders = {}
    for name in inputs:
        cls = transformers.CLIPTextModelWithProjection if name.endswith("_2") else transformers.CLIPTextModel
        encoders[name] = _from_pretrained(cls, job, name)
    modules = list(encoders.values())
    ids = {name: torch.from_numpy(inputs[name].astype(np.int64)).to(_device(job)) for name in inputs}
    xl = "text_encoder_2" in inputs
    called = {name: _compile(model, compiled, whole=False) if compiled else model for name, model in encoders.items()}

    def run() -> dict[str, Any]:
        out = {name: called[name](ids[name], output_hidden_states=xl) for name in called}
        if not xl:
            return {"text": out["text_encoder"].last_hidden_state}
        text = torch.cat([one.hidden_states[-2] for one in out.values()], dim=-1)
        return {"text": text, "pooled": out["text_encoder_2"].text_embeds}

    return run, lambda result: {name: _numpy(tensor) for name, tensor in result.items()}, modules


def _picture(job: Job, inputs: dict[str, np.ndarray], compiled: str) -> Any:
    import torch

    pipe = _pipeline(job)
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)
    modules = _modules(pipe)
    if compiled:
        pipe.fuse_qkv_projections()
        pipe.unet = _compile(pipe.unet, compiled)
        pipe.vae.decode = _compile(pipe.vae.decode, compiled)
    return (
        partial(_draw, pipe, job, inputs["latents"]),
        lambda result: {name: result[name] for name in ("latents", "pixels")},
        modules,
    )


_PARTS = {"unet": _unet, "vae": _vae, "text": _text, "picture": _picture}


def _draw(pipe: Any, job: Job, noise: np.ndarray, first_step: Callable[[], object] | None = None) -> dict[str, Any]:
    """Pictures as arrays and as PIL images, which canvax makes both too."""
    seen = {}

    def after_step(_: Any, index: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if first_step is not None and index == 0:
            _wait(job)
            first_step()
        seen["latents"] = values["latents"]
        return {}

    pixels = pipe(
        job["prompts"],
        height=job["height"],
        width=job["width"],
        num_inference_steps=job["steps"],
        guidance_scale=job["guidance"],
        latents=_tensor(job, np.moveaxis(noise, -1, 1), job["dtype"]),
        output_type="np",
        callback_on_step_end=after_step,
    ).images
    images = pipe.numpy_to_pil(pixels)
    return {"latents": _channels_last(seen["latents"]), "pixels": pixels, "images": images}


def _pipeline(job: Job) -> Any:
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    pipe = _from_pretrained(diffusers.DiffusionPipeline, job, "")
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
    for library, name in (value for value in index.values() if isinstance(value, list) and value[1]):
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
        weights = [weight.detach().flatten() for module in modules for weight in module.parameters()]
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
    outputs = {name: result[name] for name in ("latents", "pixels")}
    return _facts(job, _modules(pipe)) | {"moments": moments}, lambda: np.savez(job["outputs"], **outputs)


CONTENDERS = {
    "torch": SimpleNamespace(prepare=partial(prepare, compiled=""), once=once, device_peak=device_peak),
    "torch-compile": SimpleNamespace(prepare=partial(prepare, compiled="max-autotune"), device_peak=device_peak),
    "openvino": SimpleNamespace(prepare=prepare_openvino, device_peak=device_peak),
    "torch-compile-default": SimpleNamespace(prepare=partial(prepare, compiled="default"), device_peak=device_peak),
}
