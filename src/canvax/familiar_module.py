"""Names that people look for in the module ``canvax``, and what to say of each; see ``canvax.familiar``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from canvax.familiar import ATTRIBUTES, CALL, FLAX_PAGE, NOT_HERE, PAGE
from canvax.familiar_flax import FLAX

CLASSES = {
    "StableDiffusionPipeline": "write canvax.load(model)",
    "StableDiffusionXLPipeline": "write canvax.load(model)",
    "DiffusionPipeline": "write canvax.load(model)",
    "AutoPipelineForText2Image": "write canvax.load(model)",
    **dict.fromkeys(
        (
            *("from_pretrained", "pipeline", "Pipeline", "generate", "txt2img", "text2img", "text_to_image"),
            *(
                "load_model",
                "load_pipeline",
                "load_checkpoint",
                "from_single_file",
                "create_pipeline",
                "generate_image",
            ),
        ),
        "write pipe = canvax.load(model), then pipe(prompt)",
    ),
    **dict.fromkeys(
        ("set_seed", "seed_everything", "manual_seed", "Generator", "PRNGKey"),
        "a seed belongs to a call: pipe(prompt, seed=1)",
    ),
    **dict.fromkeys(
        ("device", "devices", "cuda", "set_device", "is_available"),
        "jax.devices() lists the devices; mesh=canvax.make_mesh(...) in canvax.load chooses",
    ),
    **dict.fromkeys(
        ("list_samplers", "schedulers", "list_schedulers", "Sampler", "Scheduler"),
        "canvax.samplers.SAMPLERS lists them; sampler='Euler' in a call chooses",
    ),
    **dict.fromkeys(("load_lora", "Lora", "LoRA", "adapters"), "write pipe.adapters.load('name', file, weight=0.8)"),
    **dict.fromkeys(("ControlNet", "controlnet"), "write canvax.load(model, controlnet=...), and control= in the call"),
    **dict.fromkeys(("IPAdapter", "ip_adapter"), "write canvax.load(model).with_ip_adapter(file)"),
    **dict.fromkeys(
        ("load_image", "save_image", "Image"),
        "images are Pillow's: Image.open(file); result.save('cat.png') writes one",
    ),
    **dict.fromkeys(("make_image_grid", "image_grid", "grid"), "write result.grid()"),
    **dict.fromkeys(("upscale", "Upscaler"), "write pipe.upscale(image)"),
    **dict.fromkeys(("serve", "Server", "app"), "write canvax serve, a command: docs/serving.md"),
    **dict.fromkeys(("finetune", "dreambooth", "Trainer"), "write canvax train, a command: docs/training.md"),
    "pmap": CALL["pmap"].answer,
    **dict.fromkeys(("replicate", "shard"), "canvax.flax_api has it; canvax.load needs none of it"),
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


def no_such_name(module: str, name: str, told: str) -> Exception:
    """The error of a package without a name: of an AttributeError ``from canvax import NAME`` would tell nothing."""
    imports = sys._getframe(2).f_code.co_name == "_handle_fromlist"  # which asks for it before it looks for a submodule
    return (ImportError if imports and find_spec(f"{module}.{name}") is None else AttributeError)(told)


def missing_class(name: str) -> str | None:
    """What to say of a name that the module ``canvax`` has not; None if it is nothing people know."""
    if name.startswith("Flax"):
        if name in FLAX:
            return f"{name}: {FLAX[name].answer} ({FLAX_PAGE})"
        return f"write from canvax.flax_api import {name} ({FLAX_PAGE})"
    if name.endswith("Scheduler"):
        return f"write sampler={name!r} in a call"
    if name not in CLASSES and name.endswith("Pipeline"):
        return f"{name}: canvax.load(model) gives one pipeline for all tasks; docs/loading.md says of which models"
    return f"{name}: {CLASSES[name]} ({PAGE})" if name in CLASSES else None
