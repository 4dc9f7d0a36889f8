"""Adapters beside the weights: each image of a call with its own, and nothing compiles when they come and go."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax.compile.monitor import counting
from canvax.errors import HintWarning, InputError
from canvax.families.known import PRESETS
from canvax.models.beside import LAYERS, Places, slots
from canvax.pipelines.adapters import Adapters
from canvax.pipelines.slots import Bank
from tests.support.adapter_files import Draw, Made, dora, layers, loha, lokr, lora, lora_tucker, write
from tests.support.control_files import controlnet
from tests.support.drawing import one_device
from tests.support.refusals import refused
from tests.support.small_sdxl import build

STEPS = {"num_inference_steps": 2, "progress": False}
RANK = 8
Make = Callable[[Draw, tuple[int, ...]], Made]


@pytest.mark.parametrize("preset", ["sd15", "sdxl", "z-image", "flux2-klein-4b", "krea-2"])
def test_which_layers_have_places(preset: str) -> None:
    """By what a layer does, whatever its family calls it."""
    for name, spec in PRESETS[preset].specs().items():
        attention, transformer, every = (set(slots(spec, Places(1, 4, layers))) for layers in LAYERS)
        if name == "vae":
            continue
        assert attention == {layer for layer in every if re.search(r"\.(attn\d?|self_attn|attention)\.", layer)}
        forward = {layer for layer in every if re.search(r"\.\d+\.(ff|ff_context|feed_forward|mlp)\.", layer)}
        assert len(attention) > len(forward) > 0
        around = {layer for layer in every if re.search(r"\.attentions\.\d+\.proj_(in|out)", layer)}
        assert transformer == attention | forward | around


@pytest.fixture(scope="module")
def folder(small_folder: Path) -> Path:
    return small_folder


@pytest.fixture(scope="module")
def sd(small: canvax.Pipeline) -> canvax.Pipeline:
    return small


def adapter(path: Path, pipe: canvax.Pipeline, seed: int, make: Make = lora, only: str = "") -> Path:
    """A file for every layer whose name has ``only``."""
    draw, arrays = Draw(seed), {}
    for (component, module), shape in layers(pipe.model.networks.specs()).items():
        if component != "vae" and only in f"{component}.{module}":
            arrays |= {f"{component}.{module}{end}": a for end, a in make(draw, shape).arrays.items()}
    return write(path, arrays)


@pytest.fixture(scope="module")
def loras(sd: canvax.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for i, name in enumerate(("ink", "clay", "wool")):
        adapter(folder / f"{name}.safetensors", sd, i, only="" if name == "ink" else "attn")
    return folder


@pytest.fixture(autouse=True)
def empty(sd: canvax.Pipeline) -> Any:
    yield
    sd.adapters.remove()
    sd.adapters.folder = None
    sd.adapters.beside(None)


def pixels(pipe: canvax.Pipeline, prompt: Any = "a cat", **more: Any) -> np.ndarray:
    return pipe(prompt, **{"seed": 1, **STEPS, **more}).pixels


@pytest.mark.slow
def test_as_merged(sd: canvax.Pipeline, loras: Path) -> None:
    """Beside the weights and merged into them is the same image, in both networks and in every layer."""
    plain = pixels(sd)
    sd.adapters.load("ink", loras / "ink.safetensors", 0.7)
    sd.adapters.load("clay", loras / "clay.safetensors", {"unet": 0.5, "text_encoder": 1.0})
    merged = pixels(sd)
    sd.adapters.remove()
    sd.adapters.beside(rank=RANK, places=3)
    sd.adapters.load("ink", loras / "ink.safetensors", 0.7, beside=True)
    sd.adapters.load("clay", loras / "clay.safetensors", {"unet": 0.5, "text_encoder": 1.0}, beside=True)
    beside = pixels(sd)
    assert np.abs(merged - plain).max() > 0.05
    np.testing.assert_allclose(beside, merged, atol=1e-4)


@pytest.mark.slow
def test_each_image_has_its_own(sd: canvax.Pipeline, loras: Path) -> None:
    """Images of one batch, guided, are what each is alone with its adapters, whatever its neighbours have."""
    sd.adapters.beside(rank=RANK)
    for name in ("ink", "clay", "wool"):
        sd.adapters.load(name, loras / f"{name}.safetensors", 0.0, beside=True)
    own: list[Any] = [{"ink": 0.8}, {"clay": 1.0, "wool": -0.5}, None, {"wool": {"unet": 0.0, "text_encoder": 1.0}}]
    together = sd(["a cat"] * 4, adapters=own, seed=[1] * 4, **STEPS)
    alone = [pixels(sd, adapters=one or {}) for one in own]
    for i, image in enumerate(alone):
        np.testing.assert_allclose(together.pixels[i], image[0], atol=1e-4)
        assert all(np.abs(image - other).max() > 1e-2 for other in alone[:i])
    np.testing.assert_array_equal(alone[2], pixels(sd))  # without adapters it is the plain program
    told = [one.get("adapters", {}) for one in together.metadata]
    assert [{name: entry["weight"] for name, entry in one.items()} for one in told] == [
        {"ink": 0.8}, {"clay": 1.0, "wool": -0.5}, {}, {"wool": {"unet": 0.0, "text_encoder": 1.0}},
    ]  # fmt: skip
    assert told[0]["ink"]["file"].endswith("ink.safetensors")
    assert len(told[0]["ink"]["sha256"]) == 64


def test_an_adapter_that_comes_while_slots_are_made(
    sd: canvax.Pipeline, loras: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread loads it; it must not end in slots that are replaced a moment later."""
    sd.adapters.load("ink", loras / "ink.safetensors", 0.0, beside=True)
    making, loaded = threading.Event(), threading.Event()

    class Slow(Bank):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            making.set()
            loaded.wait(1)

    def load() -> None:
        making.wait(10)
        sd.adapters.load("clay", loras / "clay.safetensors", 0.0, beside=True)
        loaded.set()

    monkeypatch.setattr("canvax.pipelines.adapters.Bank", Slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(load)
        sd.adapters.beside(rank=RANK)
        other.result()
    assert np.abs(pixels(sd, adapters={"clay": 1.0}) - pixels(sd)).max() > 1e-2


def test_threads_that_ask_first_get_the_same_adapters(sd: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, together = sd.with_controlnet(None), threading.Barrier(2)
    vars(pipe).pop("adapters", None)
    init = Adapters.__init__

    def slowly(self: Adapters, of: Any) -> None:
        with suppress(threading.BrokenBarrierError):  # of a Python that makes one at a time
            together.wait(0.5)
        init(self, of)

    monkeypatch.setattr(Adapters, "__init__", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: pipe.adapters, range(2))
    assert first is second


def test_nothing_compiles(sd: canvax.Pipeline, loras: Path) -> None:
    """Loading, weighing, exchanging and removing, once images with adapters were made at all."""
    sd.adapters.beside(rank=RANK, places=2)
    sd.adapters.load("ink", loras / "ink.safetensors", beside=True)
    pixels(sd)
    with counting() as counts:
        sd.adapters.load("clay", loras / "clay.safetensors", 0.5, beside=True)
        both = pixels(sd)
        sd.adapters.set({"clay": {"unet.up_blocks.1": 0.25}})
        blocks = pixels(sd)
        sd.adapters.remove("ink")
        sd.adapters.load("wool", loras / "wool.safetensors", beside=True)
        other = pixels(sd)
        mixed = pixels(sd, adapters=[{"clay": 0.5, "wool": 0.25}])
    assert counts.compilations == 0
    different = [both, blocks, other, mixed]
    assert all(np.abs(a - b).max() > 1e-3 for i, a in enumerate(different) for b in different[:i])


@pytest.mark.slow
def test_weights_of_blocks_are_those_of_merging(sd: canvax.Pipeline, loras: Path) -> None:
    table = {"unet": {"up": 0.3}, "text_encoder": 0.5}
    sd.adapters.load("ink", loras / "ink.safetensors", table)
    merged = pixels(sd)
    sd.adapters.remove()
    sd.adapters.load("ink", loras / "ink.safetensors", beside=True)  # which makes places of its rank
    assert sd.adapters._bank is not None
    assert (sd.adapters._bank.places.rank, sd.adapters._bank.places.count) == (8, 4)
    sd.adapters.set({"ink": table})
    np.testing.assert_allclose(pixels(sd), merged, atol=1e-4)


def test_a_weight_of_0_for_one_network_alone(sd: canvax.Pipeline, loras: Path) -> None:
    """Of what is not named there it is 1."""
    table = {"text_encoder": 0}
    sd.adapters.load("clay", loras / "clay.safetensors", table)
    merged = pixels(sd)
    sd.adapters.remove()
    sd.adapters.load("clay", loras / "clay.safetensors", table, beside=True)
    for asked in (None, {"clay": table}):
        result = sd("a cat", adapters=asked, seed=1, **STEPS)
        np.testing.assert_allclose(result.pixels, merged, atol=1e-4)
        assert result.metadata[0]["adapters"]["clay"]["weight"] == table
    off = sd("a cat", adapters={"clay": {**table, "unet": 0}}, seed=1, **STEPS)
    assert "adapters" not in off.metadata[0]


@pytest.mark.slow
def test_prompts_name_their_own(sd: canvax.Pipeline, loras: Path) -> None:
    """``<lora:...>`` may differ; of a folder the one that was not used for longest makes room."""
    sd.adapters.beside(rank=RANK, places=2)
    sd.adapters.folder = loras
    found = sd(["a cat <lora:ink:0.5>", "a cat <lora:clay:0:0.7>", "a cat"], seed=[1] * 3, **STEPS)
    assert [one["prompt"] for one in found.metadata] == ["a cat"] * 3
    assert set(sd.adapters) == {"ink", "clay"}
    pixels(sd, "a cat <lora:ink>")
    with counting() as counts:
        wool = sd(["a cat <lora:wool:0.5>", "a cat <lora:ink:0.5>", "a cat"], seed=[1] * 3, **STEPS)
    assert counts.compilations == 0
    assert set(sd.adapters) == {"ink", "wool"}
    np.testing.assert_allclose(wool.pixels[1], found.pixels[0], atol=1e-4)
    np.testing.assert_allclose(wool.pixels[2], found.pixels[2], atol=1e-4)
    with refused("adapter"):
        pixels(sd, ["<lora:wool>", "<lora:ink>", "<lora:clay>"])
    with refused("prompt"):
        pixels(sd, "a cat <lora:inc>")
    with refused("prompt"):
        pixels(sd, "a cat <lora:../loras/ink>")


@pytest.mark.weekly
def test_given_images_and_masks(sd: canvax.Pipeline, loras: Path) -> None:
    """Image to image and inpainting, in two passes, with one guidance and with none, as merged ones."""
    image, mask = np.full((64, 64, 3), 0.4, np.float32), np.zeros((64, 64), np.float32)
    mask[:, 32:] = 1
    hires = canvax.Options(hires=1.5)
    several = canvax.Options(pag_scale=2.0, prompt_syntax="a1111")
    kinds: list[dict[str, Any]] = [
        {"image": image, "strength": 0.7},
        {"image": image, "mask": mask},
        {"guidance_scale": 1.0, "options": hires},
        {"prompt": "a cat AND (a dog:1.2) :0.5", "options": several},
    ]
    sd.adapters.load("clay", loras / "clay.safetensors", 0.8)
    merged = [pixels(sd, **kind) for kind in kinds]
    sd.adapters.remove()
    sd.adapters.load("clay", loras / "clay.safetensors", 0.8, beside=True)
    for kind, wanted in zip(kinds, merged, strict=True):
        # A second pass makes roundings large: merged ones in another batch are 4e-4 apart as well.
        np.testing.assert_allclose(pixels(sd, **kind), wanted, atol=1e-3 if kind.get("options") is hires else 1e-4)


@pytest.mark.weekly
def test_rows_at_a_time(sd: canvax.Pipeline, loras: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed-forward layers of large images go by rows of one image; its adapters go with them."""
    monkeypatch.setattr("canvax.kernels.outline.LARGE_ROWS", 1)
    monkeypatch.setattr("canvax.kernels.outline.ROWS", 16)
    sd.adapters.load("ink", loras / "ink.safetensors", 0.0, beside=True)
    size = {"height": 72, "width": 64}
    both = sd(["a cat"] * 2, adapters=[{"ink": 1.0}, None], seed=[1, 1], **size, **STEPS).pixels
    np.testing.assert_allclose(both[1], pixels(sd, **size)[0], atol=1e-4)
    sd.adapters.remove()
    sd.adapters.load("ink", loras / "ink.safetensors")
    np.testing.assert_allclose(both[0], pixels(sd, **size)[0], atol=1e-4)


EXACT: dict[str, Make] = {
    "lora with a core": lora_tucker,
    "loha": loha,
    "lokr of wholes": lokr("whole", "whole"),
    "lokr of a whole and a product": lokr("whole", "product"),
    "lokr of products": lokr("product", "product"),
    "lokr with a core": lokr("whole", "tucker"),
}
KERNEL = 4


@pytest.mark.parametrize("name", EXACT)
def test_what_is_of_low_rank(name: str) -> None:
    """Factors are the change itself, for matrices, convolutions and 1x1 convolutions."""
    from canvax.adapters import Part, change, low_rank

    ends = {"hada_": "hada_", "lokr_": "", "lora_": ""}
    for shape in ((32, 24), (32, 24, 3, 3), (32, 24, 1, 1)):
        if "core" in name and len(shape) != KERNEL:
            continue
        made = EXACT[name](Draw(3), shape)
        arrays = {}
        for end, array in made.arrays.items():
            role = end.strip(".").removesuffix(".weight")
            start = next((start for start in ends if role.startswith(start)), "")
            arrays[ends.get(start, "") + role.removeprefix(start)] = array
        arrays.pop("alpha")
        part = Part("lora" if "up" in arrays else "loha" if "hada_w1_a" in arrays else "lokr", arrays, scale=0.37)
        wanted = change(np.zeros(shape, np.float32), part)
        down, up = low_rank(part, shape)
        assert len(down) == up.shape[1]
        np.testing.assert_allclose(np.tensordot(up, down, 1).reshape(shape), wanted, atol=1e-5)


def test_what_is_not(sd: canvax.Pipeline, tmp_path: Path) -> None:
    """Refused with the other way, and nothing is changed."""
    path = adapter(tmp_path / "dora.safetensors", sd, 0, dora(0), "attn1.to_q")
    with pytest.raises(InputError, match=r"cannot be beside the weights: .*LoRA with DoRA is no low-rank"):
        sd.adapters.load("dora", path, beside=True)
    assert not sd.adapters
    sd.adapters.beside(rank=2, layers="attention")
    ink = adapter(tmp_path / "ink.safetensors", sd, 0, only="attn1")
    with pytest.raises(InputError, match=r"has a rank of [3-6], and places have 2; .*beside\(rank=[48]\)"):
        sd.adapters.load("ink", ink, beside=True)
    convolutions = adapter(tmp_path / "conv.safetensors", sd, 0, only="conv")
    with pytest.raises(InputError, match="has no place in layers='attention'"):
        sd.adapters.load("conv", convolutions, beside=True)
    assert not sd.adapters
    with pytest.raises(InputError, match="layers='most' is not known"):
        sd.adapters.beside(layers="most")


def test_arguments(sd: canvax.Pipeline, loras: Path, tmp_path: Path) -> None:
    with refused("adapters"):
        sd("a cat", adapters={"ink": 1.0}, **STEPS)
    sd.adapters.load("ink", loras / "ink.safetensors", beside=True)
    with pytest.warns(HintWarning, match="beside the weights are not in what is saved: ink"):
        sd.save(tmp_path / "model")
    sd.adapters.load("clay", loras / "clay.safetensors")
    for asked in (
        {"inc": 1.0},
        {"clay": 1.0},
        {"ink": "much"},
        {"ink": {"unet.up_blocks": 1}},
        ["ink"],
        [None, None],
    ):
        with refused("adapters", "adapter", "weight"):
            sd("a cat", adapters=asked, **STEPS)


@pytest.mark.weekly
def test_a_pickled_pipeline_brings_them(sd: canvax.Pipeline, loras: Path) -> None:
    sd.adapters.beside(rank=RANK, places=2)
    sd.adapters.load("ink", loras / "ink.safetensors", 0.6, beside=True)
    again = pickle.loads(pickle.dumps(sd))
    assert again.adapters._bank.places == Places(2, RANK)
    np.testing.assert_allclose(pixels(again), pixels(sd), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("mesh", marks=pytest.mark.weekly), "int8"])
def test_split_and_quantised_weights(form: str, folder: Path, loras: Path, sd: canvax.Pipeline) -> None:
    """On eight devices, the weights split over some; and beside weights of 8 bits, which keep their bits."""
    mesh = {"mesh": canvax.make_mesh(jax.devices()[:8], data=4, model=2)}
    more: dict[str, Any] = {"quantize": "int8"} if form == "int8" else mesh
    pipe = canvax.load(folder, **more)
    assert pipe.params is not None
    before = jax.tree.map(np.asarray, pipe.params)
    pipe.adapters.beside(rank=RANK, places=2)
    pipe.adapters.load("ink", loras / "ink.safetensors", 0.0, beside=True)
    pipe.adapters.load("clay", loras / "clay.safetensors", 0.0, beside=True)
    own: list[Any] = [{"ink": 0.8}, {"clay": 1.0}, None]
    found = pipe(["a cat"] * 3, adapters=own, seed=[1] * 3, **STEPS).pixels
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, pipe.params))
    if form == "int8":
        alone = [pixels(pipe, adapters=one or {})[0] for one in own]
    else:
        sd.adapters.beside(rank=RANK, places=2)
        for name in ("ink", "clay"):
            sd.adapters.load(name, loras / f"{name}.safetensors", 0.0, beside=True)
        alone = [pixels(sd, adapters=one or {})[0] for one in own]
    np.testing.assert_allclose(found, np.stack(alone), atol=2e-4)


@pytest.mark.weekly
def test_both_encoders_of_sdxl(tmp_path: Path) -> None:
    pipe = canvax.load(build(tmp_path / "xl"), mesh=one_device())
    ink = adapter(tmp_path / "ink.safetensors", pipe, 0)
    own: list[Any] = [{"text_encoder": 1, "text_encoder_2": 0, "unet": 0.5}, {"text_encoder_2": 0.7, "unet": 0}]
    merged = []
    for weight in own:
        pipe.adapters.load("ink", ink, weight)
        merged.append(pixels(pipe)[0])
        pipe.adapters.remove()
    pipe.adapters.load("ink", ink, beside=True)
    found = pipe(["a cat"] * 2, adapters=[{"ink": one} for one in own], seed=[1, 1], **STEPS).pixels
    np.testing.assert_allclose(found, np.stack(merged), atol=2e-4)


@pytest.mark.weekly
def test_with_a_controlnet(sd: canvax.Pipeline, loras: Path, tmp_path: Path) -> None:
    """Adapters are beside the UNet's weights alone, those that came along too."""
    net = controlnet(tmp_path / "control", sd)
    steered = sd.with_controlnet(net)
    image = np.random.default_rng(0).random((64, 64, 3), np.float32)
    steered.adapters.load("ink", loras / "ink.safetensors", 0.6)
    merged = pixels(steered, control=image)
    steered.adapters.remove()
    plain = pixels(steered, control=image)
    sd.adapters.load("ink", loras / "ink.safetensors", 0.6, beside=True)
    steered = sd.with_controlnet(net)
    np.testing.assert_allclose(pixels(steered, control=image), merged, atol=1e-4)
    assert np.abs(merged - plain).max() > 1e-2
    assert np.abs(merged - pixels(sd)).max() > 1e-2
