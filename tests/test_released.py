"""Configs and folders as models were released, without weights: each is read, or refused with the field's name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from canvax.errors import CanvaxError, CheckpointError, HintWarning, InputError
from canvax.families.known import PRESETS, family_of
from canvax.families.read import read_model
from canvax.images.infotext import from_infotext
from canvax.models.clip_vision import MEAN, STD
from canvax.models.configs import ClipTextConfig, ClipVisionConfig, TinyConfig, UNetConfig, VaeConfig
from canvax.models.controlnet import ControlNet
from canvax.models.controlnet_union import UnionNet
from canvax.models.decoder_lm import DecoderConfig
from canvax.models.flux import ChromaConfig, FluxConfig
from canvax.models.flux2 import Flux2Config
from canvax.models.flux2_vae import Flux2VaeConfig
from canvax.models.krea2 import Krea2Config
from canvax.models.t5 import T5Config
from canvax.models.wan_vae import WanVaeConfig
from canvax.models.z_image import ZImageConfig
from canvax.pipelines.safety import vision_config
from canvax.samplers import from_scheduler_config
from canvax.samplers.catalog import find
from canvax.weights.adapter_names import module_table, split_name
from canvax.weights.controlnet import is_union
from canvax.weights.location import Location
from canvax.weights.lora import read_adapter
from canvax.weights.open import open_files
from tests.support.released import ADAPTERS, CONFIGS, FOLDERS, INFOTEXTS, OTHERS, kind_of, modules_of, write_folder

READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "UNet2DConditionModel": UNetConfig.from_dict,
    "AutoencoderKL": VaeConfig.from_dict,
    "AutoencoderTiny": TinyConfig.from_dict,
    "AutoencoderKLFlux2": Flux2VaeConfig.from_dict,
    "AutoencoderKLQwenImage": WanVaeConfig.from_dict,
    "ControlNetModel": lambda fields: (UnionNet if is_union(fields) else ControlNet).from_dict(fields),
    "ZImageTransformer2DModel": ZImageConfig.from_dict,
    "Flux2Transformer2DModel": Flux2Config.from_dict,
    "Krea2Transformer2DModel": Krea2Config.from_dict,
    "CLIPTextModel": ClipTextConfig.from_dict,
    "CLIPTextModelWithProjection": ClipTextConfig.from_dict,
    "CLIPVisionModelWithProjection": ClipVisionConfig.from_dict,
    "Qwen3ForCausalLM": DecoderConfig.from_dict,
    "Qwen3VLModel": DecoderConfig.from_dict,
    "FluxTransformer2DModel": FluxConfig.from_dict,
    "ChromaTransformer2DModel": ChromaConfig.from_dict,
    **dict.fromkeys(("T5EncoderModel", "t5"), T5Config.from_dict),
    "CLIPVisionModel": ClipVisionConfig.from_dict,
    "StableDiffusionSafetyChecker": vision_config,
    "SafetyChecker": vision_config,
}

CLIP = ClipTextConfig.from_dict
"""Reads what is of no known class, and refuses it."""

REFUSED = {
    "clip-1": "model_type",  # ChatGLM of Kolors
    "scheduler-29": "invert_sigmas",  # Mochi
    "scheduler-30": "timesteps",  # which diffusers has not
    "scheduler-37": "clip_sample",  # the low-resolution noise of the upscaler
    "transformer-3": "quantization_config",  # a copy of Z-Image that SDNQ quantized
    "unet-1": "encoder_hid_dim",  # Kolors
    "unet-29": "class_embed_type",  # GeoWizard, likewise the last two
    "unet-30": "num_class_embeds",  # the upscaler
    "unet-34": "class_embed_type",
    "unet-35": "class_embed_type",
}
"""Released configs that canvax does not compute, and the field that the error names."""


def read_config(name: str) -> Any:
    fields = CONFIGS[name]
    kind = kind_of(fields)
    return (
        from_scheduler_config(fields)
        if kind.endswith("Scheduler")
        else READERS.get(kind or fields.get("model_type"), CLIP)(fields)
    )


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith(("tokenizer", "processor"))])
def test_config(name: str) -> None:
    if name not in REFUSED:
        read_config(name)
        return
    with pytest.raises(CanvaxError, match=rf"{REFUSED[name]}( = |=)"):
        read_config(name)


def test_fields_of_training_are_named() -> None:
    name = next(name for name, fields in CONFIGS.items() if "optimization_step" in fields)
    with pytest.warns(HintWarning, match=r"decay, inv_gamma, min_decay, optimization_step, power, update_after_step"):
        assert read_config(name).in_channels == 9  # SDXL inpainting 0.1


def _cases() -> list[Any]:
    """Whole folders; the slow ones differ from another in fields of the networks alone, which ``test_config`` reads."""
    cases, seen = [], set()
    for number, released in enumerate(FOLDERS):
        parts = released["parts"]
        key = released["index"]["_class_name"], parts.get("tokenizer"), kind_of(CONFIGS[parts["scheduler"]])
        marks = [pytest.mark.slow] if key in seen else []
        seen.add(key)
        cases.append(pytest.param(released, id=f"{number}-{released['source'].split('@')[0]:.40}", marks=marks))
    return cases


@pytest.mark.parametrize("released", _cases())
def test_folder(released: dict[str, Any], tmp_path: Path) -> None:
    """The family is that of the pipeline, the size of an image that of the network, the prediction the scheduler's."""
    index, parts = released["index"], released["parts"]
    folder = write_folder(tmp_path / "model", released)
    lacks = "text_encoder_2" if "Img2Img" in index["_class_name"] and not index.get("text_encoder_2") else ""
    if lacks or "clip-1" in parts.values():  # a refiner that was changed, and Kolors
        with pytest.raises(CheckpointError, match=lacks or "ChatGLMModel"):
            opened(folder)
        return
    model = opened(folder)
    name = index["_class_name"]
    families = {
        "StableDiffusionXL": "sdxl",
        "StableDiffusion": "sd",
        "Latent": "sd",
        "ZImage": "z-image",
        "Flux2": "flux2",
        "Flux": "flux",
        "Chroma": "chroma",
    }
    wanted = next((family for start, family in families.items() if name.startswith(start)), "krea-2")
    assert model.family.name == wanted + ("-refiner" if index.get("requires_aesthetics_score") else "")
    scheduler = CONFIGS[parts["scheduler"]]
    if "unet" in parts:
        unet = CONFIGS[parts["unet"]]
        assert model.native_size == (unet["sample_size"] * 8,) * 2 or unet["_diffusers_version"] < "0.9"
        assert model.scheduler.schedule.prediction_type == scheduler.get("prediction_type", "epsilon")
        assert model.family.is_refiner is (index.get("requires_aesthetics_score") is True)
    else:
        assert model.native_size == (1024, 1024)
        assert model.scheduler.schedule.prediction_type == "flow_prediction"
    if wanted in ("flux", "chroma"):  # schnell, dev, Kontext and Chroma
        rows = model.text.encoders[-1].lengths
        found = model.defaults.num_inference_steps, model.defaults.guidance_scale, rows, model.networks.embeds_guidance
        dev, edits = (28, 3.5, (512,), True), (28, 2.5, (512,), True)
        assert found in ((4, 1.0, (256,), False), dev, edits, (35, 5.0, (512,), False))
        assert model.networks.denoiser.facts.only_edits is ("Kontext" in name)
        assert (found[0] == 35) is (wanted == "chroma")
    if checker := parts.get("safety_checker"):
        assert vision_config(CONFIGS[checker]).hidden_size == 1024


def opened(folder: Path) -> Any:
    return read_model(open_files(Location(str(folder)), accept=family_of, weights=False), "float32")


def test_processors_are_those_of_clip() -> None:
    """Images for safety checkers are prepared as CLIP's are, whatever the file says; each file says that."""
    for released in FOLDERS:
        if name := released["parts"].get("feature_extractor"):
            fields = CONFIGS[name]
            assert (tuple(fields["image_mean"]), tuple(fields["image_std"])) == (MEAN, STD)
            assert fields["resample"] == 3
            assert fields["size"] in (224, {"shortest_edge": 224})


def test_null_in_a_scheduler() -> None:
    """A number or a list that is null has the class's default; a name must be one."""
    numbers = ("steps_offset", "solver_order", "beta_start", "disable_corrector", "num_train_timesteps", "flow_shift")
    usual = from_scheduler_config({"_class_name": "UniPCMultistepScheduler"})
    found = from_scheduler_config({"_class_name": "UniPCMultistepScheduler", **dict.fromkeys(numbers)})
    assert found.options == usual.options
    np.testing.assert_array_equal(found.schedule.alphas_cumprod, usual.schedule.alphas_cumprod)
    with pytest.raises(InputError, match="beta_schedule"):
        from_scheduler_config({"_class_name": "UniPCMultistepScheduler", "beta_schedule": None})


@pytest.mark.parametrize("pipeline", OTHERS, ids=str)
def test_pipeline_of_another_kind(pipeline: Any) -> None:
    with pytest.raises(CheckpointError, match=re.escape(repr(pipeline))):
        family_of({"_class_name": pipeline})


@pytest.mark.parametrize("line", INFOTEXTS, ids=range(len(INFOTEXTS)))
def test_infotext(line: str) -> None:
    """Of images by other programs: the settings are read, and no part of them is left in a prompt."""
    read = from_infotext(f"a cat, (dog:1.2)\nNegative prompt: bad\n{line}")
    assert (read["prompt"], read["negative_prompt"]) == ("a cat, (dog:1.2)", "bad")
    for name, key in (("Steps", "num_inference_steps"), ("Seed", "seed")):
        assert f"{name}: {read[key]}," in line
    assert f"Size: {read['width']}x{read['height']}," in line
    if "sampler" in read:
        find(read["sampler"])
    for value in read["other"].values():
        assert value in line


def test_infotext_of_civitai() -> None:
    """Its lists are JSON without quotes around them, with commas and colons inside."""
    resources = from_infotext(f"a cat\n{INFOTEXTS[-1]}")["other"]["Civitai resources"]
    assert [one["type"] for one in json.loads(resources)] == ["checkpoint", "lora"]


def test_modules_of_sdxl_adapters() -> None:
    """Each module that LoRA, LoHa and LoKr of SDXL have in files of the trainers is one of the model."""
    specs = {name: spec for name, spec in PRESETS["sdxl"].specs().items() if name != "vae"}
    published = ADAPTERS["sdxl"]
    names, table = modules_of(published["modules"]), module_table(specs)
    assert len(names) == 986
    assert len({table[name] for name in names}) == 986
    for role in published["roles"]:
        split = split_name(f"{names[0]}.{role}")
        assert split is not None
        assert split.module == names[0]
        assert split.role


def test_krea_2_adapter(tmp_path: Path) -> None:
    """A file of kohya's trainer under the original names, here of rank 1."""
    published = ADAPTERS["krea-2"]
    arrays = {}
    for name, (inputs, outputs) in published["sizes"].items():
        arrays |= {
            f"{name}.lora_down.weight": np.zeros((1, inputs), np.float16),
            f"{name}.alpha": np.ones((), np.float32),
        }
        arrays |= {f"{name}.lora_up.weight": np.zeros((outputs, 1), np.float16)}
    save_file(arrays, tmp_path / "lora.safetensors", published["metadata"])
    specs = {name: spec for name, spec in PRESETS["krea-2"].specs().items() if name != "vae"}
    assert len(read_adapter(tmp_path / "lora.safetensors", specs).parts) == len(published["sizes"]) == 40
