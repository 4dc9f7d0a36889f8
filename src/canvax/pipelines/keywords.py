"""Keywords of calls and of ``canvax.load`` for type checkers and editors, with names of other programs.

Written by docs/reference/generate.py: change the code, then run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from canvax.call import (
    ControlMode,
    GuidanceFunction,
    GuidanceMethod,
    HiresMethod,
    ImageEncoding,
    MaskBlend,
    MaskFill,
    MaskMode,
    NoiseKind,
    PromptSyntax,
    Quality,
    Spacing,
    StrengthRule,
    Tiling,
)
from canvax.models.text import Conditions
from canvax.params import Params
from canvax.pipelines.options import Options
from canvax.samplers import SamplerSpec, SamplerTable, Solver
from canvax.types import Array, DType


class OptionFields(TypedDict, total=False):
    """The fields of ``canvax.Options`` as keywords."""

    eta: float | None
    """Noise that DDIM and ancestral samplers add."""
    spacing: Spacing | None
    """Spacing of the timesteps: leading, trailing or linspace."""
    sigmas: str | Sequence[float] | None
    """Sigma schedule: karras, ays, ... (canvax samplers curves) or a list: 14.6,6,2,0.5,0."""
    sampler_settings: Mapping[str, Any] | Sequence[str]
    """Setting of the sampler, for example s_churn=10."""
    guidance_steps: Sequence[float] | None
    """Guidance scale of each step."""
    guidance_interval: Sequence[float]
    """Use guidance only from A to B of the run, for less work."""
    guidance_rescale: float
    """Against over-exposure at high guidance."""
    true_cfg_scale: float
    """For models that read the guidance scale: scale away from the negative prompt, at twice the work."""
    guidance_method: GuidanceFunction | GuidanceMethod | None
    """Cfg, cfg_pp (scale 0..2), cfg_norm, cfg_zero or apg; in Python also a function or a rule."""
    guidance_settings: Mapping[str, Any] | Sequence[str]
    """Setting of the guidance method, for example norm=2.5."""
    pag_scale: float
    """Perturbed-attention guidance; 3 is usual; one more evaluation for each step."""
    pag_adaptive_scale: float
    """Decrease of pag_scale with the timestep."""
    quality: Quality
    """Fast: from 20 steps on, forecast half of the evaluations, for nearly the same image."""
    reuse: int
    """Compute the whole UNet in every N-th evaluation only, and forecast its deep features in the others; one more
    program."""
    reuse_layers: int
    """With reuse: outermost skip connections that are always computed; one program each."""
    tiling: Tiling
    """Decode in tiles, in less memory; auto: above 1536 x 1536 pixels."""
    clip_skip: int
    """Leave out the last N layers of the text encoder."""
    noise: NoiseKind
    """Initial noise: philox, or torch (PyTorch's CPU generator)."""
    prompt_syntax: PromptSyntax
    """Meaning of brackets in prompts: plain (none), a1111, comfy or compel."""
    progress: bool | Literal["programs"]
    """Show compiling and evaluations on stderr; programs: compiling alone."""
    callback: Callable[[Any], Any] | None
    """Called after each evaluation with a canvax.Step."""
    strength_rule: StrengthRule
    """Rule for the steps of a strength: diffusers, a1111 or exact."""
    image_encoding: ImageEncoding | None
    """Latents of the image: the encoder's mean, or a random sample."""
    mask_mode: MaskMode
    """Grey in a mask: hard rounds it, soft mixes, graded begins later."""
    mask_blur: float
    """Blur of the mask's edges, a standard deviation."""
    mask_fill: MaskFill
    """Initial content of the masked part: original, fill, noise or nothing."""
    mask_blend: MaskBlend
    """Method of keeping the rest: denoised, or renoised as in diffusers."""
    padding_mask_crop: int | None
    """Generate only the masked part and this many pixels around it, at the full size."""
    outpaint: str | Sequence[int] | Mapping[str, int] | None
    """Add pixels on these sides: left=64,right=64."""
    control_scale: float | Sequence[float]
    """Strength of control; X,X for two networks, as for the next three."""
    control_start: float | Sequence[float]
    """Part of the run after which control begins."""
    control_end: float | Sequence[float]
    """Part of the run after which control ends."""
    control_mode: ControlMode | Sequence[ControlMode]
    """Preference: balanced, prompt, or control (the control image); guess needs no prompt."""
    variation_seed: int | None
    """Seed of noise to mix in."""
    variation_strength: float
    """Share of the variation seed's noise."""
    seed_size: tuple[int, int] | None
    """Keep the composition that the seed gives at this size."""
    hires: float
    """Second pass at this many times the size."""
    hires_method: HiresMethod
    """Input of the second pass: pixel (the image), or latent."""
    hires_strength: float | None
    """Strength of the second pass."""
    hires_steps: int | None
    """Steps of the second pass."""
    hires_sampler: str | None
    """Sampler of the second pass."""
    hires_prompt: str | Sequence[str] | None
    """Prompt of the second pass."""
    denoising_start: float
    """Begin at this part of the run, from latents of a run that stopped there (denoising_end)."""
    denoising_end: float
    """Stop after this part of the run: Result.latents are noisy then, and are not decoded."""
    prompt_2: str | Sequence[str] | None
    """Prompt of the second text encoder."""
    negative_prompt_2: str | Sequence[str] | None
    """Negative prompt of the second text encoder."""
    original_size: tuple[int, int] | None
    """Size of training images to imitate; small ones are blurred."""
    crops_coords_top_left: tuple[int, int]
    """Crop of training images to imitate."""
    target_size: tuple[int, int] | None
    """Size of the training images after resizing."""
    negative_original_size: tuple[int, int] | None
    """Original_size for the negative prompt."""
    negative_crops_coords_top_left: tuple[int, int] | None
    """Crops_coords_top_left for the negative prompt."""
    negative_target_size: tuple[int, int] | None
    """Target_size for the negative prompt."""
    aesthetic_score: float | None
    """Aesthetic score for the refiner, about 1 to 10."""
    negative_aesthetic_score: float | None
    """Aesthetic score to avoid, for the refiner."""


class ForeignFields(OptionFields, total=False):
    """The options, and names of other programs."""

    prompts: str | Sequence[str] | Conditions
    """The same as prompt: the text to show; a list gives an image of each."""
    negative: str | Sequence[str] | Conditions | None
    """The same as negative_prompt: the text to avoid."""
    neg_prompt: str | Sequence[str] | Conditions | None
    """The same as negative_prompt: the text to avoid."""
    H: int | None
    """The same as height: multiple of 8, 16 or 32."""
    W: int | None
    """The same as width: multiple of 8, 16 or 32."""
    steps: int | None
    """The same as num_inference_steps: sampler steps, at most 1000."""
    num_steps: int | None
    """The same as num_inference_steps: sampler steps, at most 1000."""
    sampling_steps: int | None
    """The same as num_inference_steps: sampler steps, at most 1000."""
    cfg: float | None
    """The same as guidance_scale: strength of guidance; 1 or less (0 for Z-Image and Krea 2): none, in another program
    of half the work."""
    cfg_scale: float | None
    """The same as guidance_scale: strength of guidance; 1 or less (0 for Z-Image and Krea 2): none, in another program
    of half the work."""
    guidance: float | GuidanceFunction | GuidanceMethod | None | None
    """The same as guidance_scale: strength of guidance; 1 or less (0 for Z-Image and Krea 2): none, in another program
    of half the work; a rule, a function or a name is guidance_method."""
    n: int
    """The same as num_images_per_prompt: images for each prompt."""
    num_images: int
    """The same as num_images_per_prompt: images for each prompt."""
    n_iter: int
    """The same as num_images_per_prompt: images for each prompt."""
    batch_size: int
    """The same as num_images_per_prompt: images for each prompt."""
    scheduler: str | SamplerTable | SamplerSpec | Solver | None
    """The same as sampler: see canvax samplers."""
    sampler_name: str | SamplerTable | SamplerSpec | Solver | None
    """The same as sampler: see canvax samplers."""
    init_image: Any
    """The same as image: begin from this image, at its size without -W and -H; a model that edits reads it without
    --strength and --mask."""
    input_image: Any
    """The same as image: begin from this image, at its size without -W and -H; a model that edits reads it without
    --strength and --mask."""
    images: Any
    """The same as image: begin from this image, at its size without -W and -H; a model that edits reads it without
    --strength and --mask."""
    mask_image: Any
    """The same as mask: mask of the image's size: white is generated."""
    denoising_strength: float | None
    """The same as strength: part of the run to do."""
    denoise: float | None
    """The same as strength: part of the run to do."""
    control_image: Any
    """The same as control: image that the network reads; none for no image; for several types TYPE=FILE,TYPE=FILE."""
    controlnet_image: Any
    """The same as control: image that the network reads; none for no image; for several types TYPE=FILE,TYPE=FILE."""
    adapter_image: Any
    """The same as control: image that the network reads; none for no image; for several types TYPE=FILE,TYPE=FILE."""
    ddim_eta: float | None
    """The same as eta: noise that DDIM and ancestral samplers add."""
    cfg_rescale: float
    """The same as guidance_rescale: against over-exposure at high guidance."""
    controlnet_conditioning_scale: float | Sequence[float]
    """The same as control_scale: strength of control; X,X for two networks, as for the next three."""
    adapter_conditioning_scale: float | Sequence[float]
    """The same as control_scale: strength of control; X,X for two networks, as for the next three."""
    control_weight: float | Sequence[float]
    """The same as control_scale: strength of control; X,X for two networks, as for the next three."""
    control_guidance_start: float | Sequence[float]
    """The same as control_start: part of the run after which control begins."""
    guidance_start: float | Sequence[float]
    """The same as control_start: part of the run after which control begins."""
    control_guidance_end: float | Sequence[float]
    """The same as control_end: part of the run after which control ends."""
    guidance_end: float | Sequence[float]
    """The same as control_end: part of the run after which control ends."""
    adapter_conditioning_factor: float | Sequence[float]
    """The same as control_end: part of the run after which control ends."""
    subseed: int | None
    """The same as variation_seed: seed of noise to mix in."""
    subseed_strength: float
    """The same as variation_strength: share of the variation seed's noise."""
    hr_scale: float
    """The same as hires: second pass at this many times the size."""
    hires_scale: float
    """The same as hires: second pass at this many times the size."""
    hr_second_pass_steps: int | None
    """The same as hires_steps: steps of the second pass."""
    hr_sampler_name: str | None
    """The same as hires_sampler: sampler of the second pass."""
    hr_prompt: str | Sequence[str] | None
    """The same as hires_prompt: prompt of the second pass."""
    generator: Any
    """A torch.Generator or a list of them; the same as seed with noise='torch'."""
    return_dict: Literal[True]
    """A call always returns a canvax.Result."""
    timesteps: Sequence[float]
    """Timesteps of the sampler; the same as sampler_settings={'timesteps': ...}."""
    callback_on_step_end: Callable[..., Any]
    """Called with (pipe, index, timestep, {'latents': array})."""
    guess_mode: bool
    """The same as control_mode='guess'."""
    callback_on_step_end_tensor_inputs: Sequence[str]
    """['latents']."""
    prompt_embeds: Any
    """Conditions from the text encoder; the same as prompt=pipe.encode(...)."""
    pooled_prompt_embeds: Any
    """The second output of SDXL's text encoders."""
    negative_prompt_embeds: Any
    """The same of the negative prompt."""
    negative_pooled_prompt_embeds: Any
    """The same of the negative prompt."""
    ip_adapter_image: Any
    """Image prompts; the same as image_prompt."""
    ip_adapter_image_embeds: Any
    """Image prompts as CLIP's features."""


class CallFields(ForeignFields, total=False):
    """The keywords of a call."""

    height: int | None
    """Multiple of 8, 16 or 32."""
    width: int | None
    """Multiple of 8, 16 or 32."""
    num_inference_steps: int | None
    """Sampler steps, at most 1000."""
    guidance_scale: float | None
    """Strength of guidance; 1 or less (0 for Z-Image and Krea 2): none, in another program of half the work."""
    num_images_per_prompt: int
    """Images for each prompt."""
    seed: int | Sequence[int] | np.ndarray | Array | None
    """Image i uses SEED + i."""
    sampler: str | SamplerTable | SamplerSpec | Solver | None
    """See canvax samplers."""
    latents: np.ndarray | Array | None
    """Initial noise."""
    options: Options | None
    """Options."""
    params: Params | None
    """The parameters, if the pipeline does not hold them."""
    image: Any
    """Begin from this image, at its size without -W and -H; a model that edits reads it without --strength and
    --mask."""
    mask: Any
    """Mask of the image's size: white is generated."""
    strength: float | None
    """Part of the run to do."""
    control: Any
    """Image that the network reads; none for no image; for several types TYPE=FILE,TYPE=FILE."""
    image_prompt: Any
    """Image prompts."""
    adapters: Any
    """The strength of each loaded LoRA by name: {'ink': 0.8}."""


class AgainFields(CallFields, total=False):
    """The keywords of ``Pipeline.again``."""

    prompt: str | Sequence[str] | Conditions
    """The text to show; a list gives an image of each."""
    negative_prompt: str | Sequence[str] | Conditions | None
    """The text to avoid."""
    scale: float
    """For an enlarged image: factor of width and height."""
    overlap: int | None
    """For an enlarged image: the fewest pixels that neighbouring tiles share."""
    batch: int
    """For an enlarged image: tiles at once."""


class LoadFields(TypedDict, total=False):
    """Names of other programs for arguments of ``canvax.load``."""

    torch_dtype: DType | None
    """The same as dtype."""
    use_auth_token: str | bool | None
    """The same as token."""
    pretrained_model_name_or_path: str | Path
    """The same as model."""
    model_id: str | Path
    """The same as model."""
    t2i_adapter: str | Path | Sequence[str | Path] | None
    """The same as controlnet."""
    feature_extractor: None
    """Changes nothing; for programs written for diffusers."""
    image_encoder: None
    """Changes nothing; for programs written for diffusers."""
    requires_safety_checker: Literal[False] | None
    """Changes nothing; for programs written for diffusers."""
    use_safetensors: Literal[True] | None
    """Changes nothing; for programs written for diffusers."""
    safe_serialization: Literal[True] | None
    """Changes nothing; for programs written for diffusers."""
    low_cpu_mem_usage: Literal[True] | Literal[False] | None
    """Changes nothing; for programs written for diffusers."""
    add_watermarker: Literal[False] | None
    """Changes nothing; for programs written for diffusers."""
    device_map: None
    """Changes nothing; for programs written for diffusers."""
