"""The names for writing a model of your own: see docs/new-family.md.

A model is a denoiser, text encoders and an autoencoder, each a frozen record over a config. ``canvax.pipeline_of``
makes a pipeline of them. The layers are in ``canvax.nn``.
"""

from canvax.families.base import Defaults, Family, Model, SizeConditions, check_components, parsed, read_clip_tokenizer
from canvax.families.known import register
from canvax.guidance import Guidance
from canvax.models.clip import ClipEncoder
from canvax.models.configs import ClipTextConfig, Config, VaeConfig
from canvax.models.decode import Autoencoder
from canvax.models.denoiser import COLUMNS, Denoiser, DenoiserWrapper, Extras, Facts, Inputs, Packing, Row
from canvax.models.networks import Networks
from canvax.models.text import Conditions, Shapes, TextEncoder, TextEncoders
from canvax.params import Axis, Param, Params, Spec, init_params
from canvax.samplers import NoiseSchedule, SamplerOptions, SamplerSpec, Scheduler, from_scheduler_config
from canvax.types import Array
from canvax.weights.files import ModelFiles
from canvax.weights.load import load_params
from canvax.weights.rules import Rule

__all__ = [
    "COLUMNS",
    "Array",
    "Autoencoder",
    "Axis",
    "ClipEncoder",
    "ClipTextConfig",
    "Conditions",
    "Config",
    "Defaults",
    "Denoiser",
    "DenoiserWrapper",
    "Extras",
    "Facts",
    "Family",
    "Guidance",
    "Inputs",
    "Model",
    "ModelFiles",
    "Networks",
    "NoiseSchedule",
    "Packing",
    "Param",
    "Params",
    "Row",
    "Rule",
    "SamplerOptions",
    "SamplerSpec",
    "Scheduler",
    "Shapes",
    "SizeConditions",
    "Spec",
    "TextEncoder",
    "TextEncoders",
    "VaeConfig",
    "check_components",
    "from_scheduler_config",
    "init_params",
    "load_params",
    "parsed",
    "read_clip_tokenizer",
    "register",
]
