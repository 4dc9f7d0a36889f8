"""Adapters and textual inversions against PyTorch diffusers and peft, on small random models; and where they err."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import canvax
from tests.support.adapter_files import Draw, Made, dora, kohya, kohya_ldm, layers, loha, lora, without_alpha, write
from tests.support.drawing import one_device
from tests.support.small_sdxl import build as build_xl

from .peer import build
from .reference import nchw, psnr, relative_error

CALL = {"prompt": "a red apple", "negative_prompt": "blurry", "guidance_scale": 4.0, "num_inference_steps": 4}
PEFT_ENDS = {".lora_down.weight": ".lora_A.weight", ".lora_up.weight": ".lora_B.weight"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match:RuntimeWarning"),
]
CLOSE = 60.0
"""PSNR in dB."""


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    return both(build(tmp_path_factory.mktemp("sd"), "epsilon"), diffusers.StableDiffusionPipeline)


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, canvax.Pipeline]:
    return both(build_xl(tmp_path_factory.mktemp("xl")), diffusers.StableDiffusionXLPipeline)


def both(folder: Path, kind: Any) -> tuple[Any, canvax.Pipeline]:
    theirs = kind.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    return theirs, canvax.load(folder, mesh=one_device())


@pytest.fixture(autouse=True)
def without(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"sd", "xl"} & set(request.fixturenames):
        theirs, ours = request.getfixturevalue(name)
        theirs.unload_lora_weights()
        ours.adapters.remove()


def images(pipes: tuple[Any, canvax.Pipeline]) -> tuple[np.ndarray, np.ndarray]:
    theirs, ours = pipes
    height = theirs.unet.config.sample_size * theirs.vae_scale_factor
    shape = (1, height // theirs.vae_scale_factor, height // theirs.vae_scale_factor, 4)
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    want = theirs(**CALL, height=height, width=height, latents=nchw(noise), output_type="np").images
    more = {"sampler": type(theirs.scheduler).__name__, "latents": noise, "progress": False}
    return ours(**CALL, height=height, width=height, **more).pixels, want


def file_of(
    pipe: canvax.Pipeline,
    path: Path,
    make: Callable[[Draw, tuple[int, ...]], Made],
    name: Callable[[str, str], str],
    *,
    ends: dict[str, str] | None = None,
    seed: int = 0,
    text: bool = True,
) -> Path:
    """An adapter of all attention and its feed-forward in the UNet, and of the text encoders."""
    draw, arrays = Draw(seed), {}
    for (component, module), shape in layers(pipe.model.networks.specs()).items():
        if (text and component != "unet") or "transformer_blocks" in module:
            made = make(draw, shape)
            for end, array in made.arrays.items():
                arrays[name(component, module) + (ends or {}).get(end, end)] = array
    return write(path, arrays)


def uniform(draw: Draw, shape: tuple[int, ...]) -> Made:
    """A LoRA of rank 4 and alpha 3, as most files are: of one rank and one alpha."""
    out, into, *kernel = shape
    down, up = draw(4, into, *kernel, scale=0.15), draw(out, 4, *[1] * len(kernel), scale=0.15)
    arrays = {".lora_down.weight": down, ".lora_up.weight": up, ".alpha": np.float32(3).reshape(())}
    return Made(arrays, lambda w: w)


def peft(component: str, module: str) -> str:
    return f"{component}.{module}"


def check_alike(pipes: tuple[Any, canvax.Pipeline], file: Path, plain: np.ndarray | None = None) -> None:
    theirs, ours = pipes
    before, _ = images(pipes) if plain is None else (plain, None)
    theirs.load_lora_weights(file.parent, weight_name=file.name, adapter_name="a")
    ours.adapters.load("a", file)
    got, want = images(pipes)
    assert psnr(got, want) > CLOSE
    assert psnr(got, before) < 40  # it does something


@pytest.mark.slow
def test_peft(sd: Any, tmp_path: Path) -> None:
    """Ranks that differ by layer, no alpha."""
    make = lambda draw, shape: without_alpha(Draw(int(draw.rng.integers(99))), shape)  # noqa: E731
    check_alike(sd, file_of(sd[1], tmp_path / "a.safetensors", small(make), peft, ends=PEFT_ENDS))


def small(make: Callable[[Draw, tuple[int, ...]], Made]) -> Callable[[Draw, tuple[int, ...]], Made]:
    """With weights that leave the image an image."""

    def smaller(draw: Draw, shape: tuple[int, ...]) -> Made:
        made = make(draw, shape)
        for end in (".lora_down.weight", ".lora_up.weight"):
            made.arrays[end] = made.arrays[end] / 2
        return made

    return smaller


@pytest.mark.slow
def test_settings_in_the_header(sd: Any, tmp_path: Path) -> None:
    """alpha, and alpha of some layers, as diffusers saves them."""
    theirs, ours = sd
    file = file_of(ours, tmp_path / "a.safetensors", uniform, peft, text=False)
    arrays = {}
    for name, array in load_file(file).items():
        module, end = name.split(".lora_")[0], ".lora_" + name.split(".lora_")[-1]
        if not name.endswith(".alpha"):
            arrays[module + PEFT_ENDS[end]] = array
    targets = sorted({name.removeprefix("unet.").split(".lora_")[0] for name in arrays})
    config = {"r": 4, "lora_alpha": 8, "alpha_pattern": {targets[0]: 2, targets[5]: 1}, "target_modules": targets}
    header = {"lora_adapter_metadata": json.dumps({f"unet.{name}": value for name, value in config.items()})}
    check_alike(sd, write(tmp_path / "b.safetensors", arrays, header))
    assert theirs.get_list_adapters() == {"unet": ["a"]}


def test_kohya(sd: Any, tmp_path: Path) -> None:
    check_alike(sd, file_of(sd[1], tmp_path / "a.safetensors", uniform, kohya))


@pytest.mark.slow
def test_kohya_of_sdxl(xl: Any, tmp_path: Path) -> None:
    """With the names of ldm, and both text encoders."""
    name = lambda component, module: kohya_ldm(component, module, each=2)  # noqa: E731
    check_alike(xl, file_of(xl[1], tmp_path / "a.safetensors", uniform, name))


def test_dora_of_peft(sd: Any, tmp_path: Path) -> None:
    """Of linear layers, by outputs."""

    def make(draw: Draw, shape: tuple[int, ...]) -> Made:
        made = small(dora(0))(draw, shape)
        made.arrays.pop(".alpha")
        made.arrays[".lora_magnitude_vector"] = made.arrays.pop(".dora_scale").reshape(-1)
        return made

    check_alike(sd, file_of(sd[1], tmp_path / "a.safetensors", make, peft, ends=PEFT_ENDS, text=False))


@pytest.mark.slow
def test_two_with_weights(sd: Any, tmp_path: Path) -> None:
    """Numbers, and a number for each block."""
    theirs, ours = sd
    for seed, name in enumerate(("one", "two")):
        file = file_of(ours, tmp_path / f"{name}.safetensors", uniform, kohya, seed=seed)
        theirs.load_lora_weights(tmp_path, weight_name=file.name, adapter_name=name)
        ours.adapters.load(name, file)
    blocks = {"text_encoder": 0.5, "unet": {"down": 0.25, "mid": 1.5, "up": {"block_1": [0.75, 0.1]}}}
    for weights in ([0.3, 0.8], [1.0, -0.5], [0.5, blocks]):
        theirs.set_adapters(["one", "two"], adapter_weights=weights)
        ours.adapters.set({"one": weights[0], "two": weights[1]})
        got, want = images(sd)
        assert psnr(got, want) > CLOSE, weights


# Where diffusers is wrong, with ours beside it


def test_fault_alpha_of_each_layer(sd: Any, tmp_path: Path) -> None:
    """diffusers takes the commonest alpha of a kohya file for layers whose own is another one."""
    theirs, ours = sd
    file = file_of(ours, tmp_path / "a.safetensors", small(lora), kohya)
    theirs.load_lora_weights(tmp_path, weight_name=file.name, adapter_name="a")
    ours.adapters.load("a", file)
    got, want = images(sd)
    assert psnr(got, want) < 50
    layer, key = theirs.unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q, "mid_block_attentions_0"
    own = next(part for (_, name), part in ours.adapters["a"].adapter.parts.items()
               if name.replace(".", "_").startswith(key) and "attn1.to_q" in name)  # fmt: skip
    assert layer.scaling["a"] != pytest.approx(own.scale)


def test_fault_dora_of_kohya(sd: Any, tmp_path: Path) -> None:
    """diffusers leaves dora_scale out, with a line in the log."""
    theirs, ours = sd
    file = file_of(ours, tmp_path / "a.safetensors", small(dora(0)), kohya, text=False)
    theirs.load_lora_weights(tmp_path, weight_name=file.name, adapter_name="a")
    ours.adapters.load("a", file)
    assert not any("magnitude" in name for name, _ in theirs.unet.named_parameters())
    assert all("dora_scale" in part.arrays for part in ours.adapters["a"].adapter.parts.values())


def test_fault_no_prefix(sd: Any, tmp_path: Path) -> None:
    """diffusers loads nothing of a file of PEFT's whose names do not begin with the component."""
    theirs, ours = sd
    file = file_of(
        ours, tmp_path / "a.safetensors", uniform, lambda component, module: module, ends=PEFT_ENDS, text=False
    )
    write(file, {name: array for name, array in load_file(file).items() if not name.endswith("alpha")})
    theirs.load_lora_weights(tmp_path, weight_name=file.name, adapter_name="a")
    assert not theirs.get_list_adapters()
    assert len(ours.adapters.load("a", file).adapter.parts) > 20


def test_fault_loha(sd: Any, tmp_path: Path) -> None:
    """diffusers refuses LoHa, as not correctly renamed."""
    theirs, ours = sd
    file = file_of(ours, tmp_path / "a.safetensors", loha, kohya)
    with pytest.raises(ValueError, match="not been correctly renamed"):
        theirs.load_lora_weights(tmp_path, weight_name=file.name, adapter_name="a")
    assert len(ours.adapters.load("a", file).adapter.parts) > 20


# Textual inversions


@pytest.mark.parametrize("vectors", [1, 3])
@pytest.mark.parametrize("prompt", ["a photo of <wool>", "<wool> and <wool> cats", "<wool>"])
def test_textual_inversion(vectors: int, prompt: str, sd: Any, tmp_path: Path) -> None:
    theirs, ours = sd
    rows = Draw()(vectors, 48)
    file = write(tmp_path / "learned_embeds.safetensors", {"<wool>": rows if vectors > 1 else rows[0]})
    theirs.load_textual_inversion(tmp_path, weight_name=file.name)
    try:
        want, _ = theirs.encode_prompt(prompt, "cpu", 1, False)
    finally:
        theirs.unload_textual_inversion()
    ours.adapters.load_embedding(tmp_path)
    got = ours.encode(prompt)["text"]
    assert relative_error(got, want.detach().numpy()) < 1e-5


def test_textual_inversion_of_both_encoders(xl: Any, tmp_path: Path) -> None:
    """One file here; there, two calls with what the caller has taken out of it. The pooled output as well."""
    theirs, ours = xl
    first, second = Draw()(2, 16), Draw(1)(2, 24)
    file = write(tmp_path / "wool.safetensors", {"clip_l": first, "clip_g": second})
    for part, vectors in (("", first), ("_2", second)):
        encoder, tokenizer = getattr(theirs, f"text_encoder{part}"), getattr(theirs, f"tokenizer{part}")
        state = {"<wool>": torch.from_numpy(vectors)}
        theirs.load_textual_inversion(state, "<wool>", text_encoder=encoder, tokenizer=tokenizer)
    want, _, pooled, _ = theirs.encode_prompt("a <wool> hat", device="cpu", do_classifier_free_guidance=False)
    ours.adapters.load_embedding(file, "<wool>")
    got = ours.encode("a <wool> hat")
    assert relative_error(got["text"], want.detach().numpy()) < 1e-5
    # Its id there is the largest, which diffusers then takes for the end of the text where the config says 2.
    end = theirs.text_encoder_2.config.eos_token_id
    assert end != 2 or relative_error(got["pooled"], pooled.detach().numpy()) > 1e-2
