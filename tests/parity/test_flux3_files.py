"""FLUX.3 klein in the files that people download, and saved again, beside the folder that diffusers wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import safetensors.numpy  # noqa: E402

import canvax  # noqa: E402
from canvax.cli import main  # noqa: E402
from canvax.families.flux3 import FLUX3, NAMES  # noqa: E402
from canvax.families.local_models import local_models  # noqa: E402
from canvax.models.flux3 import Flux3Config, flux3_spec  # noqa: E402
from canvax.weights.data_folder import find_named, using  # noqa: E402
from canvax.weights.formats import whole_name  # noqa: E402
from canvax.weights.rules import Names  # noqa: E402
from canvax.weights.safetensors import ArrayToSave  # noqa: E402
from tests.support.ldm_files import ldm_vae  # noqa: E402

from .test_flux2_files import assert_same, load  # noqa: E402
from .test_flux3 import build  # noqa: E402
from .test_z_image_files import Arrays, arrays, scaled, shapes_of, write  # noqa: E402


def original(found: Arrays) -> Arrays:
    """Arrays of diffusers' transformer under the names of the authors, by a table that is the test's."""
    spelled = {
        "single_transformer_blocks.": "single_blocks.", "x_embedders.": "emb_in.", "context_embedder.": "txt_in.",
        "attn.to_q.": "q_proj.", "attn.to_k.": "k_proj.", "attn.to_v.": "v_proj.", "attn.to_out.0.": "attn_out.",
        "attn.norm_q.weight": "norm.query_norm.scale", "attn.norm_k.weight": "norm.key_norm.scale",
        "ff.linear_in.": "mlp_in.", "ff.linear_out.": "mlp_out.", "target_timestep_embedder.": "ref_time_in.",
        "timestep_embedder.": "time_in.", "_in.linear_1.": "_in.in_layer.", "_in.linear_2.": "_in.out_layer.",
        "proj_out.": "final_layer.image.linear.", "norm_out.linear.": "final_layer.image.adaLN_modulation.1.",
    }  # fmt: skip
    named = {}
    for name, array in found.items():
        if name == "norm_out.linear.weight":
            array = np.roll(array, len(array) // 2, axis=0)
        if name.startswith("mode_blocks."):
            name = f"content_{name}"
        if "modulations" in name:
            name = name.replace(".linear.", ".lin.")
        for ours, theirs in spelled.items():
            name = name.replace(ours, theirs)
        named[name] = array
    return named


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the released models are the facts that no array tells."""
    path = tmp_path_factory.mktemp("files") / "klein"
    build(path, distilled=True, groups=32)
    return path


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Transformer, text encoder and autoencoder as files, and the tokenizer's folder."""
    into = tmp_path_factory.mktemp("comfy")
    state = {name: torch.from_numpy(array) for name, array in arrays(folder, "vae").items()}
    vae = {name: array.numpy() for name, array in ldm_vae(state).items()}
    for name in [name for name in vae if "quant_conv" in name]:
        vae[f"{'decoder' if name.startswith('post') else 'encoder'}.{name}"] = vae.pop(name)
    shutil.copytree(folder / "tokenizer", into / "words")
    return {
        "model": write(into / "flux-3-klein.safetensors", original(arrays(folder, "transformer"))),
        "text_encoder": write(into / "qwen3vl_4b_bf16.safetensors", arrays(folder, "text_encoder")),
        "vae": write(into / "flux2-vae.safetensors", vae),
        "tokenizer": into / "words",
    }


@pytest.fixture(scope="module")
def wanted(folder: Path) -> canvax.Pipeline:
    return load(folder)


def test_single_files(files: dict[str, Path], folder: Path, wanted: canvax.Pipeline, tmp_path: Path) -> None:
    """Weights and configs are those of the folder, and diffusers reads the transformer likewise.

    Heads for training are passed over. The distilled model is known by its arrays.
    """
    theirs = diffusers.Flux3Transformer2DModel.from_single_file(str(files["model"]), config=str(folder / "transformer"))
    for name, array in arrays(folder, "transformer").items():
        np.testing.assert_array_equal(theirs.state_dict()[name].numpy(), array)
    pipe = load(files["model"], files)
    assert pipe.model.networks == wanted.model.networks
    assert pipe.model.scheduler.schedule.shift == wanted.model.scheduler.schedule.shift == 6.93
    assert_same(pipe.params, wanted.params)
    named = safetensors.numpy.load_file(files["model"]) | {"repa_projectors.0.weight": np.ones((2, 2), np.float32)}
    more = write(tmp_path / "mine.safetensors", {f"model.diffusion_model.{name}": named[name] for name in named})
    assert_same(load(more, files, vae=folder, text_encoder=folder).params, wanted.params)
    base = {name: array for name, array in named.items() if not name.startswith("ref_time_in.")}
    pipe = load(write(tmp_path / "base.safetensors", base), files)
    assert (pipe.model.defaults.num_inference_steps, pipe.model.networks.denoiser.facts.distilled) == (50, False)


def test_scaled_float8(files: dict[str, Path], tmp_path: Path) -> None:
    named = safetensors.numpy.load_file(files["model"])
    small = scaled(named, "weight_scale")
    plain: Arrays = {}
    for name in named:
        scale = small.get(f"{name.removesuffix('weight')}weight_scale")
        plain[name] = small[name] if scale is None else np.asarray(small[name], np.float32) * scale
    assert plain["single_blocks.1.mlp_in.weight"].dtype != small["single_blocks.1.mlp_in.weight"].dtype
    one, other = (load(write(tmp_path / f"{name}.safetensors", found), files).params
                  for name, found in (("small", small), ("plain", plain)))  # fmt: skip
    assert_same(one, other)


def test_gguf(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Weights are the numbers in the files."""
    pytest.importorskip("gguf")
    from tests.support.gguf_files import both

    small, plain = both(files, arrays(folder, "text_encoder"), tmp_path, "Q4_0")
    assert_same(*(load(found["model"], found).params for found in (small, plain)))


def test_files_that_do_not_fit(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(canvax.InputError) as caught:
        load(files["model"])
    assert (caught.value.argument, "{text_encoder=" in caught.value.cure) == ("model", True)
    named = safetensors.numpy.load_file(files["model"])
    for name, changed in {
        "missing": {key: array for key, array in named.items() if key != "single_blocks.1.q_proj.weight"},
        "stray": {**named, "single_blocks.1.wx.weight": np.ones(2, np.float32)},
    }.items():
        with pytest.raises(canvax.CheckpointError):
            load(write(tmp_path / f"{name}.safetensors", changed), files)


def test_info(files: dict[str, Path], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is recognised, with the flag that takes it, and the folder."""
    for name, flag in {"model": "--model", "text_encoder": "--text-encoder", "vae": "--vae"}.items():
        assert main(["info", str(files[name]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["flag"] == flag
        assert name != "model" or report["family"] == "FLUX.3"
    assert main(["info", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["defaults"]["num_inference_steps"] == 16


def assert_same_files(saved: Path, folder: Path, *more: str) -> None:
    """The same arrays, those that canvax does not read included, and diffusers loads them by the index."""
    for name in ("transformer", "text_encoder", "vae"):
        one, other = ({whole_name(key) if name == "text_encoder" else key: array
                       for key, array in arrays(path, name).items()} for path in (saved, folder))  # fmt: skip
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)
    theirs = diffusers.ModularPipeline.from_pretrained(str(saved))
    assert type(theirs).__name__ == "Flux3DistilledModularPipeline"
    assert type(theirs.blocks).__name__ == "Flux3DistilledAutoBlocks"
    for name in ("transformer", "vae", *more):
        theirs.load_components(names=[name])
        state, wanted = getattr(theirs, name).state_dict(), arrays(folder, name)
        assert all(np.array_equal(state[key].numpy(), array) for key, array in wanted.items())


def test_saved(folder: Path, wanted: canvax.Pipeline, tmp_path: Path) -> None:
    """A saved folder is the same model in canvax and in diffusers, whatever was in it before."""
    (tmp_path / "model_index.json").write_text("{}")
    wanted.save(tmp_path, overwrite=True)
    assert_same_files(tmp_path, folder, "text_encoder")
    saved = load(tmp_path)
    assert saved.model.networks == wanted.model.networks
    assert saved.model.scheduler.schedule.shift == 6.93
    assert_same(saved.params, wanted.params)
    saved.save(tmp_path / "again")
    assert (tmp_path / "again" / "modular_model_index.json").read_text() == (
        tmp_path / "modular_model_index.json"
    ).read_text()


def test_converted(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Files become a folder, without a device; it is a model of a folder of models."""
    flags = {"--vae": "vae", "--text-encoder": "text_encoder", "--tokenizer": "tokenizer"}
    words = [word for flag, name in flags.items() for word in (flag, str(files[name]))]
    assert main(["convert", str(files["model"]), str(tmp_path / "folder"), "-q", *words]) == 0
    assert_same_files(tmp_path / "folder", folder)
    with using(str(tmp_path)):
        assert local_models().models == {"folder": tmp_path / "folder"}
        assert find_named("folder", "model") == tmp_path / "folder"


def test_a_component_in_another_repository(folder: Path, tmp_path: Path) -> None:
    """One that is read is asked for by its name; the prompt upsampler is left out, with a warning."""
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    index = json.loads((model / "modular_model_index.json").read_text())
    elsewhere = {"pretrained_model_name_or_path": "someone/else", "subfolder": "", "revision": None, "variant": None}
    index["prompt_upsampler"] = [None, None, {"type_hint": ["transformers", "Qwen3_5Model"], **elsewhere}]
    (model / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.warns(canvax.HintWarning, match="prompt_upsampler"):
        load(model)
    index["text_encoder"] = [None, None, index["text_encoder"][2] | elsewhere]
    (model / "modular_model_index.json").write_text(json.dumps(index))
    shutil.rmtree(model / "text_encoder")
    with pytest.raises(canvax.CheckpointError, match=r"text_encoder.*someone/else"):
        load(model)


@pytest.mark.parametrize(("flow_map", "count"), [(False, 357), (True, 359)])
def test_sizes_of_the_released_files(flow_map: bool, count: int) -> None:
    """How many arrays, and the config that is read off shapes."""
    with torch.device("meta"):
        theirs = diffusers.Flux3Transformer2DModel(flow_map=flow_map).state_dict()
    cfg = Flux3Config(flow_map=flow_map)
    spec = flux3_spec(cfg)
    assert shapes_of(spec, Names(FLUX3.stacks)) == {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    empty = [
        ArrayToSave(name, shape, np.dtype("float32"), lambda: np.zeros(0)) for name, shape in shapes_of(spec).items()
    ]
    assert len(Names(NAMES).to_external(empty)) == count
    assert FLUX3.single_file is not None
    assert Flux3Config.from_dict(FLUX3.single_file.config(shapes_of(spec))) == cfg
