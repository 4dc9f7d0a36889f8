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

from canvax.checked import placed, refuse_deleted, shown
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


def renamed_to(names: str, becomes: str) -> dict[str, Familiar]:
    """Another name for several, parted by spaces."""
    return {name: Familiar(becomes=becomes) for name in names.split()}


CALL: dict[str, Familiar] = {
    **renamed_to("steps sampling_steps num_steps n_steps sample_steps ddim_steps diffusion_steps inference_steps "
            "num_iterations", "num_inference_steps"),
    **renamed_to("cfg cfg_scale guidance scale txt_cfg cfg_weight unconditional_guidance_scale", "guidance_scale"),
    **renamed_to("n num_images n_images n_samples num_samples num_outputs n_iter batch_size "
            "batch_count", "num_images_per_prompt"),
    **renamed_to("positive positive_prompt prompts text_prompt", "prompt"),
    **renamed_to("negative uc neg_prompt negative_prompts negative_text", "negative_prompt"),
    **renamed_to("scheduler sampler_name scheduler_name sampler_index sampler_type sampling_method sample_method "
            "scheduler_type", "sampler"),
    **renamed_to("random_seed manual_seed noise_seed seed_value random_state", "seed"),
    **renamed_to("H image_height img_height", "height"),
    **renamed_to("W image_width img_width", "width"),
    **renamed_to("init_image input_image img init_img init_images images", "image"),
    **renamed_to("mask_image mask_img inpaint_mask", "mask"),
    **renamed_to("denoising_strength denoise prompt_strength noise_strength", "strength"),
    **same("image_strength init_image_strength", "write strength=0.6, how much is changed; some programs count the "
            "other way round, how much is kept"),
    **same("timestep_spacing", "write spacing='trailing', or 'leading' or 'linspace'"),
    **same("use_karras_sigmas", "write sigmas='karras', or sampler='DPM++ 2M Karras'"),
    **same("iterations", "write num_inference_steps=20, or num_images_per_prompt=4 for more images"),
    **same("output output_path output_dir output_file outpath filename save_path outdir save save_to save_dir "
            "file_path "
            "filename_prefix save_images output_format output_quality output_compression",
            "a call writes no file: write pipe(prompt).save('cat.png')"),
    **same("model model_path model_name ckpt ckpt_name checkpoint sd_model_checkpoint unet_name", "the model is "
            "chosen by loading it: pipe = canvax.load('owner/name')"),
    **same("styles style style_preset", "canvax has no styles; write their words into the prompt"),
    **same("lora loras strength_model strength_clip lora_name lora_path lora_paths lora_scales lora_weight "
            "lora_weights "
            "lora_strength",
            "write pipe.adapters.load('name', file, weight=0.8) before the call"),
    **renamed_to("control_image controlnet_image adapter_image", "control"),
    **renamed_to("controlnet_conditioning_scale adapter_conditioning_scale control_weight control_strength "
            "controlnet_scale controlnet_strength controlnet_weight", "control_scale"),
    **renamed_to("control_guidance_start guidance_start start_percent", "control_start"),
    **renamed_to("control_guidance_end guidance_end adapter_conditioning_factor end_percent", "control_end"),
    **same("ip_adapter_scale ip_adapter_masks ip_adapter_strength ip_adapter_weight reference_image "
            "style_image", "write image_prompt=canvax.ImagePrompt(photo, scale=0.6, mask=mask)"),
    **same("cross_attention_kwargs lora_scale", "a LoRA's weight is the pipeline's, "
            "pipe.adapters.set({'name': 0.8}), or an image's, adapters={'name': 0.8}"),
    **same("callback_steps", "options.callback is called after each evaluation of the network"),
    **same("sag_scale", "canvax has no self-attention guidance; pag_scale=3 is near to it"),
    **renamed_to("hr_scale hires_scale", "hires"),
    **renamed_to("hr_second_pass_steps", "hires_steps"),
    **renamed_to("hr_sampler_name", "hires_sampler"),
    **renamed_to("hr_prompt", "hires_prompt"),
    **renamed_to("hires_denoise hrf_strength", "hires_strength"),
    **same("hr_upscaler", "write hires_method='pixel' or 'latent'"),
    **same("hr_resize_x hr_resize_y firstphase_width firstphase_height", "write width= and height= of the first pass, "
            "and hires=2 for how many times larger the second is"),
    **same("hr_negative_prompt hr_scheduler hr_checkpoint_name", "the second pass has that of the first"),
    **renamed_to("cfg_rescale rescale_cfg", "guidance_rescale"),
    **same("upscale upscale_factor", "write hires=2, with hires_strength=0.4; or pipe.upscale(image)"),
    **same("enable_hr hires_fix hrf_enabled", "write hires=2, with hires_strength=0.4"),
    **renamed_to("subseed", "variation_seed"),
    **renamed_to("subseed_strength variation_amount", "variation_strength"),
    **same("width_height size image_size resolution aspect_ratio aspect ar dims", "write height=512, width=512"),
    **same("rng rng_key prng_seed key", "write seed=1, a whole number; or latents=jax.random.normal(key, (B, h, w, "
            "C))"),
    **renamed_to("ddim_eta", "eta"),
    **renamed_to("x_T diffusion_noise latent_image", "latents"),
    **renamed_to("cfg_interval", "guidance_interval"),
    **renamed_to("pag pag_weight", "pag_scale"),
    **same("CLIP_stop_at_last_layers clip_stop_at_last_layers stop_at_clip_layer", "write clip_skip=1: so "
            "many "
            "last layers are left out, one less than A1111 counts"),
    **same("inpainting_fill masked_content", "write mask_fill='original', 'fill', 'noise' or 'nothing'"),
    **same("inpaint_full_res inpaint_full_res_padding", "write padding_mask_crop=32, pixels around the mask"),
    **same("inpainting_mask_invert mask_invert invert_mask", "white in the mask is generated; give mask=255 - mask"),
    **same("mask_blur_x mask_blur_y", "write mask_blur=4"),
    **same("restore_faces face_restoration", "canvax restores no faces"),
    **same("override_settings script_name script_args alwayson_scripts", "what they say is arguments of the call, such "
            "as clip_skip=1"),
    **same("refiner refiner_checkpoint refiner_model refiner_steps refiner_switch_at refine high_noise_frac "
            "start_at_step "
            "end_at_step add_noise return_with_leftover_noise", "write denoising_end=0.8, and give result.latents "
            "to the "
            "second call or pipeline with denoising_start=0.8"),
    **same("vae_name sd_vae", "it belongs to the model: canvax.load(model, vae=...)"),
    **same("control_net control_net_name", "it belongs to the model: canvax.load(model, controlnet=...)"),
    **same("seamless seamless_x seamless_y", "canvax makes no seamless textures"),
    **same("quality response_format user moderation background", "it belongs to the server's API, docs/serving.md: "
            "leave it out"),
    **same("stylize chaos weird niji sref cref", "it is Midjourney's; guidance_scale= and variation_strength= are "
            "near"),
    **same("image_url mask_url", "no address is fetched: open the image, and write image=photo"),
    **same("apply_watermark", NO_WATERMARK),
    **same("disable_safety_checker enable_safety_checker nsfw_filter nsfw",
            "canvax.load(model, safety_checker=True) decides; without it there is none"),
    **same("original_width original_height target_width target_height crop_x crop_y crop_w crop_h",
            "write original_size=(h, w), target_size=(h, w) or crops_coords_top_left=(0, 0)"),
    **same("verbose show_progress progress_bar disable_progress_bar quiet", "write progress=False"),
    **same("callback_fn on_step step_callback", "write callback=function, which is called with a canvax.Step"),
    **same("return_type as_numpy as_pil return_latents", "write output_type='np', or read result.pixels and "
            "result.latents"),
    **same("fp16 half bf16 mixed_precision", "it belongs to the model: canvax.load(model, dtype='bfloat16')"),
    **same("jit pmap parallel replicate shard", "a call compiles and uses all devices by itself: leave it out"),
    **same("prompt_ids neg_prompt_ids attention_mask conditioning unconditional_conditioning encoded_text",
            "give the text; or what pipe.encode gives, as prompt= and negative_prompt="),
    **same("tiled tile_size tile_overlap vae_tiling", "write tiling='on'; large images are decoded in tiles by "
            "themselves"),
    **same("deepcache token_merging token_merging_ratio tome hypertile", "write reuse=2, which saves more"),
    **same("align_your_steps ays schedule schedule_type noise_schedule karras", "write sigmas='ays', 'karras', ..."),
    **same("s_churn s_tmin s_tmax s_noise rho sigma_min sigma_max solver_order algorithm_type",
            "write sampler_settings={'s_noise': 1.003}; canvax samplers lists what each has"),
    **same("skip_steps t_enc t_start", "write strength=0.6, how much of the run is done"),
    **same("dynamic_thresholding", "write guidance_method='threshold'"),
    **same("weight weights prompt_weight prompt_weights", "weights stand in the prompt: prompt_syntax='a1111', and "
            "(word:1.2)"),
    **same("image_guidance_scale image_cfg_scale", NOT_HERE.format("InstructPix2Pix")),
    **same("prompt_3 negative_prompt_3 skip_guidance_layers", NOT_HERE.format("Stable Diffusion 3")),
    **same("true_cfg_scale joint_attention_kwargs", NOT_HERE.format("FLUX")),
    **same("max_sequence_length", "CLIP's text encoders read 77 tokens"),
}  # fmt: skip
"""Arguments of a call. The fields of ``canvax.Options`` are arguments as well."""

LOAD: dict[str, Familiar] = {
    **renamed_to("torch_dtype weights_dtype", "dtype"),
    **renamed_to("use_auth_token", "token"),
    **renamed_to("pretrained_model_name_or_path model_id", "model"),
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
    **renamed_to("controlnets control_net t2i_adapter", "controlnet"),
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
    **same("to cuda cpu half float double bfloat16 fp16 bf16 xpu to_empty", "weights are placed and cast while "
            "loading: drop this line, or write dtype= and "
            "mesh= in canvax.load"),
    **same("enable_attention_slicing disable_attention_slicing enable_xformers_memory_efficient_attention "
            "disable_xformers_memory_efficient_attention set_use_memory_efficient_attention_xformers",
            "attention never holds all its scores: drop this line"),
    **same("enable_vae_tiling disable_vae_tiling", "pass tiling='on' to a call; large images are tiled by themselves"),
    **same("enable_vae_slicing disable_vae_slicing", "batches are decoded in parts by themselves: drop this line"),
    **same("eval requires_grad_ zero_grad no_grad share_memory fuse_qkv_projections unfuse_qkv_projections",
            "there is nothing to switch: drop this line"),
    **same("train training", "canvax train lora, dreambooth, finetune ... train: docs/training.md"),
    **same("parameters named_parameters buffers modules children state_dict",
            "weights are pipe.params, arrays by component and name"),
    **same("load_state_dict load_config", "give weights to a call, pipe(prompt, params=weights)"),
    **same("get_timesteps prepare_latents prepare_extra_step_kwargs prepare_mask_latents decode_latents upcast_vae "
            "forward",
            "docs/under-the-pipeline.md has the steps of a run as functions"),
    **same("enable_model_cpu_offload enable_sequential_cpu_offload enable_group_offload "
            "maybe_free_model_hooks", "canvax keeps a model on its devices; "
            "quantize='int8' or mesh=canvax.make_mesh(model=2) in canvax.load saves memory"),
    **same("enable_freeu disable_freeu", "pass freeu=(b1, b2, s1, s2) to a call"),
    **same("load_lora_weights load_lora_into_unet load_lora_adapter load_attn_procs load_lora add_lora",
            "write pipe.adapters.load('name', file_or_hub_id, weight=1.0)"),
    **same("set_adapters set_lora_device set_lora", "write pipe.adapters.set({'name': 0.8}), which leaves the "
            "others out"),
    **same("enable_lora_hotswap",
            "write pipe.adapters.beside(rank=16) and pipe.adapters.load('name', file, beside=True)"),
    **same("fuse_lora unfuse_lora", "adapters are merged into the weights, and come out to the "
            "last bit: drop this line; pipe.save writes a model with them in it"),
    **same("unload_lora_weights delete_adapters disable_lora enable_lora", "write pipe.adapters.remove('name'), or "
            "pipe.adapters.remove() for all; pipe.adapters.set({}) lets them rest"),
    **same("get_active_adapters get_list_adapters", "pipe.adapters lists them: dict(pipe.adapters)"),
    **same("load_textual_inversion load_embedding add_embedding", "write "
            "pipe.adapters.load_embedding(file_or_hub_id, token='word')"),
    **same("unload_textual_inversion", "write pipe.adapters.remove('word')"),
    **same("load_ip_adapter ip_adapter", "write pipe = pipe.with_ip_adapter(file), or "
            "('owner/name/folder/file.safetensors')"),
    **same("set_ip_adapter_scale", "the strength is in the call: image_prompt=canvax.ImagePrompt(photo, scale=0.6)"),
    **same("unload_ip_adapter", "a call without image_prompt uses none; pipe.with_ip_adapter(None) has none"),
    **same("prepare_ip_adapter_image_embeds encode_image_embeds", "pass the image: image_prompt=photo; or "
            "image_prompt=canvax.ImagePrompt(embeds=array)"),
    **same("set_progress_bar_config progress_bar", "pass progress=False to a call"),
    **same("encode_prompt", "pipe.encode(prompt) gives the conditions of a prompt"),
    **same("from_single_file from_ckpt", "canvax.load('model.safetensors') reads one: docs/loading.md#single-files"),
        **same("scheduler set_scheduler set_sampler", "the sampler is chosen in each call: sampler='Euler', or the "
            "name of a diffusers class"),
    **same("unet vae text_encoder text_encoder_2", "weights are pipe.params['unet'] and so on, configs "
            "pipe.model.unet and so on; docs/under-the-pipeline.md calls the networks"),
    **same("feature_extractor image_encoder", "pipe.safety_checker prepares images by itself"),
    **same("watermark", NO_WATERMARK),
    **same("samplers schedulers list_samplers", "canvax.samplers.SAMPLERS lists them, and canvax samplers"),
    **same("load_controlnet add_controlnet set_controlnet", "write pipe = pipe.with_controlnet(net)"),
    **same("unload delete close free clear", "write del pipe, which frees its memory"),
    **same("disable_safety_checker run_safety_checker", "canvax.load(model, safety_checker=True) decides"),
    **same("warmup warm_up", "write pipe.compile(512, 512)"),
    **same("set_seed", "write pipe(prompt, seed=1)"),
    **same("save_image show display history", "a call gives a result: result = pipe(prompt); result.save('cat.png')"),
    **same("interrogate caption", "canvax does not describe images"),
    **same("tokenize", "pipe.model.tokenizers has the tokenizers"),
    **same("prepare_inputs prepare_image_inputs shard replicate", "give the prompts and images themselves: drop this "
            "line; canvax.flax_api has it for old scripts"),
    **same("name_or_path", "pipe.model.name"),
    **same("components config configuration settings get_options", "pipe.model holds configs, tokenizers and the "
            "noise schedule"),
    **same("module_list register_modules", "pipe.model holds configs, tokenizers and the noise schedule"),
    **same("vae_scale_factor", "pipe.model.vae.factor"),
    **same("push_to_hub", "write pipe.save(folder), then huggingface_hub.upload_folder"),
    **same("jit apply init", "the pipeline compiles by itself; docs/under-the-pipeline.md has its functions"),
    **same("generate txt2img text2img text_to_image run predict sample infer inference", "call the pipeline: "
            "pipe('a red apple')"),
    **same("img2img", "call the pipeline: pipe('a fox', image=photo, strength=0.6)"),
    **same("inpaint", "call the pipeline: pipe('a fox', image=photo, mask=mask)"),
    **renamed_to("save_pretrained", "save"),
}  # fmt: skip
"""Attributes and methods of a pipeline."""

ASSIGNED: dict[str, Familiar] = {
    **ATTRIBUTES,
    **same("safety_checker", "canvax.load(model, safety_checker=...) decides, and without it there is none"),
    **same("_interrupt", "return False from the callback, which stops the run"),
}
"""What is assigned to a pipeline."""


def answer(
    name: str, table: Mapping[str, Familiar], known: Iterable[str], kind: str, page: str = PAGE, takes: str = ""
) -> str:
    """What to say of a ``kind`` that is not there: its answer, or the nearest of ``known``, or what it ``takes``."""
    if entry := table.get(name):
        return f"{name}: {entry.answer or f'write {entry.becomes}'} ({page})"
    public = [one for one in (*known, *table) if not one.startswith("_")]
    told = did_you_mean(name, public) or akin(name, known) or takes or f"see {page}"
    return f"{name[:80]!r} is not {kind}; {told}"


_SYNONYMS: dict[str, str] = {
    **dict.fromkeys(("inpaint", "inpainting"), "mask"),
    **dict.fromkeys(("denoise", "denoising"), "strength"),
    **dict.fromkeys(("ckpt", "checkpoint"), "model"),
    **{"hr": "hires", "cfg": "guidance", "scheduler": "sampler", "dir": "folder"},
}
_COMMON = {"use", "enable", "disable", "set", "get", "num", "max", "min", "from", "with", "the", "type", "name", "no"}


def akin(name: str, choices: Iterable[str]) -> str:
    """Which of ``choices`` share most words with an unknown ``name``; empty where none does."""
    wanted = _words(name)
    first = _words(re.split(r"(?<=\w)[_-]", name)[0])
    known = {one: _words(one) for one in choices if not one.startswith("_")}
    shared = {one: (len(wanted & words), bool(first & words)) for one, words in known.items() if wanted & words}
    best = [one for one, score in shared.items() if score == max(shared.values())]
    near = sorted(best, key=lambda one: len(known[one]))[:4]
    return f"near it {'is' if len(near) == 1 else 'are'} {', '.join(near)}" if near else ""


def _words(name: str) -> set[str]:
    """The words of a name in any spelling, and what they mean in canvax."""
    words: set[str] = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return {_SYNONYMS.get(word, word) for word in words if len(word) > 1} - _COMMON


_BOTH = "from_pretrained gives two things: pipeline, params = ...from_pretrained(...); canvax.load gives one pipeline"


class Both(NamedTuple):
    """What ``from_pretrained`` gives, two things as in diffusers' Flax; who takes them for one is told."""

    pipeline: Any
    params: Any

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise InputError(_BOTH)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("_") else f"{name}: {_BOTH}")


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
    left, given = {}, {}
    for name, value in others.items():
        target = table[name].becomes if name in table else ""
        if not target:
            left[name] = value
        elif own.get(target) is not None:
            first = _with_value(given.get(target, target), own[target])
            raise InputError(f"{_with_value(name, value)} and {first} both say {target}; give it once")
        else:
            own[target], given[target] = value, name
    return left


def _with_value(name: str, value: Any) -> str:
    return f"{name}={shown(value)}" if isinstance(value, str | int | float) else name


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
