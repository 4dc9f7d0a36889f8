"""Flags of other programs' command lines, and what canvax's says of each; see ``canvax.familiar``."""

from __future__ import annotations

import re
from collections.abc import Collection

from canvax.errors import slip
from canvax.familiar import ATTRIBUTES, CALL, LOAD, NO_WATERMARK, Familiar, as_markdown, same

_FLAG = re.compile(r"--[a-z][a-z-]+")

FLAGS: dict[str, Familiar] = {
    **same("lora-model lora-weights lora-paths lora-scales lora-scale", "write --lora FILE:0.8"),
    **same("lora-model-dir", "write --lora-dir FOLDER"),
    **same("controlnet-model t2i-adapter adapter", "write --controlnet NET --control IMAGE"),
    **same("controlnet-conditioning-scale control-weight", "write --control-scale"),
    **same("guess-mode", "write --control-mode guess"),
    **same("image-path img2img", "write --image FILE --strength 0.6"),
    **same("inpaint", "write --image FILE --mask FILE"),
    **same("embeddings embeddings-dir embd-dir textual-inversion", "write --embedding FILE, once for each"),
    **same("ip-adapter-image ip-adapter-scale", "write --ip-image FILE:0.6"),
    **same("ip-adapter-masks ip-adapter-mask", "write --ip-mask FILE, once for each --ip-image"),
    **same("device gpu cuda cpu use-cpu platform", "the variable JAX_PLATFORMS chooses: JAX_PLATFORMS=cpu canvax ..."),
    **same("fp16 half precision no-half", "write --dtype float16 (or bfloat16, float32)"),
    **same("bf16", "write --dtype bfloat16"),
    **same("fp32 full-precision no-half-vae", "write --dtype float32"),
    **same("lowvram medvram offload cpu-offload", "write --quantize int8, --vae-tiling on or a smaller --batch-size"),
    **same("xformers flash-attention opt-sdp-attention attention-slicing sdp",
            "attention never holds all its scores: leave it out"),
    **same("jpg jpeg webp png format extension", "the name chooses: -o cat.png, -o cat.jpg or -o cat.webp"),
    **same("size resolution", "write --width 512 --height 512"),
    **same("ckpt checkpoint safetensors ckpt-dir", "write --model with a folder in the diffusers layout or a Hub id"),
    **same("v-parameterization v-pred parameterization", "write --prediction-type v_prediction"),
    **same("taesd tae", "write --vae madebyollin/taesd, or taesdxl"),
    **same("no-safety-checker nsfw disable-nsfw-checker", "no safety checker is used unless --safety-checker says so"),
    **same("watermark add-watermark invisible-watermark", NO_WATERMARK),
    **same("outdir out outpath output-dir save-path", "write --output FOLDER"),
    **same("hires-fix", "write --hires 2"),
    **same("ddim-eta", "write --eta"),
    **same("image-strength denoise", "write --strength"),
    **same("styles style style-preset", "canvax has no styles; write their words into the prompt"),
    **same("pretrained-model-name-or-path model-id model-name", "write --model"),
    **same("upscale upscaler", "write canvax upscale IMAGE, or --hires 2"),
    **same("negative-prompt-file", 'a prompt file may hold them: {"prompt": "...", "negative_prompt": "..."}'),
    **same("api listen port share", "write canvax serve, or canvax ui for the page"),
    **same("karras", "write --sigmas karras, or a sampler such as 'DPM++ 2M Karras'"),
    **same("torch-compile compile", "programs are always compiled and cached: leave it out"),
    **same("ddim plms euler dpm", "write --sampler with its name; canvax samplers lists them"),
    **same("n-iter n-samples batch-count", "write --num-images"),
    **same("ddim-steps", "write --steps"),
    **same("sampling-method", "write --sampler"),
    **same("type", "write --quantize int8, or --dtype float16"),
    **same("mixed-precision", "write --dtype bfloat16"),
    **same("diffusion-model", "write --model"),
    **same("ar aspect-ratio", "write --width 768 --height 432"),
    **same("enable-model-cpu-offload enable-sequential-cpu-offload", "write --quantize int8 or a smaller batch"),
}  # fmt: skip
"""Flags of the command line, without their dashes."""

_SERVE = {
    **same("m model", "models have no flag here: write canvax serve emoji"),
    **same("listen server-name", "write --host 0.0.0.0, with --keys FILE or --no-keys"),
    **same(
        "api nowebui api-auth",
        "the APIs are always there, the page without --no-page: leave it out",
    ),
    **same("server-port", "write --port"),
    **same("share", "no public address is made; --host 0.0.0.0 --keys FILE opens it to your network"),
}
_DRAW = same("i", "write --image FILE --strength 0.6")
FLAGS_OF: dict[str, dict[str, Familiar]] = {
    "generate": _DRAW,
    "sheet": _DRAW,
    "serve": _SERVE,
    "ui": _SERVE,
    "train": {
        **same("train-data-dir instance-data-dir dataset-name", "folders have no flag: write canvax train TASK FOLDER"),
        **same("num-train-epochs max-train-epochs epochs", "write --steps, updates of the weights"),
        **same("gradient-accumulation-steps", "write --accumulate"),
        **same("gradient-checkpointing", "write --remat"),
        **same("lr-scheduler", "write --final-lr 0 for a cosine; else the rate is constant"),
        **same("lr-warmup-steps", "write --warmup"),
        **same("min-snr-gamma", "write --min-snr 5"),
        **same("report-to logging-dir", "write --tensorboard FOLDER"),
        **same("lora-rank", "write --rank"),
        **same("lora-alpha", "write --alpha"),
        **same("unet-lr", "write --lr"),
        **same("text-encoder-lr", "write --text-encoder --text-lr"),
        **same("resume-from-checkpoint", "the same command goes on where it was stopped: leave it out"),
        **same("checkpointing-steps save-every-n-epochs", "the state is written by itself: leave it out"),
        **same("center-crop", "images are cropped by themselves: leave it out"),
        **same("use-8bit-adam noise-offset", "canvax does not have it: docs/training.md"),
        **same("save-precision", "write --save-dtype float16"),
    },
}
"""The same of single commands."""


def known_flag(command: str, flag: str, flags: Collection[str]) -> str:
    """What to say of a ``flag`` that a ``command`` has not, which has ``flags``; empty where nothing is known of it."""
    name = flag.lstrip("-").replace("_", "-")
    if f"--{name}" in flags:
        return f"write --{name}"
    if told := _answers(command, flags).get(name.lower()):
        return told
    for table in (CALL, LOAD):  # of the Python calls, whose arguments are flags
        entry = table.get(name.replace("-", "_"))
        if entry and entry.becomes and (meant := f"--{entry.becomes.replace('_', '-')}") in flags:
            return f"write {meant}"
    return ""


def near_flag(command: str, flag: str, flags: Collection[str]) -> str:
    """The same of one that may be a slip of the fingers."""
    answers = _answers(command, flags)
    near = slip(flag.lstrip("-"), answers) if len(flag) > 6 else None
    return answers[near] if near else ""


def _answers(command: str, flags: Collection[str]) -> dict[str, str]:
    """What a command says of others' flags, but for what would name a flag that it has not either."""
    answers = {name: entry.answer for name, entry in {**FLAGS, **FLAGS_OF.get(command, {})}.items()}
    return {name: told for name, told in answers.items() if "canvax " in told or set(_FLAG.findall(told)) <= set(flags)}


def tables() -> str:
    """All names as Markdown, which ``docs/coming-from-diffusers.md`` ends with."""
    return as_markdown(
        ("Arguments of a call", CALL, ""),
        ("Arguments of `canvax.load`", LOAD, ""),
        ("Attributes and methods of a pipeline", ATTRIBUTES, "."),
        ("Flags of the command line", FLAGS, "--"),
        ("Flags of `canvax serve` and `canvax ui`", _SERVE, "--"),
        ("Flags of `canvax train`", FLAGS_OF["train"], "--"),
    )
