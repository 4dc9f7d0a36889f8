"""Names from diffusers and A1111, with canvax's names or answers.

The tables serve calls, ``canvax.load``, attributes, :mod:`canvax.flax_api` and the migration pages, which show them. An
alias has ``becomes``; a name without a counterpart gets one sentence, its ``answer``. The tables hold the names of
scripts that people really migrate; for all others "did you mean" or the list of names is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, TypeVar, cast

from canvax.call import Call, OptionRecord
from canvax.errors import InputError, conflict, did_you_mean, shown, warn
from canvax.settings import aliases

PAGE = "docs/coming-from-diffusers.md"
FLAX_PAGE = "docs/migrating-from-diffusers-flax.md"
LESS_GUIDANCE = "for guidance that changes on the way write guidance_steps=[7.5] * 20 + [1.0] * 30, one for each step"
NO_WATERMARK = "canvax adds no invisible watermark; docs/loading.md#watermarks says why"


class ForeignName(NamedTuple):
    """A foreign name: it means ``becomes``, or its user gets ``answer``."""

    answer: str = ""
    becomes: str = ""


def same(names: str, answer: str) -> dict[str, ForeignName]:
    """Give several names, separated by spaces, the same answer."""
    return {name: ForeignName(answer) for name in names.split()}


def renamed_to(names: str, becomes: str) -> dict[str, ForeignName]:
    """Rename several names, separated by spaces, to another."""
    return {name: ForeignName(becomes=becomes) for name in names.split()}


CALL: dict[str, ForeignName] = {
    **{name: ForeignName(becomes=becomes) for name, becomes in aliases(Call, OptionRecord).items()},
    **same("timestep_spacing", "write spacing='trailing', or 'leading' or 'linspace'"),
    **same("use_karras_sigmas", "write sigmas='karras', or sampler='DPM++ 2M Karras'"),
    **same("cross_attention_kwargs lora loras lora_scale",
           "load a LoRA before the call: pipe.adapters.load('name', file, weight=0.8)"),
    **same("ip_adapter_scale ip_adapter_masks", "write image_prompt=canvax.ImagePrompt(photo, scale=0.6, mask=mask)"),
    **same("enable_hr", "write hires=2, hires_strength=0.4"),
    **same("inpainting_fill", "write mask_fill='original', 'fill', 'noise' or 'nothing'"),
    **same("inpaint_full_res inpaint_full_res_padding", "write padding_mask_crop=32, in pixels around the mask"),
    **same("CLIP_stop_at_last_layers", "write clip_skip=1: the number of last layers to skip, one less than in A1111"),
    **same("refiner high_noise_frac", "write denoising_end=0.8, then denoising_start=0.8 with latents=result.latents"),
    **same("output output_path outdir", "a call writes no file: write pipe(prompt).save('cat.png')"),
    **same("size", "write height=512, width=512"),
    **same("max_sequence_length", "drop it: a prompt is read whole, up to the tokens that the model was trained for"),
    **same("prng_seed rng key", "write seed=1, an integer"),
    **same("callback_steps", "drop it: the callback is called after each evaluation, and may look at step.index % 5"),
}  # fmt: skip
"""Arguments of a call. The fields of ``canvax.Options`` are arguments as well."""

LOAD: dict[str, ForeignName] = {
    **renamed_to("torch_dtype", "dtype"),
    **renamed_to("use_auth_token", "token"),
    **renamed_to("pretrained_model_name_or_path model_id", "model"),
    **renamed_to("t2i_adapter", "controlnet"),
    **same("device device_map", "canvax uses all devices that JAX sees; JAX_PLATFORMS=cpu or "
            "mesh=canvax.make_mesh(jax.devices()[:1]) chooses"),
    **same("unet tokenizer_2",
            "load the whole model and pass edited weights with params=; see docs/pipeline.md"),
    **same("subfolder", "pass the folder that holds model_index.json"),
    **same("sampler", "write pipe(prompt, sampler='Euler'), or scheduler= for a scheduler or fields of its config"),
    **same("custom_pipeline trust_remote_code", "canvax runs no code from a repository"),
    **same("from_flax from_pt", "safetensors and Flax's msgpack are both read; leave it out"),
    **same("quantization_config load_in_8bit", "write quantize='int8' or quantize='float8'"),
    **same("add_watermarker", NO_WATERMARK),
}  # fmt: skip
"""Arguments of ``canvax.load``."""

SAVE: dict[str, ForeignName] = {
    **renamed_to("save_directory", "folder"),
    **same("variant", "write dtype='float16'; names of files have no variant"),
    **same("push_to_hub repo_id", "save to a folder, then upload it: hf upload owner/name folder"),
}
"""Arguments of ``save``."""

TRAIN: dict[str, ForeignName] = renamed_to("save_every_n_epochs", "save_every")
"""Flags of ``canvax train`` that are not among its aliases."""

HARMLESS: dict[str, tuple[object, ...]] = {
    "feature_extractor": (None,),
    "image_encoder": (None,),
    "requires_safety_checker": (False, None),
    "use_safetensors": (True, None),
    "safe_serialization": (True, None),
    "low_cpu_mem_usage": (True, False, None),
    "add_watermarker": (False, None),
    "device_map": (None,),
}
"""Arguments of ``canvax.load`` and ``save`` that have no effect with these values: canvax works so anyway."""

ATTRIBUTES: dict[str, ForeignName] = {
    **same("to cuda half", "weights are placed and cast while loading: drop this line, or write dtype= and mesh= in "
            "canvax.load"),
    **same("enable_attention_slicing enable_xformers_memory_efficient_attention enable_vae_slicing "
            "disable_attention_slicing disable_xformers_memory_efficient_attention disable_vae_slicing upcast_vae "
            "maybe_free_model_hooks",
            "attention and the decoder already work in parts, and in float32 where they must: drop this line"),
    **same("enable_vae_tiling disable_vae_tiling", "pass tiling='on' or 'off' to a call; 'auto' tiles large images"),
    **same("enable_model_cpu_offload enable_sequential_cpu_offload enable_group_offload",
            "pass offload=True or 'layers' to canvax.load; "
            "quantize='int8' or mesh=canvax.make_mesh(model=2) saves memory as well"),
    **same("enable_freeu", "canvax has no FreeU: drop this line"),
    **same("load_lora_weights load_lora_adapter", "write pipe.adapters.load('name', file_or_hub_id, weight=1.0)"),
    **same("set_adapters", "write pipe.adapters.set({'name': 0.8}), which switches the others off"),
    **same("fuse_lora unfuse_lora", "adapters are merged into the weights: drop this line; pipe.save writes them"),
    **same("unload_lora_weights delete_adapters disable_lora", "write pipe.adapters.remove('name'), or "
            "pipe.adapters.set({}) to switch all off"),
    **same("get_active_adapters get_list_adapters", "pipe.adapters lists them: dict(pipe.adapters)"),
    **same("load_textual_inversion", "write pipe.adapters.load_embedding(file_or_hub_id, token='word')"),
    **same("load_ip_adapter", "write pipe = pipe.with_ip_adapter(file)"),
    **same("set_ip_adapter_scale", "write image_prompt=canvax.ImagePrompt(photo, scale=0.6) in the call"),
    **same("set_progress_bar_config", "pass progress=False to a call"),
    **same("encode_prompt", "pipe.encode(prompt) returns the conditions of a prompt"),
    **same("from_single_file", "canvax.load('model.safetensors') reads single files: docs/loading.md#single-files"),
    **same("scheduler", "the sampler is chosen in each call: sampler='Euler', or the name of a diffusers class"),
    **same("vae", "weights are pipe.params['vae'], and pipe.decode and pipe.encode_image call it; drop enable_slicing, "
            "and for enable_tiling pass tiling='on' to a call"),
    **same("vae_scale_factor", "write pipe.model.vae.factor"),
    **same("image_processor", "calls take and give PIL images and arrays; pipe.encode_image makes latents of an image, "
            "pipe.decode images of latents"),
    **same("num_timesteps", "write callback= instead of callback_on_step_end=: its step has index and total"),
    **same("unet text_encoder text_encoder_2", "weights are pipe.params['unet'] and so on; "
            "docs/under-the-pipeline.md calls the networks"),
    **same("watermark", NO_WATERMARK),
    **same("components config", "pipe.model holds configs, tokenizers and the noise schedule"),
    **same("generate", "call the pipeline: pipe('a red apple')"),
    **renamed_to("save_pretrained", "save"),
}  # fmt: skip
"""Attributes and methods of a pipeline."""

ASSIGNED: dict[str, ForeignName] = {
    **ATTRIBUTES,
    **same("safety_checker", "canvax.load(model, safety_checker=True) decides; the default is none"),
    **same(
        "_interrupt",
        "return False from the callback, which raises canvax.Cancelled; denoising_end=0.5 in the "
        "call stops there and keeps the latents",
    ),
    **same("_guidance_scale", LESS_GUIDANCE),
}
"""Attributes that other programs assign to a pipeline."""

FLAX_CALL: dict[str, ForeignName] = {
    **same("prompt", "write prompt_ids=pipeline.prepare_inputs(prompt)"),
    **same("negative_prompt", "write neg_prompt_ids=pipeline.prepare_inputs(negative_prompt)"),
    **same("seed generator", "write prng_seed=jax.random.key(0); with jit=True jax.random.split of it, one for each "
            "device"),
    **same("num_images_per_prompt", "write prepare_inputs([prompt] * n)"),
    **same("image strength", "FlaxStableDiffusionImg2ImgPipeline has it, and canvax.load(model)"),
    **same("mask", "FlaxStableDiffusionInpaintPipeline has it, and canvax.load(model) for any model"),
    **same("scheduler", "params['scheduler'] decides: FlaxDDIMScheduler.from_config(config).create_state()"),
}  # fmt: skip
"""Arguments of a call of a pipeline of :mod:`canvax.flax_api`."""

FLAX_LOAD: dict[str, ForeignName] = {
    **{name: entry for name, entry in LOAD.items() if not entry.becomes and name != "from_pt"},
    **same("device device_map", "params wait in host memory: replicate(params, devices), or jax.device_put"),
    **same("controlnet", "FlaxStableDiffusionControlNetPipeline takes it, and canvax.load(model, controlnet=...)"),
    **same("unet text_encoder text_encoder_2 tokenizer tokenizer_2", "load the whole model and put edited weights into "
            "params"),
    **renamed_to("torch_dtype", "dtype"),
    **renamed_to("use_auth_token", "token"),
}  # fmt: skip
"""Arguments of ``from_pretrained`` of a pipeline of :mod:`canvax.flax_api`."""

FLAX_ATTRIBUTES: dict[str, ForeignName] = {
    **same("to", "params go to the devices, not the pipeline: params = replicate(params)"),
    **same("init_weights", "weights come from from_pretrained; docs/training.md is about training"),
    **same("get_timestep_start", "pass strength= to a call of FlaxStableDiffusionImg2ImgPipeline"),
}
"""Attributes of a pipeline of :mod:`canvax.flax_api`, its parts and its schedulers."""

_PARAMS = "FlaxStableDiffusionPipeline.from_pretrained returns pipeline.{0} and params['{0}']"

FLAX: dict[str, ForeignName] = {
    **same("FlaxUNet2DConditionModel", _PARAMS.format("unet")),
    **same("FlaxAutoencoderKL", _PARAMS.format("vae")),
    **same("FlaxCLIPTextModel FlaxCLIPTextModelWithProjection", _PARAMS.format("text_encoder")),
    **same("FlaxDiffusionPipeline", "write FlaxStableDiffusionPipeline or FlaxStableDiffusionXLPipeline"),
    **same("FlaxLMSDiscreteScheduler", "write pipe(prompt, sampler='LMS') with pipe = canvax.load(model)"),
    **same("FlaxKarrasVeScheduler FlaxScoreSdeVeScheduler", "not supported: no released model uses it"),
    **same("jax_utils", "replicate and unreplicate are in canvax.flax_api itself"),
}
"""Names looked for in the module :mod:`canvax.flax_api`."""


NAMES: dict[str, ForeignName] = {
    **same("ControlNetModel ControlNetUnionModel MultiControlNetModel T2IAdapter MultiAdapter",
           "write canvax.load(model, controlnet=name), with a folder or Hub id or a list of them"),
    **same("AutoencoderKL AutoencoderTiny", "write canvax.load(model, vae=name), with a folder or Hub id"),
    **same("UNet2DConditionModel", "load the whole model; pipe.denoiser calls it, and edited weights go into params="),
    **same("load_image", "pass the path of a file: image='photo.png'"),
    **same("make_image_grid", "write from canvax.images.grid import make_grid: make_grid(images, rows=2)"),
}  # fmt: skip
"""Names of diffusers, besides its pipelines and schedulers, that users may look for in ``canvax``."""


def missing_class(name: str) -> str | None:
    """Return the answer for a name of diffusers that ``canvax`` does not have; None for other names."""
    if name in NAMES:
        return f"{name}: {NAMES[name].answer} ({PAGE})"
    if name in FLAX:
        return f"{name}: {FLAX[name].answer} ({FLAX_PAGE})"
    if name.startswith("Flax"):
        return f"write from canvax.flax_api import {name} ({FLAX_PAGE})"
    if name.endswith("Scheduler"):
        return f"write sampler={name!r} in a call"
    if name.endswith("Pipeline") or name.startswith("AutoPipeline"):
        return f"{name}: write canvax.load(model), one pipeline for all tasks ({PAGE})"
    return None


def no_such_name(module: str, name: str, message: str) -> Exception:
    """Return the error for a missing name. ``from canvax import NAME`` hides the text of an AttributeError."""
    imports = sys._getframe(2).f_code.co_name == "_handle_fromlist"  # it asks before it looks for a submodule
    return (ImportError if imports and find_spec(f"{module}.{name}") is None else AttributeError)(message)


def answer(
    name: str, table: Mapping[str, ForeignName], known: Iterable[str], kind: str, page: str = PAGE, takes: str = ""
) -> str:
    """Return a clause about an unknown ``name``: its answer, the nearest of ``known``, or what a ``kind`` ``takes``."""
    if entry := table.get(name):
        return f"{name}: {entry.answer or f'write {entry.becomes}'} ({page})"
    public = [known_name for known_name in (*known, *table) if not known_name.startswith("_")]
    return f"{name[:80]!r} is not {kind}; {did_you_mean(name, public) or takes or f'see {page}'}"


_BOTH = "from_pretrained gives two things: pipeline, params = ...from_pretrained(...); canvax.load gives one pipeline"


class Both(NamedTuple):
    """The pair that ``from_pretrained`` returns, as in diffusers' Flax. Calling it raises an error that says so."""

    pipeline: Any
    params: Any

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise InputError(_BOTH)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("_") else f"{name}: {_BOTH}")


F = TypeVar("F", bound=Callable[..., Any])
Translate = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
"""A function from the known and the other keywords of a call to those to call with."""


def accepts(
    translate: Translate,
    check: Callable[[str, Any], None] | None = None,
    table: Mapping[str, ForeignName] | None = None,
    *,
    by_place: bool = False,
) -> Callable[[F], F]:
    """Return a decorator that passes calls with unknown keywords through ``translate``.

    ``check`` gets the name and the value of each argument before that. Errors name an argument as the caller did, if
    ``table`` has its name. With ``by_place``, keyword-only arguments may still be positional, in the order of the
    signature, with a DeprecationWarning.
    """

    def decorate(function: F) -> F:
        form = signature(function)
        named = [name for name, parameter in form.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
        places = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in form.parameters.values())

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if by_place and places < len(arguments) <= len(named):
                late = dict(zip(named[places:], arguments[places:], strict=False))
                if twice := late.keys() & keywords.keys():
                    raise InputError(min(twice), "is given twice, by place and by name", cure="give it once")
                words = ", ".join(f"{name}={shown(value)}" for name, value in late.items())
                warn(f"arguments after {named[places - 1]} will be keywords only; write {words}", DeprecationWarning)
                arguments, keywords = arguments[:places], {**late, **keywords}
            for name, value in (*zip(named, arguments, strict=False), *keywords.items()) if check else ():
                check(name, value)  # type: ignore[misc]
            others = {name: value for name, value in keywords.items() if name not in named}
            if not others:
                return function(*arguments, **keywords)
            known = {name: value for name, value in keywords.items() if name in named}
            try:
                translated = translate(dict(form.bind_partial(*arguments, **known).arguments), others)
                if foreign := translated.keys() - {*named}:
                    raise InputError(min(foreign), f"is not an argument of {function.__name__}")
                return function(**translated)
            except InputError as error:
                entries = ((name, entry) for name, entry in (table or {}).items() if name in others)
                aliases = {each: name for name, entry in entries for each in {*entry.becomes.split()} - known.keys()}
                if error.argument in others or error.argument not in aliases:
                    raise
                raise error.about(aliases[error.argument]) from None

        return cast("F", call)  # with the signature of the function, for editors and type checkers

    return decorate


def renamed(arguments: dict[str, Any], others: Mapping[str, Any], table: Mapping[str, ForeignName]) -> dict[str, Any]:
    """Move arguments that are only renamed into ``arguments``, under the new name; return the rest of ``others``.

    Raises:
        InputError: an argument is given under two names.
    """
    left, named = {}, {}
    for name, value in others.items():
        target = table[name].becomes if name in table else ""
        if not target:
            left[name] = value
        elif arguments.get(target) is not None:
            raise conflict(name, named.get(target, target), value=value)
        else:
            arguments[target], named[target] = value, name
    return left


def tables() -> str:
    """Return all names as Markdown, for ``docs/reference``."""
    return as_markdown(
        ("Arguments of a call", CALL, ""),
        ("Arguments of `canvax.load`", LOAD, ""),
        ("Attributes and methods of a pipeline", ATTRIBUTES, "."),
        ("Arguments of `save`", SAVE, ""),
        ("Names of the module", NAMES, ""),
    )


def flax_tables() -> str:
    """Return all names of :mod:`canvax.flax_api` as Markdown, for ``docs/reference``."""
    return as_markdown(
        ("Names of the module", FLAX, ""),
        ("Arguments of a call", FLAX_CALL, ""),
        ("Arguments of `from_pretrained`", FLAX_LOAD, ""),
        ("Attributes and methods", FLAX_ATTRIBUTES, "."),
    )


def as_markdown(*all_of_them: tuple[str, Mapping[str, ForeignName], str]) -> str:
    """Return tables as Markdown, each with its title and the prefix of its names."""
    parts = []
    for title, table, prefix in all_of_them:
        names: dict[str, list[str]] = {}
        for name, entry in table.items():
            answer = entry.answer or f"the same as `{entry.becomes}`"
            names.setdefault(answer, []).append(f"`{prefix}{name}`")
        rows = [f"| {', '.join(group)} | {answer} |" for answer, group in names.items()]
        parts.append("\n".join([f"### {title}", "", "| name | canvax |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"
