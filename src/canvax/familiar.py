"""Names that people know from diffusers, A1111 and their relatives, and what canvax does with each.

One table serves calls, ``canvax.load``, attributes, the command line (``canvax.familiar_flags``) and
``docs/coming-from-diffusers.md``, which shows it. A name that works under another one says so in ``becomes``; the
others get one sentence, their ``answer``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from canvax.checked import placed, refuse_deleted
from canvax.errors import InputError, did_you_mean

PAGE = "docs/coming-from-diffusers.md"
FLAX_PAGE = "docs/migrating-from-diffusers-flax.md"
NOT_HERE = "canvax does not have {} yet"
NO_WATERMARK = "canvax adds no invisible watermark; docs/loading.md#watermarks says why"


class Familiar(NamedTuple):
    """What happens to a name: it means ``becomes``, or its user gets ``answer``."""

    answer: str = ""
    becomes: str = ""


def same(names: str, answer: str) -> dict[str, Familiar]:
    """One answer for several names, parted by spaces."""
    return {name: Familiar(answer) for name in names.split()}


def _renamed(names: str, becomes: str) -> dict[str, Familiar]:
    return {name: Familiar(becomes=becomes) for name in names.split()}


CALL: dict[str, Familiar] = {
    **_renamed("steps sampling_steps num_steps n_steps", "num_inference_steps"),
    **_renamed("cfg cfg_scale guidance scale", "guidance_scale"),
    **_renamed("n num_images n_samples num_samples num_outputs n_iter batch_size", "num_images_per_prompt"),
    **_renamed("negative uc neg_prompt", "negative_prompt"),
    **_renamed("scheduler sampler_name scheduler_name", "sampler"),
    **_renamed("random_seed manual_seed", "seed"),
    **_renamed("H", "height"),
    **_renamed("W", "width"),
    **_renamed("init_image input_image img", "image"),
    **_renamed("mask_image", "mask"),
    **_renamed("denoising_strength denoise", "strength"),
    **same("image_strength init_image_strength", "write strength=0.6, how much is changed; some programs count the "
            "other way round, how much is kept"),
    **same("timestep_spacing", "write spacing='trailing', or 'leading' or 'linspace'"),
    **same("use_karras_sigmas", "write sigmas='karras', or sampler='DPM++ 2M Karras'"),
    **same("iterations", "write num_inference_steps=20, or num_images_per_prompt=4 for more images"),
    **same("output output_path output_dir output_file outpath filename save_path",
            "a call writes no file: write pipe(prompt).save('cat.png')"),
    **same("model model_path model_name", "the model is chosen by loading it: pipe = canvax.load('owner/name')"),
    **same("styles style_preset", "canvax has no styles; write their words into the prompt"),
    **same("lora loras strength_model lora_paths lora_scales lora_weights",
            "write pipe.adapters.load('name', file, weight=0.8) before the call"),
    **_renamed("control_image controlnet_image adapter_image", "control"),
    **_renamed("controlnet_conditioning_scale adapter_conditioning_scale control_weight", "control_scale"),
    **_renamed("control_guidance_start guidance_start", "control_start"),
    **_renamed("control_guidance_end guidance_end adapter_conditioning_factor", "control_end"),
    **same("ip_adapter_scale ip_adapter_masks", "write image_prompt=canvax.ImagePrompt(photo, scale=0.6, mask=mask)"),
    **same("cross_attention_kwargs lora_scale", "a LoRA's weight is the pipeline's, "
            "pipe.adapters.set({'name': 0.8}), or an image's, adapters={'name': 0.8}"),
    **same("callback_steps", "options.callback is called after each evaluation of the network"),
    **same("sag_scale", "canvax has no self-attention guidance; pag_scale=3 is near to it"),
    **_renamed("hr_scale", "hires"),
    **_renamed("cfg_rescale rescale_cfg", "guidance_rescale"),
    **same("upscale upscale_factor", "write hires=2, with hires_strength=0.4; or pipe.upscale(image)"),
    **same("enable_hr hires_fix", "write hires=2, with hires_strength=0.4"),
    **_renamed("subseed", "variation_seed"),
    **_renamed("subseed_strength", "variation_strength"),
    **same("width_height size image_size resolution", "write height=512, width=512"),
    **same("rng prng_seed key", "write seed=1, a whole number; or latents=jax.random.normal(key, (B, h, w, C))"),
    **same("max_sequence_length", "CLIP's text encoders read 77 tokens"),
}  # fmt: skip
"""Arguments of a call. The fields of ``canvax.Options`` are arguments as well."""

LOAD: dict[str, Familiar] = {
    **_renamed("torch_dtype weights_dtype", "dtype"),
    **_renamed("use_auth_token", "token"),
    **_renamed("pretrained_model_name_or_path model_id", "model"),
    **same("device device_map", "canvax uses all devices that JAX sees; JAX_PLATFORMS=cpu or "
            "mesh=canvax.make_mesh(jax.devices()[:1]) chooses"),
    **same("unet text_encoder text_encoder_2 tokenizer tokenizer_2 transformer",
            "load the whole model and pass edited weights with params=; see docs/pipeline.md"),
    **same("subfolder", "pass the folder of the whole model, with model_index.json in it"),
    **same("custom_pipeline trust_remote_code", "canvax runs no code from a repository"),
    **same("from_tf from_flax from_pt", "safetensors and Flax's msgpack are both read; leave it out"),
    **same("load_in_8bit load_in_4bit quantization_config", "write quantize='int8' or quantize='float8'"),
    **same("force_download resume_download proxies mirror local_dir",
            "files come through huggingface_hub and its cache; its environment variables and cache_dir= apply"),
    **same("attn_implementation use_memory_efficient_attention", "the kernel follows from size and platform"),
    **same("lora adapter adapters", "write pipe.adapters.load('name', file, weight=0.8) after loading"),
    **_renamed("controlnets control_net t2i_adapter", "controlnet"),
    **same("ip_adapter", "write canvax.load(model).with_ip_adapter(file)"),
    **same("add_watermarker", NO_WATERMARK),
}  # fmt: skip
"""Arguments of ``canvax.load``."""

HARMLESS: dict[str, tuple[object, ...]] = {
    "feature_extractor": (None,),
    "image_encoder": (None,),
    "requires_safety_checker": (False, None),
    "use_safetensors": (True, None),
    "low_cpu_mem_usage": (True, False, None),
    "add_watermarker": (False, None),
    "device_map": (None,),
}
"""Arguments of ``canvax.load`` that ask for what canvax does anyway, and with which values."""

ATTRIBUTES: dict[str, Familiar] = {
    **same("to cuda cpu half float", "weights are placed and cast while loading: drop this line, or write dtype= and "
            "mesh= in canvax.load"),
    **same("enable_attention_slicing disable_attention_slicing enable_xformers_memory_efficient_attention "
            "disable_xformers_memory_efficient_attention set_use_memory_efficient_attention_xformers",
            "attention never holds all its scores: drop this line"),
    **same("enable_vae_tiling disable_vae_tiling", "pass tiling='on' to a call; large images are tiled by themselves"),
    **same("enable_vae_slicing disable_vae_slicing", "batches are decoded in parts by themselves: drop this line"),
    **same("enable_model_cpu_offload enable_sequential_cpu_offload", "canvax keeps a model on its devices; "
            "quantize='int8' or mesh=canvax.make_mesh(model=2) in canvax.load saves memory"),
    **same("enable_freeu disable_freeu", "pass freeu=(b1, b2, s1, s2) to a call"),
    **same("load_lora_weights load_lora_into_unet load_lora_adapter load_attn_procs",
            "write pipe.adapters.load('name', file_or_hub_id, weight=1.0)"),
    **same("set_adapters set_lora_device", "write pipe.adapters.set({'name': 0.8}), which leaves the others out"),
    **same("enable_lora_hotswap",
            "write pipe.adapters.beside(rank=16) and pipe.adapters.load('name', file, beside=True)"),
    **same("fuse_lora unfuse_lora", "adapters are merged into the weights, and come out to the "
            "last bit: drop this line; pipe.save writes a model with them in it"),
    **same("unload_lora_weights delete_adapters disable_lora enable_lora", "write pipe.adapters.remove('name'), or "
            "pipe.adapters.remove() for all; pipe.adapters.set({}) lets them rest"),
    **same("get_active_adapters get_list_adapters", "pipe.adapters lists them: dict(pipe.adapters)"),
    **same("load_textual_inversion", "write pipe.adapters.load_embedding(file_or_hub_id, token='word')"),
    **same("unload_textual_inversion", "write pipe.adapters.remove('word')"),
    **same("load_ip_adapter", "write pipe = pipe.with_ip_adapter(file), or ('owner/name/folder/file.safetensors')"),
    **same("set_ip_adapter_scale", "the strength is in the call: image_prompt=canvax.ImagePrompt(photo, scale=0.6)"),
    **same("unload_ip_adapter", "a call without image_prompt uses none; pipe.with_ip_adapter(None) has none"),
    **same("prepare_ip_adapter_image_embeds encode_image_embeds", "pass the image: image_prompt=photo; or "
            "image_prompt=canvax.ImagePrompt(embeds=array)"),
    **same("set_progress_bar_config progress_bar", "pass progress=False to a call"),
    **same("encode_prompt", "pipe.encode(prompt) gives the conditions of a prompt"),
    **same("from_single_file", "canvax.load('model.safetensors') reads one: docs/loading.md#single-files"),
    **same("from_ckpt", "canvax.load('model.safetensors') reads one: docs/loading.md#single-files"),
    **same("scheduler", "the sampler is chosen in each call: sampler='Euler', or the name of a diffusers class"),
    **same("unet vae text_encoder text_encoder_2", "weights are pipe.params['unet'] and so on, configs "
            "pipe.model.unet and so on; docs/under-the-pipeline.md calls the networks"),
    **same("feature_extractor image_encoder", "pipe.safety_checker prepares images by itself"),
    **same("watermark", NO_WATERMARK),
    **same("components config", "pipe.model holds configs, tokenizers and the noise schedule"),
    **same("module_list register_modules", "pipe.model holds configs, tokenizers and the noise schedule"),
    **same("vae_scale_factor", "pipe.model.vae.factor"),
    **same("push_to_hub", "write pipe.save(folder), then huggingface_hub.upload_folder"),
    **same("jit apply init", "the pipeline compiles by itself; docs/under-the-pipeline.md has its functions"),
    **same("generate txt2img text2img text_to_image", "call the pipeline: pipe('a red apple')"),
    **same("img2img", "call the pipeline: pipe('a fox', image=photo, strength=0.6)"),
    **same("inpaint", "call the pipeline: pipe('a fox', image=photo, mask=mask)"),
    **_renamed("save_pretrained", "save"),
}  # fmt: skip
"""Attributes and methods of a pipeline."""

ASSIGNED: dict[str, Familiar] = {
    **ATTRIBUTES,
    **same("safety_checker", "canvax.load(model, safety_checker=...) decides, and without it there is none"),
    **same("_interrupt", "return False from the callback, which stops the run"),
}
"""What is assigned to a pipeline."""

CLASSES = {
    "StableDiffusionPipeline": "write canvax.load(model)",
    "StableDiffusionXLPipeline": "write canvax.load(model)",
    "DiffusionPipeline": "write canvax.load(model)",
    "AutoPipelineForText2Image": "write canvax.load(model)",
    **dict.fromkeys(
        ("from_pretrained", "pipeline", "Pipeline", "generate", "txt2img", "text2img", "text_to_image"),
        "write pipe = canvax.load(model), then pipe(prompt)",
    ),
    **{name: ATTRIBUTES[name].answer for name in ("img2img", "inpaint")},
    **dict.fromkeys(
        ("StableDiffusionImg2ImgPipeline", "StableDiffusionXLImg2ImgPipeline", "AutoPipelineForImage2Image"),
        "write canvax.load(model), and image= and strength= in the call",
    ),
    **dict.fromkeys(
        ("StableDiffusionInpaintPipeline", "StableDiffusionXLInpaintPipeline", "AutoPipelineForInpainting"),
        "write canvax.load(model), and image= and mask= in the call",
    ),
    **dict.fromkeys(
        (
            "StableDiffusionControlNetPipeline",
            "StableDiffusionControlNetImg2ImgPipeline",
            "StableDiffusionControlNetInpaintPipeline",
            "StableDiffusionXLControlNetPipeline",
            "StableDiffusionAdapterPipeline",
            "ControlNetModel",
            "T2IAdapter",
        ),
        "write canvax.load(model, controlnet=...), and control= in the call",
    ),
    "AutoencoderKL": "canvax.models.vae has its functions; docs/under-the-pipeline.md calls them",
    "UNet2DConditionModel": "canvax.models.unet has its functions; docs/under-the-pipeline.md calls them",
    "FluxPipeline": NOT_HERE.format("FLUX"),
    "StableDiffusion3Pipeline": NOT_HERE.format("Stable Diffusion 3"),
}
"""Names looked for in the module ``canvax``; those that start with Flax are in ``canvax.flax_api``."""


FLAX_CALL: dict[str, Familiar] = {
    **_renamed("steps", "num_inference_steps"),
    **_renamed("cfg_scale guidance", "guidance_scale"),
    **_renamed("negative_prompt_ids negative_ids", "neg_prompt_ids"),
    **_renamed("rng key", "prng_seed"),
    **same("prompt", "write prompt_ids=pipeline.prepare_inputs(prompt)"),
    **same("negative_prompt neg_prompt", "write neg_prompt_ids=pipeline.prepare_inputs(negative_prompt)"),
    **same("seed generator", "write prng_seed=jax.random.key(0); with jit=True jax.random.split of it, one for each "
            "device"),
    **same("num_images_per_prompt", "write prepare_inputs([prompt] * n)"),
    **same("image strength noise", "FlaxStableDiffusionImg2ImgPipeline has it, and canvax.load(model)"),
    **same("mask masked_image", "FlaxStableDiffusionInpaintPipeline has it, and canvax.load(model) for any model"),
    **same("controlnet_conditioning_scale", "FlaxStableDiffusionControlNetPipeline has it, and canvax.load(model, "
            "controlnet=...)"),
    **same("sampler scheduler", "params['scheduler'] decides: FlaxDDIMScheduler.from_config(config).create_state()"),
    **same("prompt_2 original_size crops_coords_top_left target_size callback callback_steps clip_skip "
            "guidance_rescale eta", "canvax.load(model) has it, and needs no device axis"),
}  # fmt: skip
"""Arguments of a call of a pipeline of :mod:`canvax.flax_api`."""

FLAX_LOAD: dict[str, Familiar] = {
    **{name: entry for name, entry in LOAD.items() if not entry.becomes
       and name not in ("from_pt", "use_memory_efficient_attention")},
    **same("device device_map", "params wait in host memory: replicate(params, devices), or jax.device_put"),
    **same("load_in_8bit load_in_4bit quantization_config", "canvax.load(model, quantize='int8') has it"),
    **_renamed("torch_dtype weights_dtype", "dtype"),
    **_renamed("use_auth_token", "token"),
    **_renamed("model model_id", "pretrained_model_name_or_path"),
    **same("unet vae text_encoder text_encoder_2 tokenizer tokenizer_2 transformer", "load the whole model and put "
            "edited weights into params"),
    **same("quantize mesh precision", "canvax.load(model) has it"),
    **same("controlnet", "FlaxStableDiffusionControlNetPipeline takes it, and canvax.load(model, controlnet=...)"),
    **same("jit", "it is an argument of a call: pipeline(..., jit=True)"),
}  # fmt: skip
"""Arguments of ``from_pretrained`` of a pipeline of :mod:`canvax.flax_api`."""

FLAX_ATTRIBUTES: dict[str, Familiar] = {
    **same("init_weights init init_with_output bind", "weights come from from_pretrained; training is in "
            "docs/training.md"),
    **same("to cuda cpu", "params go to the devices, not the pipeline: params = replicate(params); and their dtype is "
            "that of from_pretrained, dtype=jnp.bfloat16"),
    **same("to_bf16 to_fp16 to_fp32", "write dtype= in from_pretrained, or jax.tree.map(lambda x: "
            "x.astype(jnp.bfloat16), params)"),
    **same("components register_modules", "unet, vae, text_encoder, tokenizer and scheduler are attributes"),
    **same("config", "pipeline.unet.config and so on; pipeline.model.files.index is model_index.json"),
    **same("dtype", "the dtype is that of params"),
    **same("text_encoder_2 tokenizer_2", "this model has one text encoder"),
    **same("safety_checker feature_extractor", "the pipeline has it, pipeline.safety_checker"),
    **same("progress_bar set_progress_bar_config", "there is none: drop this line"),
    **same("prepare_text_inputs", "write prepare_inputs"),
    **same("prepare_image_inputs controlnet", "FlaxStableDiffusionControlNetPipeline has it"),
    **same("get_timestep_start", "pass strength= to a call of FlaxStableDiffusionImg2ImgPipeline"),
    **same("push_to_hub", "write save_pretrained(folder, params), then huggingface_hub.upload_folder"),
    **same("load_lora_weights", "pipe = canvax.load(model) has it, which keeps its weights: pipe.adapters.load"),
    **same("load_textual_inversion", "pipe = canvax.load(model) has it: pipe.adapters.load_embedding"),
    **same("enable_xformers_memory_efficient_attention enable_attention_slicing",
            "attention never holds all its scores: drop this line"),
    **same("get_velocity common", "canvax.samplers has the noise schedule: pipeline.model.scheduler.schedule"),
    **same("timesteps init_noise_sigma", "the state has it: scheduler.set_timesteps(state, steps, latents.shape)"),
    **same("batch_decode decode encode_plus", "pipeline.model.tokenizers has the tokenizers; backend.decode(ids)"),
}  # fmt: skip
"""Attributes of a pipeline of :mod:`canvax.flax_api`, its parts and its schedulers."""

_PARAMS = "FlaxStableDiffusionPipeline.from_pretrained gives pipeline.{0} and params['{0}']"
_STATE = "write pipe(prompt, sampler='{}') with pipe = canvax.load(model)"

FLAX: dict[str, Familiar] = {
    **same("FlaxUNet2DConditionModel", _PARAMS.format("unet")),
    **same("FlaxAutoencoderKL", _PARAMS.format("vae")),
    **same("FlaxCLIPTextModel FlaxCLIPTextModelWithProjection", _PARAMS.format("text_encoder")),
    **same("CLIPTokenizer", "pipeline.tokenizer is one"),
    **same("FlaxDiffusionPipeline", "write FlaxStableDiffusionPipeline or FlaxStableDiffusionXLPipeline"),
    **same("FlaxLMSDiscreteScheduler", _STATE.format("LMS")),
    **same("FlaxKarrasVeScheduler", _STATE.format("Heun Karras")),
    **same("FlaxScoreSdeVeScheduler", _STATE.format("Euler a")),
    **same("FlaxModelMixin FlaxSchedulerMixin FlaxKarrasDiffusionSchedulers", "there is no such base class"),
    **same("CLIPImageProcessor CLIPFeatureExtractor", "pipeline.feature_extractor is one"),
    **same("jax_utils", "replicate and unreplicate are in canvax.flax_api itself"),
}  # fmt: skip
"""Names looked for in the module :mod:`canvax.flax_api`."""


def answer(
    name: str, table: Mapping[str, Familiar], known: Iterable[str], kind: str, page: str = PAGE, takes: str = ""
) -> str:
    """What to say of a ``kind`` that is not there: its answer, or the nearest of ``known``, or what it ``takes``."""
    if entry := table.get(name):
        return f"{name}: {entry.answer or f'write {entry.becomes}'} ({page})"
    public = [one for one in (*known, *table) if not one.startswith("_")]
    return f"{name[:80]!r} is not {kind}; {did_you_mean(name, public) or takes or f'see {page}'}"


_BOTH = "from_pretrained gives two things: pipeline, params = ...from_pretrained(...); canvax.load gives one pipeline"


class Both(NamedTuple):
    """What ``from_pretrained`` gives, two things as in diffusers' Flax; who takes them for one is told."""

    pipeline: Any
    params: Any

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise InputError(_BOTH)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("_") else f"{name}: {_BOTH}")


def missing_class(name: str) -> str | None:
    """What to say of a name that the module ``canvax`` has not; None if it is nothing people know."""
    if name.startswith("Flax"):
        if name in FLAX:
            return f"{name}: {FLAX[name].answer} ({FLAX_PAGE})"
        return f"write from canvax.flax_api import {name} ({FLAX_PAGE})"
    if name.endswith("Scheduler"):
        return f"write sampler={name!r} in a call"
    return f"{name}: {CLASSES[name]} ({PAGE})" if name in CLASSES else None


F = TypeVar("F", bound=Callable[..., Any])
Translate = Callable[[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], Callable[[Any], Any] | None]]
"""From a function's own keywords and the others to those to call it with, and what to do with its result."""


def accepts(
    translate: Translate, check: Callable[[str, Any], None] | None = None, table: Mapping[str, Familiar] | None = None
) -> Callable[[F], F]:
    """A decorator: a call with keywords that a function does not name goes through ``translate`` first.

    ``check`` is given the name and the value of each argument before that. Errors name an argument as it was given,
    where ``table`` knows it under another name.
    """

    def decorate(function: F) -> F:
        parameters, inner = list(signature(function).parameters), placed(function)

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            given = (*zip(parameters, arguments, strict=False), *keywords.items())
            for name, value in given if check else ():
                check(name, value)  # type: ignore[misc]
            others = {name: value for name, value in keywords.items() if name not in parameters}
            if not others:
                return inner(*arguments, **keywords)
            for name, value in given:
                refuse_deleted(name, value)
            own = dict(zip(parameters, arguments, strict=False))
            for name in keywords.keys() - others.keys():
                if name in own:
                    raise InputError(f"{name} is given twice, by its place and by its name")
                own[name] = keywords[name]
            try:
                own, finish = translate(own, others)
                result = inner(**own)
            except InputError as error:
                raise _as_given(error, others, table or {}) from None
            return finish(result) if finish else result

        return call  # type: ignore[return-value]

    return decorate


def _as_given(error: InputError, given: Mapping[str, Any], table: Mapping[str, Familiar]) -> InputError:
    """An error that begins with an argument, under the name that it was given by."""
    for name in given:
        own = table[name].becomes if name in table else ""
        if own and own not in given and re.match(rf"{re.escape(own)}(?!\w)", str(error)):
            return InputError(name + str(error).removeprefix(own))
    return error


def renamed(own: dict[str, Any], others: Mapping[str, Any], table: Mapping[str, Familiar]) -> dict[str, Any]:
    """Put what only has another name here under that name into ``own``; returns what is left of ``others``.

    Raises:
        InputError: one thing is given under two names.
    """
    left = {}
    for name, value in others.items():
        target = table[name].becomes if name in table else ""
        if not target:
            left[name] = value
        elif own.get(target) is not None:
            raise InputError(f"{name} and {target} are one argument; give it once")
        else:
            own[target] = value
    return left


def flax_tables() -> str:
    """All names of :mod:`canvax.flax_api`, which ``docs/migrating-from-diffusers-flax.md`` ends with."""
    return as_markdown(
        ("Names of the module", FLAX, ""),
        ("Arguments of a call", FLAX_CALL, ""),
        ("Arguments of `from_pretrained`", FLAX_LOAD, ""),
        ("Attributes and methods", FLAX_ATTRIBUTES, "."),
    )


def as_markdown(*all_of_them: tuple[str, Mapping[str, Familiar], str]) -> str:
    """Tables with their titles, and what stands before each name."""
    parts = []
    for title, table, prefix in all_of_them:
        names: dict[str, list[str]] = {}
        for name, entry in table.items():
            said = entry.answer or f"the same as `{entry.becomes}`"
            names.setdefault(said, []).append(f"`{prefix}{name}`")
        rows = [f"| {', '.join(group)} | {said} |" for said, group in names.items()]
        parts.append("\n".join([f"### {title}", "", "| name | canvax |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"
