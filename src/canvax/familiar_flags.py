"""Flags of other programs' command lines, and what canvax's says of each; see ``canvax.familiar``."""

from __future__ import annotations

import re
from collections.abc import Collection

from canvax.errors import slip
from canvax.familiar import ATTRIBUTES, CALL, LOAD, NO_WATERMARK, Familiar, as_markdown, same

_FLAG = re.compile(r"--[a-z][a-z-]+")

FLAGS: dict[str, Familiar] = {
    **same("lora-model lora-weights lora-paths lora-scales lora-scale lora-strength lora-weight lora-name "
            "lora-file", "write --lora FILE:0.8"),
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
    **same("gpus num-gpus tpu parallel", "all devices that JAX sees are used; write --mesh data=4 for so many"),
    **same("threads workers jobs num-workers", "JAX uses all processors: leave it out"),
    **same("verbose debug log-level log", "progress is shown by itself; the variable CANVAX_DEBUG=1 shows tracebacks"),
    **same("silent no-progress", "write --quiet"),
    **same("quality hq fast turbo draft", "files have the best quality; fewer --steps take less time"),
    **same("refiner", "two models are run one after the other from Python: denoising_end= and denoising_start="),
    **same("show display view open", "files are written, and their names printed: leave it out"),
    **same("text caption", "the prompt stands in quotes without a flag, or after --prompt"),
    **same("count number amount repeat iterations seeds num-seeds", "write --num-images 4, of seeds SEED to SEED + 3"),
    **same("config settings preset from-json json-file from-file prompts-file file", "write --prompt-file FILE"),
    **same("hub repo repo-id hf-repo base-model base sdxl sd15", "write --model OWNER/NAME"),
    **same("canny depth pose control-type preprocessor", "write --control-from canny, or --control with such an image"),
    **same("metadata no-metadata exif embed-metadata", "files hold their settings by themselves: leave it out"),
    **same("interactive gui web", "write canvax ui"),
    **same("offline no-cache", "write --local-files-only"),
    **same("dry-run test", "canvax plan MODEL --target tpu-v5e:2x2 says what it would take, without images"),
    **same("vae-path", "write --vae"),
    **same("fp16 half precision no-half use-fp16 force-fp16 fp16-vae", "write --dtype float16 (or bfloat16, float32)"),
    **same("bf16", "write --dtype bfloat16"),
    **same("fp32 full-precision no-half-vae", "write --dtype float32"),
    **same("lowvram medvram novram offload cpu-offload", "write --quantize int8, --vae-tiling on or a smaller "
            "--batch-size"),
    **same("xformers enable-xformers flash-attention opt-sdp-attention attention-slicing sdp",
            "attention never holds all its scores: leave it out"),
    **same("jpg jpeg webp png format extension ext", "the name chooses: -o cat.png, -o cat.jpg or -o cat.webp"),
    **same("size resolution dims square landscape portrait orientation", "write --width 512 --height 512"),
    **same("ckpt checkpoint safetensors ckpt-dir", "write --model with a safetensors file, a folder in the "
            "diffusers layout or a Hub id"),
    **same("v-parameterization v-pred parameterization", "write --prediction-type v_prediction"),
    **same("taesd tae", "write --vae madebyollin/taesd, or taesdxl"),
    **same("no-safety-checker no-nsfw nsfw-filter nsfw disable-nsfw-checker", "no safety checker is used unless "
            "--safety-checker says so"),
    **same("watermark add-watermark invisible-watermark", NO_WATERMARK),
    **same("outdir out outfile outpath output-dir output-directory output-path output-file save-path save dest dir "
            "folder", "write --output FOLDER"),
    **same("hires-fix", "write --hires 2"),
    **same("styles style style-preset", "canvax has no styles; write their words into the prompt"),
    **same("pretrained-model-name-or-path model-id model-name", "write --model"),
    **same("upscale upscaler", "write canvax upscale IMAGE, or --hires 2"),
    **same("negative-prompt-file", 'a prompt file may hold them: {"prompt": "...", "negative_prompt": "..."}'),
    **same("api listen port share", "write canvax serve, or canvax ui for the page"),
    **same("karras", "write --sigmas karras, or a sampler such as 'DPM++ 2M Karras'"),
    **same("torch-compile compile", "programs are always compiled and cached: leave it out"),
    **same("ddim plms euler dpm", "write --sampler with its name; canvax samplers lists them"),
    **same("type int8 fp8 8bit int4 4bit bits load-in-8bit load-in-4bit", "write --quantize int8, or --dtype float16"),
    **same("mixed-precision", "write --dtype bfloat16"),
    **same("diffusion-model", "write --model"),
    **same("ar aspect aspect-ratio", "write --width 768 --height 432"),
    **same("enable-model-cpu-offload enable-sequential-cpu-offload", "write --quantize int8 or a smaller batch"),
}  # fmt: skip
"""Flags of the command line, without their dashes."""

_SERVE = {
    **same("m model", "models have no flag here: write canvax serve emoji"),
    **same("listen server-name public", "write --host 0.0.0.0, with --keys FILE or --no-keys"),
    **same("api nowebui api-auth", "the APIs are always there, the page without --no-page: leave it out"),
    **same("server-port", "write --port"),
    **same("workers threads", "one process serves, and its models share the devices; for more see docs/scaling.md"),
    **same("api-key api-keys keys-file auth password user", "write --keys FILE, with lines id:key"),
    **same("cors cors-allow-origins cors-origin allow-cors origins allowed-origins", "write --allow-origin URL"),
    **same(
        "ssl tls cert certfile ssl-keyfile ssl-certfile tls-keyfile tls-certfile https",
        "put a proxy that speaks HTTPS in front: docs/serving.md",
    ),
    **same(
        "timeout request-timeout timeout-keep-alive", "a request may name its own; --queue-seconds is what may wait"
    ),
    **same("batch batch-size max-batch max-batch-size max-num-seqs size", "write --warm 512x512:1,4"),
    **same("max-queue queue-size queue max-concurrent concurrency", "write --queue-images"),
    **same("rate-limit", "write --rate, images a minute for each key"),
    **same("no-ui no-browser", "write --no-page; canvax serve opens no browser"),
    **same("ui webui browser", "write canvax ui, which opens the page; canvax serve has it, too"),
    **same("ckpt models model-dir models-dir", "models have no flag here: write canvax serve FOLDER"),
    **same("bind address ip interface", "write --host"),
    **same("max-size", "write --max-body"),
    **same("log-file daemon background pid pidfile reload", "the shell or the service manager does it: leave it out"),
    **same("metrics health", "they are always there, at /metrics and /health: leave it out"),
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
        **same("data dataset data-dir images folder", "folders have no flag: write canvax train TASK FOLDER"),
        **same("num-epochs", "write --steps, updates of the weights"),
        **same("lr-schedule", "write --final-lr 0 for a cosine; else the rate is constant"),
        **same("lora-r", "write --rank"),
        **same("resume continue save-state", "the same command goes on where it was stopped: leave it out"),
        **same("token trigger-word token-string", "write --trigger"),
        **same("target-modules", "write --layers transformer, or all"),
        **same("captions caption-ext caption-extension", "captions are .txt files beside the images, or a column"),
        **same("augment flip-aug", "write --flip"),
        **same(
            "num-validation-images validation-epochs validation-steps sample-prompts sample-every-n-steps "
            "sample-every-n-epochs",
            "write --preview PROMPT",
        ),
        **same("cache-latents cache-latents-to-disk", "latents are kept by themselves: leave it out"),
        **same(
            "enable-bucket min-bucket-reso max-bucket-reso bucket-no-upscale random-crop",
            "images are cropped to one size, --size: leave it out",
        ),
        **same(
            "optimizer optimizer-type adam-beta1 adam-beta2 adam-epsilon adam-weight-decay max-grad-norm "
            "lr-num-cycles "
            "lr-power use-prodigy",
            "AdamW trains, with --learning-rate, --warmup, --final-lr and --weight-decay",
        ),
        **same("network-module network-args network-train-unet-only", "canvax train lora trains LoRAs: leave it out"),
        **same("val-split eval-every log-every", "the loss is shown by itself, and with --tensorboard written"),
        **same(
            "seed-everything local-rank dataloader-num-workers max-data-loader-n-workers allow-tf32 workers",
            "it does so by itself: leave it out",
        ),
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
