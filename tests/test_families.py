"""A family is one place: its record is data, and nothing else in the package repeats it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import canvax
from canvax.cli.arguments import build_parser
from canvax.families.base import AESTHETICS, LATENT_CONSISTENCY, SECOND_PROMPTS, SIZES, TARGET_SIZES, Family
from canvax.families.flux2 import FLUX2
from canvax.families.known import FAMILIES, PRESETS, family_of
from canvax.families.krea2 import KREA2
from canvax.families.sd import SD
from canvax.families.sdxl import SDXL, SDXL_REFINER
from canvax.families.z_image import Z_IMAGE
from canvax.models.denoiser import UNetDenoiser
from canvax.models.flux2 import Flux2Config, flux2_spec
from canvax.params import flatten
from canvax.pipelines.request import check_for_model
from canvax.samplers import from_scheduler_config
from canvax.types import HostArray
from canvax.weights import identify
from canvax.weights.adapter_names import module_table
from canvax.weights.entries import Entry
from canvax.weights.location import Location
from canvax.weights.lora import token_widths
from canvax.weights.open import open_files
from canvax.weights.rules import Names
from canvax.weights.safetensors import ArrayToSave

SRC = Path(canvax.__file__).parent
ROOT = SRC.parents[1]
SINGLE = [family for family in FAMILIES if family.single_file]
TINY = Flux2Config(
    in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
    joint_attention_dim=8, timestep_guidance_channels=8, axes_dims_rope=(2, 2, 2, 2), guidance_embeds=False,
)  # fmt: skip


def stored(name: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, shape, np.dtype("float32"), Path("file"), ((0, 4 * int(np.prod(shape))),), "torch")


def to_save(name: str, array: HostArray) -> ArrayToSave:
    return ArrayToSave(name, array.shape, array.dtype, lambda: array)


def test_a_family_is_data_and_few_functions() -> None:
    functions = [field.name for field in dataclasses.fields(Family) if "Callable" in str(field.type)]
    assert "read" in functions
    assert len(functions) <= 7, functions


@pytest.mark.parametrize("family", SINGLE, ids=lambda family: family.name)
def test_nothing_of_a_family_is_elsewhere(family: Family) -> None:
    """Its classes, the marks of its files and its presets, but for the files in which it is declared."""
    assert family.single_file is not None
    own = Path(inspect.getfile(family.read))
    words = [*family.pipelines, *family.classes["transformer"], *family.single_file.marks]
    for path in sorted(SRC.rglob("*.py")):
        if path != own and path.parent.name != "models":
            text = path.read_text(encoding="utf-8")
            assert not [word for word in words if f'"{word}' in text], path


@pytest.mark.parametrize("family", SINGLE, ids=lambda family: family.name)
def test_tables_are_built_of_the_families(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells a file, and the names that LoRAs of other programs use."""
    assert family.single_file is not None
    shapes = {f"{mark}0.weight": (1,) for mark in family.single_file.marks}
    assert identify.transformer_family(shapes) is family
    assert identify.family_of(shapes) == (family.title, 0)
    assert identify.identify(shapes) is identify.TRANSFORMER
    with monkeypatch.context() as patch:
        others = tuple(other for other in FAMILIES if other is not family)
        patch.setattr("canvax.families.known.FAMILIES", others)
        assert identify.transformer_family(shapes) is None
    networks = next(iter(family.presets.values()))
    assert PRESETS.items() >= family.presets.items()
    table = module_table({"transformer": networks.denoiser.spec})
    layers = [name.removesuffix(".weight") for name, _ in flatten(networks.denoiser.spec) if name.endswith(".weight")]
    theirs = {name for layer in layers for name, _, _ in Names(family.names).external(layer)}
    assert len(theirs) > 20
    assert {name.replace(".", "_") for name in theirs} <= table.keys()


def test_people_read_of_every_family_and_preset() -> None:
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/which-model.md", "README.md")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for family in FAMILIES:
        name = family.models or family.title or family.name
        name = "Stable Diffusion" if family in (SD, SDXL, SDXL_REFINER) else name
        for text in (*pages, build_parser().description, canvax.__doc__, project["description"]):
            assert name in (text or ""), text
    for text in (canvax.plan.__doc__, (SRC / "cli" / "arguments.py").read_text(encoding="utf-8")):
        assert not [preset for preset in PRESETS if preset not in (text or "")]


def test_defaults_follow_from_networks_and_schedule() -> None:
    """A distilled model is known by its networks, or by its schedule alone."""
    klein, turbo = PRESETS["flux2-klein-4b"], PRESETS["z-image"]
    base = dataclasses.replace(klein, denoiser=dataclasses.replace(klein.denoiser, is_distilled=False))
    assert (FLUX2.defaults_of(klein), FLUX2.defaults_of(base)) == (FLUX2.distilled, FLUX2.defaults)
    flow = from_scheduler_config({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}).schedule
    assert Z_IMAGE.defaults_of(turbo) == Z_IMAGE.defaults_of(turbo, flow.with_shift(6.0)) == Z_IMAGE.defaults
    assert Z_IMAGE.defaults_of(turbo, flow) == Z_IMAGE.distilled
    embeds = dataclasses.replace(PRESETS["sd15"].denoiser.cfg, time_cond_proj_dim=256)
    lcm = dataclasses.replace(PRESETS["sd15"], denoiser=UNetDenoiser(embeds))
    assert (SD.defaults_of(lcm), SD.defaults_of(PRESETS["sd15"])) == (LATENT_CONSISTENCY, SD.defaults)


def test_a_refiner_is_a_family() -> None:
    index = {"_class_name": "StableDiffusionXLPipeline"}
    assert family_of(index) is SDXL
    assert family_of({**index, "requires_aesthetics_score": False}) is SDXL
    refiner = family_of({**index, "requires_aesthetics_score": True})
    assert refiner is SDXL_REFINER
    assert refiner.is_refiner
    assert "target_size" in refiner.unused_options
    assert "target_size" not in SDXL.unused_options


@pytest.mark.parametrize(
    ("family", "index", "zeros"),
    [
        (SDXL, {}, True),
        (SDXL, {"force_zeros_for_empty_prompt": None}, True),
        (SDXL, {"force_zeros_for_empty_prompt": False}, False),
        (SD, {"force_zeros_for_empty_prompt": True}, False),
    ],
)
def test_zeros_for_no_negative_prompt(
    family: Family, index: dict[str, Any], zeros: bool, emoji: canvax.Pipeline
) -> None:
    files = dataclasses.replace(emoji.model.files, index=index)
    assert dataclasses.replace(emoji.model, family=family, files=files).zero_negative_embeds is zeros


def test_a_second_prompt_needs_a_second_encoder(emoji: canvax.Pipeline) -> None:
    model = dataclasses.replace(emoji.model, family=SDXL)
    with pytest.raises(canvax.InputError) as caught:
        check_for_model(canvax.Options(prompt_2="a fox"), model)
    assert caught.value.argument == "prompt_2"


OF_SDXL: dict[str, Any] = {
    **dict.fromkeys(SECOND_PROMPTS, "a fox"), **dict.fromkeys((*SIZES, *TARGET_SIZES), (8, 8)),
    **dict.fromkeys(AESTHETICS, 5.0),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_SDXL)
def test_a_new_family_refuses_options_of_sdxl(name: str, emoji: canvax.Pipeline) -> None:
    """Its record need not list them."""
    model = dataclasses.replace(emoji.model, family=Family("new"))
    with pytest.raises(canvax.InputError) as caught:
        check_for_model(canvax.Options(**{name: OF_SDXL[name]}), model)
    assert caught.value.argument == name


@pytest.mark.parametrize("ratio", [1.0, 2.5, 3.0])
def test_stacks_of_every_width_of_the_feed_forward(ratio: float) -> None:
    """diffusers' stacks and the authors' are taken apart into what the spec declares."""
    spec = flux2_spec(dataclasses.replace(TINY, mlp_ratio=ratio))
    declared = {name: param.checkpoint_shapes[0] for name, param in flatten(spec)}
    arrays = [to_save(name, np.zeros(shape, np.float32)) for name, shape in declared.items()]
    files = Names(FLUX2.stacks).to_external(arrays)
    assert len(files) < len(declared)
    parts = Names(FLUX2.names).to_internal([stored(array.name, array.shape) for array in files])
    assert {part.name: part.shape for part in parts} == declared
    width, inner = TINY.dim, int(TINY.dim * ratio)
    parts = Names(FLUX2.names).to_internal([stored("single_blocks.0.linear1.weight", (3 * width + 2 * inner, width))])
    assert {part.name: part.shape for part in parts}.items() <= declared.items()
    assert len(parts) == 5


@pytest.mark.parametrize("shape", [(48,), (47, 16), (16, 16)])
def test_no_such_stack(shape: tuple[int, ...]) -> None:
    """It stays as it is, and loading reports it."""
    entry = stored("single_blocks.0.linear1.weight", shape)
    assert Names(FLUX2.names).to_internal([entry]) == [entry]


def test_six_rows_in_one() -> None:
    """Krea 2's tables, which its authors store as one row."""
    names = Names(KREA2.names)
    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    (row,) = names.to_external([to_save("transformer_blocks.0.scale_shift_table", table)])
    assert (row.name, row.shape) == ("blocks.0.mod.lin", (12,))
    np.testing.assert_array_equal(row.get(), np.arange(12))
    (entry,) = names.to_internal([stored(row.name, row.shape)])
    assert (entry.name, entry.shape) == ("transformer_blocks.0.scale_shift_table", (6, 2))


def test_the_components_of_a_new_family_are_read(
    tmp_path: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record names them; nothing else does."""
    shutil.copytree(small_folder, tmp_path / "new")
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(tmp_path / "new" / part, tmp_path / "new" / f"{part}_3")
    index = json.loads((tmp_path / "new/model_index.json").read_text())
    index |= {"_class_name": "NewPipeline", "text_encoder_3": index["text_encoder"], "tokenizer_3": index["tokenizer"]}
    (tmp_path / "new/model_index.json").write_text(json.dumps(index))
    before = open_files(Location(str(tmp_path / "new")))
    assert "text_encoder_3" in before.unread
    added = {"text_encoder_3": ("CLIPTextModel",), "tokenizer_3": ("CLIPTokenizer",)}
    family = dataclasses.replace(FAMILIES[0], pipelines=("NewPipeline",), classes={**FAMILIES[0].classes, **added})
    monkeypatch.setattr("canvax.families.known.FAMILIES", (*FAMILIES, family))
    files = open_files(Location(str(tmp_path / "new")), accept=family_of)
    assert {"text_encoder_3", "tokenizer_3"} <= files.components.keys()
    assert len(files.entries("text_encoder_3")) == len(files.entries("text_encoder"))
    assert "text_encoder_3" not in files.unread


def test_models_that_read_new_words() -> None:
    """Only those whose text encoders are all CLIP."""
    names = {name for name, networks in PRESETS.items() if token_widths(networks.text.specs)}
    assert {"sd15", "sdxl"} <= names
    assert not names & {"flux1-dev", "chroma1", "z-image", "flux2-klein-4b", "krea-2", "qwen-image-2.1"}
    assert {network.denoiser.component for network in map(PRESETS.get, names) if network} == {"unet"}
