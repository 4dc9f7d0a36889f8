"""Translate arguments under names of diffusers and related programs; ``canvax.familiar`` has the names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from canvax.call import Call, Enlarging, Load
from canvax.errors import InputError, check_flag, check_function, conflict, shown
from canvax.familiar import CALL, HARMLESS, LESS_GUIDANCE, LOAD, PAGE, ForeignName, Translate, answer, renamed
from canvax.images.keys import KEYS
from canvax.pipelines.checks import floats
from canvax.pipelines.options import Options, Step, check_options
from canvax.pipelines.request import Output
from canvax.samplers import find
from canvax.settings import declared

if TYPE_CHECKING:
    from canvax.pipelines.image_prompts import ImagePrompt
    from canvax.pipelines.result import Result

_OWN = tuple(declared(Options))
_ARGUMENTS = (*declared(Call), "params", "adapters", "output_type")
_OF_UPSCALE = ("image", "prompt", "negative_prompt", *declared(Enlarging))
_OF_UPSCALE += ("num_inference_steps", "guidance_scale", "seed", "sampler", "options", "params")
_SPECIAL = ("generator", "return_dict", "timesteps", "callback_on_step_end", "guess_mode")
_SPECIAL += ("callback_on_step_end_tensor_inputs", "prompt_embeds", "pooled_prompt_embeds")
_SPECIAL += ("negative_prompt_embeds", "negative_pooled_prompt_embeds", "ip_adapter_image", "ip_adapter_image_embeds")
_METADATA = {name for name, key in KEYS.items() if key.of == "fact"} - {*_OWN}
GIVEN = CALL | {
    "prompt_embeds": ForeignName(becomes="prompt"),
    "negative_prompt_embeds": ForeignName(becomes="negative_prompt"),
    "guidance": ForeignName(becomes="guidance_scale guidance_method"),
}
"""Arguments by the names that errors of a call must use; ``guidance`` is a scale or a rule."""


@cache
def place_of(name: str) -> str:
    """Say which function takes a name that is not an attribute of a pipeline; return "" if none does."""
    if name in _ARGUMENTS or name in _OWN or (name in CALL and CALL[name].becomes):
        return f"it is an argument of a call: pipe(prompt, {name}=...)"
    if name in CALL:
        return CALL[name].answer
    return f"it is an argument of canvax.load: canvax.load(model, {name}=...)" if name in declared(Load) else ""


def translate_call(
    arguments: dict[str, Any], others: dict[str, Any], own: Sequence[str] = _ARGUMENTS, of: str = "a call"
) -> dict[str, Any]:
    """Return the keywords of a call for its ``arguments`` and ``others``.

    Fields of ``canvax.Options`` may be arguments of the call. ``own`` are its other arguments.

    Raises:
        InputError: an argument is not known, is given twice or means what canvax does not have.
    """
    if isinstance(curve := others.get("scheduler"), str) and {"sampler", "sampler_name"} & {*arguments, *others}:
        try:
            find(curve)
        except InputError as error:  # the error says how to give a sigma schedule
            raise error.about("scheduler") from None
    if recorded := _METADATA & others.keys():
        problem = "is a key of an image's metadata, which is not the keywords of a call"
        raise InputError(min(recorded), problem, cure="write pipe.again(metadata), also with keywords to change")
    if _is_rule(rule := others.get("guidance")):
        if "guidance_method" in others:
            raise InputError("guidance and guidance_method are one argument; give it once")
        others = {name: value for name, value in others.items() if name != "guidance"} | {"guidance_method": rule}
    left = renamed(arguments, others, CALL)
    for name in [name for name in arguments if name in _OWN]:  # a name for a field of the options
        if name in left:
            raise InputError(name, "is given twice, under two names", cure="give it once")
        left[name] = arguments.pop(name)
    for name in left:
        if name in (*_OWN, *_SPECIAL, *_ARGUMENTS):
            continue
        if name in declared(Load) and name not in CALL:
            raise InputError(f"{name} belongs to the model, not to a call: canvax.load(model, {name}=...)")
        takes = f"it takes {', '.join(own)} and the fields of canvax.Options"
        raise InputError(answer(name, CALL, [*own, *_OWN, *_SPECIAL], f"an argument of {of}", takes=takes))
    arguments |= {name: left[name] for name in _ARGUMENTS if name in left}  # of a call, and not of ``upscale``
    changes = {name: value for name, value in left.items() if name in _OWN}
    if (callback := left.get("callback_on_step_end")) is not None:
        if (changes.get("callback") or check_options(arguments.get("options")).callback) is not None:
            raise conflict("callback_on_step_end", "callback")
        changes["callback"] = _on_step_end(arguments["self"], callback)
    if set(left.get("callback_on_step_end_tensor_inputs") or ()) - {"latents"}:
        given = "a callback is given 'latents' and nothing else"
        raise InputError(f"callback_on_step_end_tensor_inputs: {given}; {LESS_GUIDANCE} ({PAGE}#callbacks)")
    if (guess := left.get("guess_mode")) is not None:
        check_flag("guess_mode", guess)
        if "control_mode" in changes:
            raise conflict("control_mode", "guess_mode")
        changes |= {"control_mode": "guess"} if guess else {}
    if (generator := left.get("generator")) is not None:
        if arguments.get("seed") is not None:
            raise conflict("generator", "seed")
        arguments["seed"], changes["noise"] = _seeds(generator), "torch"
    if not left.get("return_dict", True):
        raise InputError("return_dict=False: a call returns a canvax.Result; its images are result.images")
    for name, negative in (("prompt", ""), ("negative_prompt", "negative_")):
        if (text := left.get(f"{negative}prompt_embeds")) is not None:
            if arguments.get(name) is not None:
                raise conflict(f"{negative}prompt_embeds", name)
            if isinstance(text, str):
                message = f"{negative}prompt_embeds={shown(text)} is text"
                raise InputError(f"{message}; give {name}, or what pipe.encode returns")
            pooled = left.get(f"{negative}pooled_prompt_embeds")
            embeds = {"text": text} | ({} if pooled is None else {"pooled": pooled})
            # PyTorch refuses to convert tensors that record gradients.
            arguments[name] = {
                key: value.detach() if hasattr(value, "detach") else value for key, value in embeds.items()
            }
    if (prompts := image_prompts(left)) is not None:
        if arguments.get("image_prompt") is not None:
            raise conflict("ip_adapter_image", "image_prompt")
        arguments["image_prompt"] = prompts
    options = with_changes(arguments.get("options"), changes)
    if (timesteps := left.get("timesteps")) is not None:
        if "timesteps" in options.settings:
            raise InputError("timesteps", "is given twice, also in sampler_settings", cure="give it once")
        listed = list(timesteps) if isinstance(timesteps, list | tuple) else np.asarray(timesteps).tolist()
        options = dataclasses.replace(options, sampler_settings={**options.settings, "timesteps": listed})
    arguments["options"] = options
    return arguments


translate_upscale = partial(translate_call, own=_OF_UPSCALE, of="upscale")
"""The same for ``pipe.upscale``."""

_REPLACES = {
    "generator": ("seed", "noise"),
    "guess_mode": ("control_mode",),
    "ip_adapter_image": ("image_prompt",),
    "ip_adapter_image_embeds": ("image_prompt",),
    "timesteps": ("num_inference_steps", "sampler_settings"),
    "callback_on_step_end": ("callback",),
}
"""Arguments of diffusers that decide arguments and options of other names."""


def _is_rule(guidance: Any) -> bool:
    """Return whether ``guidance`` is a rule, a function or the name of one, not a scale."""
    return isinstance(guidance, str) or callable(guidance) or hasattr(guidance, "denoised")


def decided(keywords: Mapping[str, Any]) -> set[str]:
    """Return the arguments and options, under canvax's names, that keywords of a call decide."""
    texts = (GIVEN[name].becomes or name if name in GIVEN else name for name in keywords)
    names = {name for text in texts for name in text.split()}
    if "guidance" in keywords:
        other = "guidance_scale" if _is_rule(keywords["guidance"]) else "guidance_method"
        names -= {other} - {*keywords}
    names |= {other for name in names & _REPLACES.keys() for other in _REPLACES[name]}
    return names | check_options(keywords.get("options")).changed_names()


def arguments_of_call(pipe: Any, keywords: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of a call of a pipeline that keywords of any program give, and those ``also`` as they are.

    Raises:
        InputError: as ``translate_call``.
    """
    named: dict[str, Any] = {name: value for name, value in keywords.items() if name in (*_ARGUMENTS, *also)}
    others = {name: value for name, value in keywords.items() if name not in named}
    return translate_call({"self": pipe, **named}, others)


def image_prompts(keywords: Mapping[str, Any]) -> list[ImagePrompt] | None:
    """Translate image prompts of diffusers: for each adapter an image, a list of images, or CLIP's embeddings.

    Raises:
        InputError: the value is something else.
    """
    if not keywords.keys() & {"ip_adapter_image", "ip_adapter_image_embeds"}:
        return None
    from canvax.pipelines.image_prompts import ImagePrompt  # which most calls never need

    images, embeds = keywords.get("ip_adapter_image"), keywords.get("ip_adapter_image_embeds")
    if embeds is not None and images is not None:
        raise conflict("ip_adapter_image", "ip_adapter_image_embeds")
    prompts = []
    if images is not None:
        for i, group in enumerate(images if isinstance(images, list) else [images]):
            prompts += [ImagePrompt(image, adapter=i) for image in (group if isinstance(group, list) else [group])]
    for i, group in enumerate(() if embeds is None else embeds):
        array = np.asarray(group)
        if array.ndim not in (3, 4) or len(array) not in (1, 2):
            raise InputError(
                f"ip_adapter_image_embeds[{i}] has shape {array.shape}; it is [2, n, ...], negative ones first, or "
                "[1, n, ...]; canvax.ImagePrompt(embeds=...) takes others"
            )
        negative = array[0] if len(array) == 2 else [None] * array.shape[1]
        pairs = zip(array[-1], negative, strict=True)
        prompts += [
            ImagePrompt(embeds=embeds_of_image, negative_embeds=other, adapter=i) for embeds_of_image, other in pairs
        ]
    return prompts or None


def with_changes(options: Any, changes: Mapping[str, Any]) -> Options:
    """Return ``options`` with the fields that a call gives as keywords.

    Raises:
        InputError: a field is given twice.
    """
    options = check_options(options)
    twice = options.changed_names() & changes.keys()
    if twice:
        raise InputError(min(twice), "is given twice, as an argument and in options", cure="give it once")
    return dataclasses.replace(options, **changes)


def check_output(output: Any) -> Output:
    """Check the kind of images; None is "pil", as in diffusers.

    Raises:
        InputError: the kind is not known.
    """
    if output is None:
        return "pil"
    if not isinstance(output, str) or output not in get_args(Output):
        raise InputError("output_type", f"is not one of {', '.join(get_args(Output))}", value=output)
    return cast("Output", output)


def as_output(result: Result, output: Output) -> Result:
    """Return ``result`` with images of a kind."""
    if output == "pil":
        return result
    images: Any = result.latents if output == "latent" else result.pixels
    return dataclasses.replace(result, images=images)


def _on_step_end(pipe: Any, callback: Callable[..., Any]) -> Callable[[Step], Any]:
    """Adapt a callback of diffusers, ``(pipe, index, timestep, {"latents": ...})``, to canvax.

    Its latents are [B, C, h, w], and scaled as those of diffusers' scheduler.
    """
    check_function("callback_on_step_end", callback, 4, "(pipe, index, timestep, tensors)")

    def call(step: Step) -> Any:
        given = np.ascontiguousarray(np.moveaxis(step.latents, -1, 1)) / np.float32(step.scale)
        tensors = {"latents": given.copy()}
        returned = callback(pipe, step.index, step.timestep, tensors)
        if isinstance(returned, Mapping):
            if other := [name for name in returned if name != "latents"]:
                raise InputError(
                    "callback_on_step_end",
                    f"returned {other[0]!r:.80}, and 'latents' alone can be changed on the way",
                    cure=f"leave it out; {LESS_GUIDANCE}",
                )
            returned = returned.get("latents")
        if isinstance(returned, bool | np.bool_):
            return bool(returned)
        latents = as_latents(tensors["latents"] if returned is None else returned, given.shape)
        same = np.array_equal(latents, given)  # changing the scale may change the last bit
        return None if same else np.moveaxis(latents, 1, -1) * np.float32(step.scale)

    return call


def as_latents(returned: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return the result of diffusers' callback as latents [B, C, h, w] float32.

    Raises:
        InputError: the result is something else.
    """
    cure = f"return {{'latents': array}} with float [B, C, h, w] = {shape}, or False to stop"
    try:
        latents = np.asarray(floats(returned))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError("callback_on_step_end", f"returned no latents: {error!s:.200}", cure=cure) from None
    if latents.shape != shape or latents.dtype != np.float32 or not np.isfinite(latents).all():
        problem = f"returned {latents.dtype} {latents.shape}, or values that are not finite"
        raise InputError("callback_on_step_end", problem, cure=cure)
    return latents


def _seeds(generator: Any) -> Any:
    """Return the seed of a generator of PyTorch, or of each in a list."""
    if isinstance(generator, list | tuple):
        return [_seeds(generator_of_image) for generator_of_image in generator]
    if not (hasattr(generator, "initial_seed") and hasattr(generator, "get_state")):
        raise InputError(f"generator={generator!r} is not a torch.Generator; write seed=1, a whole number ({PAGE})")
    seed = int(generator.initial_seed())
    unused = type(generator)(device=generator.device).manual_seed(seed)
    if bytes(unused.get_state().cpu().numpy()) != bytes(generator.get_state().cpu().numpy()):
        raise InputError(
            f"generator has given numbers since manual_seed({seed}), and what follows cannot be derived from its seed; "
            "use a new one, or seed=1"
        )
    return seed


def loader(table: Mapping[str, ForeignName], arguments: Sequence[str], kind: str, page: str = PAGE) -> Translate:
    """Make a translator of keywords by ``table``, for a function with ``arguments`` that loads a model."""

    def translate(own_keywords: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        for name, value in renamed(own_keywords, others, table).items():
            if not any(value is harmless for harmless in HARMLESS.get(name, ())):
                if name in HARMLESS and name not in table:
                    raise InputError(f"{name}={value!r}: canvax has none; leave it out ({page})")
                takes = f"it takes {', '.join(arguments)}"
                raise InputError(answer(name, table, [*arguments, *HARMLESS], kind, page, takes))
        return own_keywords

    return translate


translate_load = loader(LOAD, tuple(declared(Load)), "an argument of canvax.load")
"""The translator of the keywords of ``canvax.load``."""
