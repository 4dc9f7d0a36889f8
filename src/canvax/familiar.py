"""Names that people know from diffusers, A1111 and their relatives, and what canvax does with each.

One table serves calls, ``canvax.load``, attributes, the command line and ``docs/coming-from-diffusers.md``, which
shows it. A name that works under another one says so in ``becomes``; the others get one sentence, their ``answer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from canvax.checked import placed, refuse_deleted
from canvax.errors import InputError, did_you_mean, slip

PAGE = "docs/coming-from-diffusers.md"
FLAX_PAGE = "docs/migrating-from-diffusers-flax.md"
NOT_HERE = "canvax does not have {} yet"
_NO_WATERMARK = "canvax adds no invisible watermark; docs/loading.md#watermarks says why"


class Familiar(NamedTuple):
    """What happens to a name: it means ``becomes``, or its user gets ``answer``."""

    answer: str = ""
    becomes: str = ""


def _same(names: str, answer: str) -> dict[str, Familiar]:
    return {name: Familiar(answer) for name in names.split()}


def _renamed(names: str, becomes: str) -> dict[str, Familiar]:
    return {name: Familiar(becomes=becomes) for name in names.split()}


CALL: dict[str, Familiar] = {
    **_renamed("steps sampling_steps num_steps n_steps", "num_inference_steps"),
    **_renamed("cfg cfg_scale guidance scale", "guidance_scale"),
    **_renamed("n num_images n_samples batch_size", "num_images_per_prompt"),
    **_renamed("negative uc", "negative_prompt"),
    **_renamed("scheduler sampler_name", "sampler"),
    **_renamed("H", "height"),
    **_renamed("W", "width"),
    **_renamed("init_image", "image"),
    **_renamed("mask_image", "mask"),
    **_renamed("denoising_strength denoise", "strength"),
    **_same("image_strength init_image_strength", "write strength=0.6, how much is changed; some programs count the "
            "other way round, how much is kept"),
    **_same("timestep_spacing", "write spacing='trailing', or 'leading' or 'linspace'"),
    **_same("use_karras_sigmas", "write sigmas='karras', or sampler='DPM++ 2M Karras'"),
    **_same("styles style_preset", "canvax has no styles; write their words into the prompt"),
    **_same("strength_model lora_paths lora_scales lora_weights",
            "write pipe.adapters.load('name', file, weight=0.8) before the call"),
    **_renamed("control_image controlnet_image adapter_image", "control"),
    **_renamed("controlnet_conditioning_scale adapter_conditioning_scale control_weight", "control_scale"),
    **_renamed("control_guidance_start guidance_start", "control_start"),
    **_renamed("control_guidance_end guidance_end adapter_conditioning_factor", "control_end"),
    **_same("ip_adapter_scale ip_adapter_masks", "write image_prompt=canvax.ImagePrompt(photo, scale=0.6, mask=mask)"),
    **_same("cross_attention_kwargs lora_scale", "a LoRA's weight is the pipeline's, "
            "pipe.adapters.set({'name': 0.8}), or an image's, adapters={'name': 0.8}"),
    **_same("callback_steps", "options.callback is called after each evaluation of the network"),
    **_same("sag_scale", "canvax has no self-attention guidance; pag_scale=3 is near to it"),
    **_renamed("hr_scale", "hires"),
    **_same("enable_hr hires_fix", "write hires=2, with hires_strength=0.4"),
    **_renamed("subseed", "variation_seed"),
    **_renamed("subseed_strength", "variation_strength"),
    **_same("width_height size resolution", "write height=512, width=512"),
    **_same("rng prng_seed key", "write seed=1, a whole number; or latents=jax.random.normal(key, (B, h, w, C))"),
    **_same("max_sequence_length", "CLIP's text encoders read 77 tokens"),
}  # fmt: skip
"""Arguments of a call. The fields of ``canvax.Options`` are arguments as well."""

LOAD: dict[str, Familiar] = {
    **_renamed("torch_dtype weights_dtype", "dtype"),
    **_renamed("use_auth_token", "token"),
    **_renamed("pretrained_model_name_or_path model_id", "model"),
    **_same("device device_map", "canvax uses all devices that JAX sees; JAX_PLATFORMS=cpu or "
            "mesh=canvax.make_mesh(jax.devices()[:1]) chooses"),
    **_same("unet text_encoder text_encoder_2 tokenizer tokenizer_2 transformer",
            "load the whole model and pass edited weights with params=; see docs/pipeline.md"),
    **_same("subfolder", "pass the folder of the whole model, with model_index.json in it"),
    **_same("custom_pipeline trust_remote_code", "canvax runs no code from a repository"),
    **_same("from_tf from_flax from_pt", "safetensors and Flax's msgpack are both read; leave it out"),
    **_same("load_in_8bit load_in_4bit quantization_config", "write quantize='int8' or quantize='float8'"),
    **_same("force_download resume_download proxies mirror local_dir",
            "files come through huggingface_hub and its cache; its environment variables and cache_dir= apply"),
    **_same("attn_implementation use_memory_efficient_attention", "the kernel follows from size and platform"),
    **_same("lora adapter adapters", "write pipe.adapters.load('name', file, weight=0.8) after loading"),
    **_renamed("controlnets control_net t2i_adapter", "controlnet"),
    **_same("ip_adapter", "write canvax.load(model).with_ip_adapter(file)"),
    **_same("add_watermarker", _NO_WATERMARK),
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
    **_same("to cuda cpu half float", "weights are placed and cast while loading: drop this line, or write dtype= and "
            "mesh= in canvax.load"),
    **_same("enable_attention_slicing disable_attention_slicing enable_xformers_memory_efficient_attention "
            "disable_xformers_memory_efficient_attention set_use_memory_efficient_attention_xformers",
            "attention never holds all its scores: drop this line"),
    **_same("enable_vae_tiling disable_vae_tiling", "pass tiling='on' to a call; large images are tiled by themselves"),
    **_same("enable_vae_slicing disable_vae_slicing", "batches are decoded in parts by themselves: drop this line"),
    **_same("enable_model_cpu_offload enable_sequential_cpu_offload", "canvax keeps a model on its devices; "
            "quantize='int8' or mesh=canvax.make_mesh(model=2) in canvax.load saves memory"),
    **_same("enable_freeu disable_freeu", "pass freeu=(b1, b2, s1, s2) to a call"),
    **_same("load_lora_weights load_lora_into_unet load_lora_adapter load_attn_procs",
            "write pipe.adapters.load('name', file_or_hub_id, weight=1.0)"),
    **_same("set_adapters set_lora_device", "write pipe.adapters.set({'name': 0.8}), which leaves the others out"),
    **_same("enable_lora_hotswap",
            "write pipe.adapters.beside(rank=16) and pipe.adapters.load('name', file, beside=True)"),
    **_same("fuse_lora unfuse_lora", "adapters are merged into the weights, and come out to the "
            "last bit: drop this line; pipe.save writes a model with them in it"),
    **_same("unload_lora_weights delete_adapters disable_lora enable_lora", "write pipe.adapters.remove('name'), or "
            "pipe.adapters.remove() for all; pipe.adapters.set({}) lets them rest"),
    **_same("get_active_adapters get_list_adapters", "pipe.adapters lists them: dict(pipe.adapters)"),
    **_same("load_textual_inversion", "write pipe.adapters.load_embedding(file_or_hub_id, token='word')"),
    **_same("unload_textual_inversion", "write pipe.adapters.remove('word')"),
    **_same("load_ip_adapter", "write pipe = pipe.with_ip_adapter(file), or ('owner/name/folder/file.safetensors')"),
    **_same("set_ip_adapter_scale", "the strength is in the call: image_prompt=canvax.ImagePrompt(photo, scale=0.6)"),
    **_same("unload_ip_adapter", "a call without image_prompt uses none; pipe.with_ip_adapter(None) has none"),
    **_same("prepare_ip_adapter_image_embeds encode_image_embeds", "pass the image: image_prompt=photo; or "
            "image_prompt=canvax.ImagePrompt(embeds=array)"),
    **_same("set_progress_bar_config progress_bar", "pass progress=False to a call"),
    **_same("encode_prompt", "pipe.encode(prompt) gives the conditions of a prompt"),
    **_same("from_single_file", "canvax.load('model.safetensors') reads one: docs/loading.md#single-files"),
    **_same("from_ckpt", "canvax.load('model.safetensors') reads one: docs/loading.md#single-files"),
    **_same("scheduler", "the sampler is chosen in each call: sampler='Euler', or the name of a diffusers class"),
    **_same("unet vae text_encoder text_encoder_2", "weights are pipe.params['unet'] and so on, configs "
            "pipe.model.unet and so on; docs/under-the-pipeline.md calls the networks"),
    **_same("feature_extractor image_encoder", "pipe.safety_checker prepares images by itself"),
    **_same("watermark", _NO_WATERMARK),
    **_same("components config", "pipe.model holds configs, tokenizers and the noise schedule"),
    **_same("module_list register_modules", "pipe.model holds configs, tokenizers and the noise schedule"),
    **_same("vae_scale_factor", "pipe.model.vae.factor"),
    **_same("push_to_hub", "write pipe.save(folder), then huggingface_hub.upload_folder"),
    **_same("jit apply init", "the pipeline compiles by itself; docs/under-the-pipeline.md has its functions"),
    **_same("generate txt2img text2img text_to_image", "call the pipeline: pipe('a red apple')"),
    **_same("img2img", "call the pipeline: pipe('a fox', image=photo, strength=0.6)"),
    **_same("inpaint", "call the pipeline: pipe('a fox', image=photo, mask=mask)"),
    **_renamed("save_pretrained", "save"),
}  # fmt: skip
"""Attributes and methods of a pipeline."""

ASSIGNED: dict[str, Familiar] = {
    **ATTRIBUTES,
    **_same("safety_checker", "there is none without canvax.load(model, safety_checker=True): drop this line"),
    **_same("_interrupt", "return False from the callback, which stops the run"),
}
"""What is assigned to a pipeline."""

FLAGS: dict[str, Familiar] = {
    **_same("lora-model lora-weights lora-paths lora-scales lora-scale", "write --lora FILE:0.8"),
    **_same("lora-model-dir", "write --lora-dir FOLDER"),
    **_same("controlnet-model t2i-adapter adapter", "write --controlnet NET --control IMAGE"),
    **_same("controlnet-conditioning-scale control-weight", "write --control-scale"),
    **_same("guess-mode", "write --control-mode guess"),
    **_same("image-path img2img", "write --image FILE --strength 0.6"),
    **_same("inpaint", "write --image FILE --mask FILE"),
    **_same("embeddings embeddings-dir embd-dir textual-inversion", "write --embedding FILE, once for each"),
    **_same("ip-adapter-image ip-adapter-scale", "write --ip-image FILE:0.6"),
    **_same("ip-adapter-masks ip-adapter-mask", "write --ip-mask FILE, once for each --ip-image"),
    **_same("device gpu cuda cpu use-cpu platform", "the variable JAX_PLATFORMS chooses: JAX_PLATFORMS=cpu canvax ..."),
    **_same("fp16 half precision no-half", "write --dtype float16 (or bfloat16, float32)"),
    **_same("bf16", "write --dtype bfloat16"),
    **_same("fp32 full-precision no-half-vae", "write --dtype float32"),
    **_same("lowvram medvram offload cpu-offload", "write --quantize int8, --vae-tiling on or a smaller --batch-size"),
    **_same("xformers flash-attention opt-sdp-attention attention-slicing sdp",
            "attention never holds all its scores: leave it out"),
    **_same("jpg jpeg webp png format extension", "the name chooses: -o cat.png, -o cat.jpg or -o cat.webp"),
    **_same("size resolution", "write --width 512 --height 512"),
    **_same("ckpt checkpoint safetensors ckpt-dir", "write --model with a folder in the diffusers layout or a Hub id"),
    **_same("v-parameterization v-pred parameterization", "write --prediction-type v_prediction"),
    **_same("taesd tae", "write --vae madebyollin/taesd, or taesdxl"),
    **_same("no-safety-checker nsfw disable-nsfw-checker", "no safety checker is used unless --safety-checker says so"),
    **_same("watermark add-watermark invisible-watermark", _NO_WATERMARK),
    **_same("outdir out outpath output-dir save-path", "write --output FOLDER"),
    **_same("hires-fix", "write --hires 2"),
    **_same("ddim-eta", "write --eta"),
    **_same("image-strength denoise", "write --strength"),
    **_same("styles style style-preset", "canvax has no styles; write their words into the prompt"),
    **_same("pretrained-model-name-or-path model-id model-name", "write --model"),
    **_same("upscale upscaler", "write canvax upscale IMAGE, or --hires 2"),
    **_same("negative-prompt-file", 'a prompt file may hold them: {"prompt": "...", "negative_prompt": "..."}'),
    **_same("api listen port share", "write canvax serve, or canvax ui for the page"),
    **_same("karras", "write --sigmas karras, or a sampler such as 'DPM++ 2M Karras'"),
    **_same("torch-compile compile", "programs are always compiled and cached: leave it out"),
    **_same("ddim plms euler dpm", "write --sampler with its name; canvax samplers lists them"),
    **_same("n-iter n-samples batch-count", "write --num-images"),
    **_same("ddim-steps", "write --steps"),
    **_same("sampling-method", "write --sampler"),
    **_same("type", "write --quantize int8, or --dtype float16"),
    **_same("i", "write --image FILE --strength 0.6"),
    **_same("mixed-precision", "write --dtype bfloat16"),
    **_same("diffusion-model", "write --model"),
    **_same("ar aspect-ratio", "write --width 768 --height 432"),
    **_same("enable-model-cpu-offload enable-sequential-cpu-offload", "write --quantize int8 or a smaller batch"),
}  # fmt: skip
"""Flags of the command line, without their dashes."""

FLAGS_OF: dict[str, dict[str, Familiar]] = {
    "serve": {
        **_same("m model", "models have no flag here: write canvax serve emoji"),
        **_same("share", "no public address is made; --host 0.0.0.0 --keys FILE opens it to your network"),
    },
    "train": {
        **_same(
            "train-data-dir instance-data-dir dataset-name",
            "the folder of images has no flag: train lora IMAGES",
        ),
        **_same("num-train-epochs max-train-epochs epochs max-train-steps", "write --steps, updates of the weights"),
        **_same("train-batch-size", "write -b, images of all devices together"),
        **_same("gradient-accumulation-steps", "write --accumulate"),
        **_same("gradient-checkpointing", "write --remat"),
        **_same("lr-scheduler", "write --final-lr 0 for a cosine; else the rate is constant"),
        **_same("lr-warmup-steps", "write --warmup"),
        **_same("snr-gamma min-snr-gamma", "write --min-snr 5"),
        **_same("validation-prompt", "write --preview PROMPT"),
        **_same("report-to logging-dir", "write --tensorboard FOLDER"),
        **_same("network-dim lora-rank", "write --rank"),
        **_same("network-alpha lora-alpha", "write --alpha"),
        **_same("unet-lr learning-rate", "write --lr"),
        **_same("text-encoder-lr", "write --text-encoder --text-lr"),
        **_same("train-text-encoder", "write --text-encoder"),
        **_same("resume-from-checkpoint", "the same command goes on where it was stopped: leave it out"),
        **_same("checkpointing-steps save-every-n-epochs", "the state is written by itself: leave it out"),
        **_same("center-crop random-flip", "images are cropped by themselves; --flip mirrors them"),
        **_same("use-8bit-adam noise-offset", "canvax does not have it: docs/training.md"),
        **_same("save-precision", "write --save-dtype float16"),
        **_same("resolution", "write --size 512"),
    },
}
"""The same of single commands."""


def known_flag(command: str, flag: str, flags: Iterable[str]) -> str:
    """What to say of a ``flag`` that a ``command`` has not, which has ``flags``; empty where nothing is known of it."""
    name = flag.lstrip("-").lower().replace("_", "-")
    if entry := {**FLAGS, **FLAGS_OF.get(command, {})}.get(name):
        return entry.answer
    for table in (CALL, LOAD):  # of the Python calls, whose arguments are flags
        entry = table.get(flag.lstrip("-").replace("-", "_"))
        if entry and entry.becomes and (meant := f"--{entry.becomes.replace('_', '-')}") in set(flags):
            return f"write {meant}"
    return ""


def near_flag(command: str, flag: str) -> str:
    """The same of one that may be a slip of the fingers."""
    tables = {**FLAGS, **FLAGS_OF.get(command, {})}
    near = slip(flag.lstrip("-"), tables) if len(flag) > 6 else None
    return f"did you mean {f'--{near}'!r}? {tables[near].answer}" if near else ""


CLASSES = {
    "StableDiffusionPipeline": "write canvax.load(model)",
    "StableDiffusionXLPipeline": "write canvax.load(model)",
    "DiffusionPipeline": "write canvax.load(model)",
    "AutoPipelineForText2Image": "write canvax.load(model)",
    **dict.fromkeys(
        ("from_pretrained", "pipeline", "Pipeline", "generate", "txt2img", "text2img", "text_to_image", "img2img"),
        "write pipe = canvax.load(model), then pipe(prompt)",
    ),
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
    **_same("prompt", "write prompt_ids=pipeline.prepare_inputs(prompt)"),
    **_same("negative_prompt neg_prompt", "write neg_prompt_ids=pipeline.prepare_inputs(negative_prompt)"),
    **_same("seed generator", "write prng_seed=jax.random.key(0); with jit=True jax.random.split of it, one for each "
            "device"),
    **_same("num_images_per_prompt", "write prepare_inputs([prompt] * n)"),
    **_same("image strength noise", "FlaxStableDiffusionImg2ImgPipeline has it, and canvax.load(model)"),
    **_same("mask masked_image", "FlaxStableDiffusionInpaintPipeline has it, and canvax.load(model) for any model"),
    **_same("controlnet_conditioning_scale", "FlaxStableDiffusionControlNetPipeline has it, and canvax.load(model, "
            "controlnet=...)"),
    **_same("sampler scheduler", "params['scheduler'] decides: FlaxDDIMScheduler.from_config(config).create_state()"),
    **_same("prompt_2 original_size crops_coords_top_left target_size callback callback_steps clip_skip "
            "guidance_rescale eta", "canvax.load(model) has it, and needs no device axis"),
}  # fmt: skip
"""Arguments of a call of a pipeline of :mod:`canvax.flax_api`."""

FLAX_LOAD: dict[str, Familiar] = {
    **{name: entry for name, entry in LOAD.items() if not entry.becomes
       and name not in ("from_pt", "use_memory_efficient_attention")},
    **_same("device device_map", "params wait in host memory: replicate(params, devices), or jax.device_put"),
    **_same("load_in_8bit load_in_4bit quantization_config", "canvax.load(model, quantize='int8') has it"),
    **_renamed("torch_dtype weights_dtype", "dtype"),
    **_renamed("use_auth_token", "token"),
    **_renamed("model model_id", "pretrained_model_name_or_path"),
    **_same("unet vae text_encoder text_encoder_2 tokenizer tokenizer_2 transformer", "load the whole model and put "
            "edited weights into params"),
    **_same("quantize mesh precision", "canvax.load(model) has it"),
    **_same("controlnet", "FlaxStableDiffusionControlNetPipeline takes it, and canvax.load(model, controlnet=...)"),
    **_same("jit", "it is an argument of a call: pipeline(..., jit=True)"),
}  # fmt: skip
"""Arguments of ``from_pretrained`` of a pipeline of :mod:`canvax.flax_api`."""

FLAX_ATTRIBUTES: dict[str, Familiar] = {
    **_same("init_weights init init_with_output bind", "weights come from from_pretrained; training is in "
            "docs/training.md"),
    **_same("to cuda cpu", "params go to the devices, not the pipeline: params = replicate(params); and their dtype is "
            "that of from_pretrained, dtype=jnp.bfloat16"),
    **_same("to_bf16 to_fp16 to_fp32", "write dtype= in from_pretrained, or jax.tree.map(lambda x: "
            "x.astype(jnp.bfloat16), params)"),
    **_same("components register_modules", "unet, vae, text_encoder, tokenizer and scheduler are attributes"),
    **_same("config", "pipeline.unet.config and so on; pipeline.model.files.index is model_index.json"),
    **_same("dtype", "the dtype is that of params"),
    **_same("text_encoder_2 tokenizer_2", "this model has one text encoder"),
    **_same("safety_checker feature_extractor", "the pipeline has it, pipeline.safety_checker"),
    **_same("progress_bar set_progress_bar_config", "there is none: drop this line"),
    **_same("prepare_text_inputs", "write prepare_inputs"),
    **_same("prepare_image_inputs controlnet", "FlaxStableDiffusionControlNetPipeline has it"),
    **_same("get_timestep_start", "pass strength= to a call of FlaxStableDiffusionImg2ImgPipeline"),
    **_same("push_to_hub", "write save_pretrained(folder, params), then huggingface_hub.upload_folder"),
    **_same("load_lora_weights", "pipe = canvax.load(model) has it, which keeps its weights: pipe.adapters.load"),
    **_same("load_textual_inversion", "pipe = canvax.load(model) has it: pipe.adapters.load_embedding"),
    **_same("enable_xformers_memory_efficient_attention enable_attention_slicing",
            "attention never holds all its scores: drop this line"),
    **_same("get_velocity common", "canvax.samplers has the noise schedule: pipeline.model.scheduler.schedule"),
    **_same("timesteps init_noise_sigma", "the state has it: scheduler.set_timesteps(state, steps, latents.shape)"),
    **_same("batch_decode decode encode_plus", "pipeline.model.tokenizers has the tokenizers; backend.decode(ids)"),
}  # fmt: skip
"""Attributes of a pipeline of :mod:`canvax.flax_api`, its parts and its schedulers."""

_PARAMS = "FlaxStableDiffusionPipeline.from_pretrained gives pipeline.{0} and params['{0}']"
_STATE = "write pipe(prompt, sampler='{}') with pipe = canvax.load(model)"

FLAX: dict[str, Familiar] = {
    **_same("FlaxUNet2DConditionModel", _PARAMS.format("unet")),
    **_same("FlaxAutoencoderKL", _PARAMS.format("vae")),
    **_same("FlaxCLIPTextModel FlaxCLIPTextModelWithProjection", _PARAMS.format("text_encoder")),
    **_same("CLIPTokenizer", "pipeline.tokenizer is one"),
    **_same("FlaxDiffusionPipeline", "write FlaxStableDiffusionPipeline or FlaxStableDiffusionXLPipeline"),
    **_same("FlaxLMSDiscreteScheduler", _STATE.format("LMS")),
    **_same("FlaxKarrasVeScheduler", _STATE.format("Heun Karras")),
    **_same("FlaxScoreSdeVeScheduler", _STATE.format("Euler a")),
    **_same("FlaxModelMixin FlaxSchedulerMixin FlaxKarrasDiffusionSchedulers", "there is no such base class"),
    **_same("CLIPImageProcessor CLIPFeatureExtractor", "pipeline.feature_extractor is one"),
    **_same("jax_utils", "replicate and unreplicate are in canvax.flax_api itself"),
}  # fmt: skip
"""Names looked for in the module :mod:`canvax.flax_api`."""


def answer(name: str, table: Mapping[str, Familiar], known: Iterable[str], kind: str, page: str = PAGE) -> str:
    """What to say of a ``kind`` that is not there: its answer, or the nearest of ``known``."""
    if entry := table.get(name):
        return f"{name}: {entry.answer or f'write {entry.becomes}'} ({page})"
    public = [one for one in (*known, *table) if not one.startswith("_")]
    return f"{name[:80]!r} is not {kind}; {did_you_mean(name, public) or f'see {page}'}"


class Both(tuple[Any, ...]):
    """What ``from_pretrained`` gives, two things as in diffusers' Flax; who takes them for one is told."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise InputError(_BOTH)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("_") else f"{name}: {_BOTH}")


_BOTH = "from_pretrained gives two things: pipeline, params = ...from_pretrained(...); canvax.load gives one pipeline"


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


def accepts(translate: Translate, check: Callable[[str, Any], None] | None = None) -> Callable[[F], F]:
    """A decorator: a call with keywords that a function does not name goes through ``translate`` first.

    ``check`` is given the name and the value of each argument before that.
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
            own, finish = translate(own, others)
            result = inner(**own)
            return finish(result) if finish else result

        return call  # type: ignore[return-value]

    return decorate


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


def tables() -> str:
    """All names as Markdown, which ``docs/coming-from-diffusers.md`` ends with."""
    return _tables(
        ("Arguments of a call", CALL, ""),
        ("Arguments of `canvax.load`", LOAD, ""),
        ("Attributes and methods of a pipeline", ATTRIBUTES, "."),
        ("Flags of the command line", FLAGS, "--"),
    )


def flax_tables() -> str:
    """All names of :mod:`canvax.flax_api`, which ``docs/migrating-from-diffusers-flax.md`` ends with."""
    return _tables(
        ("Names of the module", FLAX, ""),
        ("Arguments of a call", FLAX_CALL, ""),
        ("Arguments of `from_pretrained`", FLAX_LOAD, ""),
        ("Attributes and methods", FLAX_ATTRIBUTES, "."),
    )


def _tables(*all_of_them: tuple[str, Mapping[str, Familiar], str]) -> str:
    parts = []
    for title, table, prefix in all_of_them:
        names: dict[str, list[str]] = {}
        for name, entry in table.items():
            said = entry.answer or f"the same as `{entry.becomes}`"
            names.setdefault(said, []).append(f"`{prefix}{name}`")
        rows = [f"| {', '.join(group)} | {said} |" for said, group in names.items()]
        parts.append("\n".join([f"### {title}", "", "| name | canvax |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"
