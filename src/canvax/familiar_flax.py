"""Names of diffusers' Flax pipelines beyond those that :mod:`canvax.flax_api` has; see ``canvax.familiar``."""

from __future__ import annotations

from canvax.familiar import LOAD, Familiar, as_markdown, renamed_to, same

FLAX_CALL: dict[str, Familiar] = {
    **renamed_to("steps", "num_inference_steps"),
    **renamed_to("cfg_scale guidance", "guidance_scale"),
    **renamed_to("negative_prompt_ids negative_ids", "neg_prompt_ids"),
    **renamed_to("rng key", "prng_seed"),
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
    **renamed_to("torch_dtype weights_dtype", "dtype"),
    **renamed_to("use_auth_token", "token"),
    **renamed_to("model model_id", "pretrained_model_name_or_path"),
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


def flax_tables() -> str:
    """All names of :mod:`canvax.flax_api`, which ``docs/migrating-from-diffusers-flax.md`` ends with."""
    return as_markdown(
        ("Names of the module", FLAX, ""),
        ("Arguments of a call", FLAX_CALL, ""),
        ("Arguments of `from_pretrained`", FLAX_LOAD, ""),
        ("Attributes and methods", FLAX_ATTRIBUTES, "."),
    )
