"""FLUX.2 klein in the files that people download, and saved again, beside the folder that diffusers wrote."""

from __future__ import annotations

import gc
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import safetensors.numpy  # noqa: E402

import canvax  # noqa: E402
from canvax.adapters import change  # noqa: E402
from canvax.cli import main  # noqa: E402
from canvax.cli.arguments import build_parser  # noqa: E402
from canvax.cli.loading import load_with  # noqa: E402
from canvax.families.flux2 import FLUX2  # noqa: E402
from canvax.models.flux2 import Flux2Config, flux2_spec  # noqa: E402
from canvax.models.flux2_vae import Flux2VaeConfig, flux2_vae_spec  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402
from canvax.planning.plan import architecture  # noqa: E402
from canvax.samplers import build_table  # noqa: E402
from canvax.weights.lora import read_adapter  # noqa: E402
from canvax.weights.overrides import Overrides  # noqa: E402
from canvax.weights.rules import Names  # noqa: E402
from canvax.weights.single_file import vae_config  # noqa: E402
from tests.support.ldm_files import ldm_vae  # noqa: E402

from .test_flux2_pipeline import build, lora, original  # noqa: E402
from .test_z_image_files import Arrays, arrays, scaled, shapes_of, write  # noqa: E402
from .test_z_image_pipeline import build as build_z_image  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the released models are the facts that no array tells."""
    return build(tmp_path_factory.mktemp("files") / "klein", theta=1e6, groups=32)


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Transformer, text encoder and autoencoder as files, and the tokenizer's folder."""
    into = tmp_path_factory.mktemp("comfy")
    state = {name: torch.from_numpy(array) for name, array in arrays(folder, "vae").items()}
    vae = {name: array.numpy() for name, array in ldm_vae(state).items()}
    for name in [name for name in vae if "quant_conv" in name]:
        vae[f"{'decoder' if name.startswith('post') else 'encoder'}.{name}"] = vae.pop(name)
    shutil.copytree(folder / "tokenizer", into / "words")
    transformer = original(folder, into / "original") / "transformer" / "diffusion_pytorch_model.safetensors"
    return {
        "model": Path(shutil.move(transformer, into / "flux-2-klein-4b.safetensors")),
        "text_encoder": write(into / "qwen_3_4b.safetensors", arrays(folder, "text_encoder")),
        "vae": write(into / "flux2-vae.safetensors", vae),
        "tokenizer": into / "words",
    }


def load(model: Path, files: dict[str, Path] | None = None, **changes: Any) -> canvax.Pipeline:
    parts = {name: path for name, path in {**(files or {}), **changes}.items() if name != "model"}
    return canvax.load(model, dtype="float32", mesh=make_mesh(jax.devices()[:1]), progress=False, **parts)


def assert_same(params: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, wanted)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> canvax.Pipeline:
    return load(folder)


def test_single_files(files: dict[str, Path], folder: Path, wanted: canvax.Pipeline, tmp_path: Path) -> None:
    """All weights are those of the folder bit for bit, and all configs; diffusers reads the transformer likewise."""
    theirs = diffusers.Flux2Transformer2DModel.from_single_file(str(files["model"]), config=str(folder / "transformer"))
    for name, array in arrays(folder, "transformer").items():
        np.testing.assert_array_equal(theirs.state_dict()[name].numpy(), array)
    pipe = load(files["model"], files)
    assert pipe.model.networks == wanted.model.networks
    tables = [build_table(one.model.scheduler, 4, settings={"mu": 2.0}) for one in (pipe, wanted)]
    np.testing.assert_array_equal(tables[0].timestep, tables[1].timestep)
    assert_same(pipe.params, wanted.params)
    comfy = {f"model.diffusion_model.{name.replace('norm.scale', 'norm.weight')}": array
             for name, array in safetensors.numpy.load_file(files["model"]).items()}  # fmt: skip
    base = write(tmp_path / "FLUX-2-klein-Base-4b.safetensors", comfy)
    pipe = load(base, files, vae=folder, text_encoder=folder)
    assert (pipe.model.defaults.num_inference_steps, pipe.model.networks.denoiser.facts.distilled) == (50, False)
    assert_same(pipe.params, wanted.params)


def test_the_name_of_a_file_tells_what_its_arrays_do_not(files: dict[str, Path], tmp_path: Path) -> None:
    """Where it does not, the model is taken for the distilled one, with a warning."""
    for name, distilled in (("my-klein", True), ("mine-base", False), ("mine", None)):
        model = shutil.copy(files["model"], tmp_path / f"{name}.safetensors")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe = load(model, files)
        assert [one.category for one in caught] == [canvax.HintWarning] * (distilled is None)
        assert pipe.model.networks.denoiser.facts.distilled == (distilled is not False)


@pytest.mark.parametrize("marker", ["scale_weight", "weight_scale"])
def test_scaled_float8(files: dict[str, Path], tmp_path: Path, marker: str) -> None:
    """Scales are multiplied while loading, in layers that are stacked along either axis too."""
    named = safetensors.numpy.load_file(files["model"])
    small = scaled(named, marker)
    plain: Arrays = {}
    for name in named:
        scale = small.get(f"{name.removesuffix('weight')}{marker}")
        plain[name] = small[name] if scale is None else np.asarray(small[name], np.float32) * scale
    assert plain["single_blocks.1.linear2.weight"].dtype != small["single_blocks.1.linear2.weight"].dtype
    one, other = (load(write(tmp_path / f"{name}.safetensors", found), files).params
                  for name, found in (("small", small), ("plain", plain)))  # fmt: skip
    assert_same(one, other)


def test_gguf(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Weights are the numbers in the files, those of stacked layers and of 8 bits too."""
    pytest.importorskip("gguf")
    from tests.support.gguf_files import both

    small, plain = both(files, arrays(folder, "text_encoder"), tmp_path, "Q5_1")
    for quantize in (None, "int8"):
        one, other = (load(found["model"], found, quantize=quantize).params for found in (small, plain))
        assert_same(one, other)


def test_a_padding_token_with_its_properties(folder: Path, wanted: canvax.Pipeline, tmp_path: Path) -> None:
    """Older releases of transformers write tokens so; without any the checkpoint is refused."""
    words = Path(shutil.copytree(folder / "tokenizer", tmp_path / "words"))
    config = json.loads((words / "tokenizer_config.json").read_text())
    for pad in ({"__type": "AddedToken", "content": config["pad_token"], "lstrip": False}, None):
        (words / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": pad}))
        if pad:
            assert load(folder, tokenizer=words).tokenizer.pad == wanted.tokenizer.pad
        else:
            with pytest.raises(canvax.CheckpointError):
                load(folder, tokenizer=words)


def test_files_that_do_not_fit(files: dict[str, Path], tmp_path: Path) -> None:
    """Parts that are missing are named; FLUX.2 dev, a stack of a wrong size and another autoencoder are refused."""
    with pytest.raises(canvax.InputError) as caught:
        load(files["model"])
    assert (caught.value.argument, "{text_encoder=" in caught.value.cure) == ("model", True)
    named = safetensors.numpy.load_file(files["model"])
    first = "single_blocks.0.linear1.weight"
    for name, changed in {
        "dev": {**named, "guidance_in.in_layer.weight": named["time_in.in_layer.weight"]},
        "ragged": {**named, first: np.concatenate([named[first], named[first][:1]])},
        "missing": {key: array for key, array in named.items() if key != first},
    }.items():
        with pytest.raises(canvax.CheckpointError):
            load(write(tmp_path / f"{name}.safetensors", changed), files)
    vae = {key: array for key, array in safetensors.numpy.load_file(files["vae"]).items() if "bn." not in key}
    with pytest.raises(canvax.CheckpointError):
        load(files["model"], files, vae=write(tmp_path / "ae.safetensors", vae))


def test_info(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is recognised, with the flag that takes it."""
    for name, flag in {"model": "--model", "text_encoder": "--text-encoder", "vae": "--vae"}.items():
        assert main(["info", str(files[name]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["flag"] == flag
        assert name != "model" or report["family"] == "FLUX.2"


def test_commands_that_take_the_parts(
    files: dict[str, Path], wanted: canvax.Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """They know the model by its files: ``info`` and ``plan``, ``compile`` and ``serve``, which has them for one."""
    flags = [word for name, part in files.items() if name != "model"
             for word in (f"--{name.replace('_', '-')}", str(part))]  # fmt: skip
    assert main(["info", str(files["model"]), *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["components"].keys() >= {"transformer", "text_encoder", "vae"}
    assert report["defaults"]["num_inference_steps"] == 4
    parts = {name: path for name, path in files.items() if name != "model"}
    assert architecture(files["model"], Overrides.of(**parts)) == wanted.model.networks
    words = ["compile", str(files["model"]), *flags, "--dtype", "float32", "-q"]
    assert load_with(build_parser().parse_args(words), weights=False).model.networks == wanted.model.networks
    assert main(["serve", str(files["model"]), "emoji", *flags, "--port", "0"]) == 2


def assert_same_files(saved: Path, folder: Path) -> None:
    """diffusers loads the same arrays, those that canvax does not read included."""
    pipes = [diffusers.Flux2KleinPipeline.from_pretrained(path) for path in (saved, folder)]
    assert pipes[0].config.is_distilled == pipes[1].config.is_distilled
    for name in ("transformer", "text_encoder", "vae"):
        one, other = (getattr(pipe, name).state_dict() for pipe in pipes)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert arrays(saved, name).keys() == arrays(folder, name).keys()


def test_saved(files: dict[str, Path], folder: Path, wanted: canvax.Pipeline, tmp_path: Path) -> None:
    """A saved folder is the same model in canvax and in diffusers."""
    load(files["model"], files).save(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", folder)
    saved = load(tmp_path / "saved")
    assert saved.model.networks == wanted.model.networks
    assert_same(saved.params, wanted.params)


def test_converted(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Files become a folder, without a device."""
    flags = {"--vae": "vae", "--text-encoder": "text_encoder", "--tokenizer": "tokenizer"}
    words = [word for flag, name in flags.items() for word in (flag, str(files[name]))]
    assert main(["convert", str(files["model"]), str(tmp_path / "folder"), "-q", *words]) == 0
    assert_same_files(tmp_path / "folder", folder)


@pytest.mark.parametrize(("layers", "heads", "text", "count"), [((5, 20), 24, 7680, 169), ((8, 24), 32, 12288, 233)])
def test_sizes_of_the_released_files(layers: tuple[int, int], heads: int, text: int, count: int) -> None:
    """Of klein 4B and 9B: how many arrays, and the config that is read off shapes."""
    cfg = Flux2Config(num_layers=layers[0], num_single_layers=layers[1], num_attention_heads=heads,
                      joint_attention_dim=text, guidance_embeds=False)  # fmt: skip
    spec = flux2_spec(cfg)
    assert len(shapes_of(spec, Names(FLUX2.stacks))) == count
    assert FLUX2.single_file is not None
    assert Flux2Config.from_dict(FLUX2.single_file.config(shapes_of(spec))) == cfg


@pytest.mark.parametrize("cfg", [Flux2VaeConfig(), Flux2VaeConfig(decoder_block_out_channels=(96, 192, 384, 384))])
def test_sizes_of_the_released_autoencoders(cfg: Flux2VaeConfig) -> None:
    """The usual one, and the one with a small decoder."""
    assert Flux2VaeConfig.from_dict(vae_config(shapes_of(flux2_vae_spec(cfg)), {})) == cfg


def on_devices(pipe: canvax.Pipeline, others: set[int]) -> set[str]:
    """Components a weight of which is on the devices now, ``others`` aside."""
    held = {(array.shape, str(array.dtype)) for array in jax.live_arrays()
            if array.ndim == 2 and array.sharding.memory_kind == "device" and id(array) not in others}  # fmt: skip
    shapes = {
        name: {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
        for name, params in pipe.params.items()
    }
    return {name for name, alone in shapes.items()
            if held & (alone - set().union(*(shapes[other] for other in shapes.keys() - {name})))}  # fmt: skip


@pytest.mark.parametrize("family", ["flux2", "z-image"])
@pytest.mark.slow
def test_offloading(family: str, folder: Path, tmp_path: Path) -> None:
    """While denoising only the transformer is on the devices, afterwards nothing, and the image is the same."""
    model = folder if family == "flux2" else build_z_image(tmp_path / "z-image")
    asked: dict[str, Any] = {"seed": 1, "num_inference_steps": 2, "height": 32, "width": 32, "progress": False}
    usual = load(model)
    want, sizes = usual("a fox", **asked).pixels, usual.memory(32, 32)
    kept = jax.live_arrays()
    others = set(map(id, kept))
    assert on_devices(usual, set()) == usual.params.keys()
    pipe, seen = load(model, offload=True), []
    assert on_devices(pipe, others) == set()
    got = pipe("a fox", callback=lambda step: seen.append(on_devices(pipe, others)), **asked)
    np.testing.assert_array_equal(got.pixels, want)
    assert seen == [{"transformer"}] * 2
    gc.collect()
    assert on_devices(pipe, others) == set()
    if family == "flux2":
        pipe.adapters.load("style", lora(tmp_path / "style.safetensors", "peft"))
        assert on_devices(pipe, others) == set()
    assert pipe("a hen", **asked).compilations == 0
    assert pipe.memory(32, 32).total == sizes.offloaded < sizes.total
    pipe.save(tmp_path / "saved")
    assert pipe.encode("a fox")["text"].sharding.memory_kind == "device"


def test_lokr_of_stacked_layers(tmp_path: Path) -> None:
    """Products of which layers are rows or columns, whose ends are not those of blocks, and one with swapped halves."""
    cfg = Flux2Config(in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
                      joint_attention_dim=48, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False)  # fmt: skip
    rng, found, wanted = np.random.default_rng(0), {}, {}
    single, double = "transformer.single_transformer_blocks.1.", "transformer.transformer_blocks.0."
    stacks: dict[str, tuple[tuple[int, int], tuple[int, int], int, list[str]]] = {
        "single_blocks.1.linear1": ((18, 4), (16, 8), 0, ["attn.to_q", "attn.to_k", "attn.to_v", "ff.gate", "ff.up"]),
        "single_blocks.1.linear2": ((4, 2), (8, 64), 1, ["attn.to_out.0", "ff.down"]),
        "double_blocks.0.img_attn.qkv": ((4, 4), (24, 8), 0, ["attn.to_q", "attn.to_k", "attn.to_v"]),
        "final_layer.adaLN_modulation.1": ((8, 4), (8, 8), 0, []),
    }
    for name, (one, other, axis, layers) in stacks.items():
        w1, w2 = (rng.standard_normal(shape).astype(np.float32) for shape in (one, other))
        found |= {f"diffusion_model.{name}.lokr_w1": w1, f"diffusion_model.{name}.lokr_w2": w2}
        whole, begin = np.kron(w1, w2), 0
        for layer in layers:
            size = 96 if layer.startswith("ff") else 32
            stem = single if name.startswith("single") else double
            wanted[f"{stem}{layer}"] = whole.take(range(begin, begin + size), axis)
            begin += size
        if not layers:
            wanted["transformer.norm_out.linear"] = np.roll(whole, 32, axis=0)
    adapter = read_adapter(write(tmp_path / "lokr.safetensors", found), {"transformer": flux2_spec(cfg)})
    made = {".".join(key).removesuffix(".weight"): change(np.zeros_like(wanted[".".join(key).removesuffix(".weight")]),
                                                          part) for key, part in adapter.parts.items()}  # fmt: skip
    assert made.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(made[name], array, rtol=1e-6)
