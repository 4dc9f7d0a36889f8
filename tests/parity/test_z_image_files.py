"""Z-Image in the files that ComfyUI has, and saved again, beside the folder that diffusers wrote with these weights."""

from __future__ import annotations

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

import ml_dtypes  # noqa: E402
import safetensors.numpy  # noqa: E402

import canvax  # noqa: E402
from canvax.cli import main  # noqa: E402
from canvax.families.convert import convert  # noqa: E402
from canvax.families.local_models import local_models  # noqa: E402
from canvax.families.z_image import Z_IMAGE  # noqa: E402
from canvax.models.clip import clip_encoders  # noqa: E402
from canvax.models.configs import ClipTextConfig  # noqa: E402
from canvax.models.decoder_lm import DecoderConfig, decoder_lm_spec  # noqa: E402
from canvax.models.z_image import ZImageConfig, z_image_spec  # noqa: E402
from canvax.parallel.mesh import make_mesh  # noqa: E402
from canvax.params import flatten  # noqa: E402
from canvax.weights.language_model import language_model_config  # noqa: E402
from canvax.weights.rules import Names  # noqa: E402
from canvax.weights.safetensors import ArrayToSave  # noqa: E402
from tests.support.ldm_files import ldm_vae  # noqa: E402

from .test_z_image_pipeline import PROMPTS, build, draw, noise, reference  # noqa: E402

Arrays = dict[str, np.ndarray]

RENAMED = {
    "to_out.0": "out", "norm_q": "q_norm", "norm_k": "k_norm", "all_x_embedder.2-1": "x_embedder",
    "all_final_layer.2-1": "final_layer",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the released models are the facts that no array tells: axes, groups of the autoencoder, base of positions."""
    path = tmp_path_factory.mktemp("files") / "z-image"
    return build(path, axes=(4, 6, 6), theta=1e6, groups=32)


def arrays(folder: Path, component: str) -> Arrays:
    (path,) = (folder / component).glob("*.safetensors")
    return safetensors.numpy.load_file(path)


def write(path: Path, arrays: Arrays) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return path


def comfy(folder: Path) -> Arrays:
    """The transformer under ComfyUI's names, without a prefix."""
    found = arrays(folder, "transformer")
    for name in [name for name in found if name.endswith("attention.to_q.weight")]:
        stem = name.removesuffix("to_q.weight")
        found[f"{stem}qkv.weight"] = np.concatenate([found.pop(f"{stem}to_{part}.weight") for part in "qkv"])
    for ours, theirs in RENAMED.items():
        found = {name.replace(ours, theirs): array for name, array in found.items()}
    return found


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Transformer, text encoder and autoencoder as files, and the tokenizer's folder."""
    into = tmp_path_factory.mktemp("comfy")
    text = {f"model.{name}": array for name, array in arrays(folder, "text_encoder").items()}
    state = {name: torch.from_numpy(array) for name, array in arrays(folder, "vae").items()}
    vae = {name: array.numpy() for name, array in ldm_vae(state).items()}
    shutil.copytree(folder / "tokenizer", into / "words")
    return {
        "model": write(into / "z_image_turbo_bf16.safetensors", comfy(folder)),
        "text_encoder": write(into / "qwen_3_4b.safetensors", text),
        "vae": write(into / "ae.safetensors", vae),
        "tokenizer": into / "words",
    }


def load(model: Path, **parts: Any) -> canvax.Pipeline:
    return canvax.load(model, dtype="float32", mesh=make_mesh(jax.devices()[:1]), progress=False, **parts)


def parts(files: dict[str, Path], **changes: Any) -> dict[str, Any]:
    return {name: path for name, path in {**files, **changes}.items() if name != "model" and path is not None}


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    return draw(load(folder), guidance_scale=1.5).pixels


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_single_files(files: dict[str, Path], wanted: np.ndarray, tmp_path: Path, prefix: str) -> None:
    """The image is that of the folder bit for bit, whatever the prefix, and the files know the folder's configs."""
    model = files["model"]
    if prefix:
        named = safetensors.numpy.load_file(model) | {"norm_final.weight": np.ones(64, np.float32)}
        model = write(tmp_path / "prefixed.safetensors", {prefix + name: array for name, array in named.items()})
    pipe = load(model, **parts(files))
    np.testing.assert_array_equal(draw(pipe, guidance_scale=1.5).pixels, wanted)
    assert pipe.model.overrides.keys() == {"vae", "text_encoder", "tokenizer"}
    assert pipe.model.defaults.num_inference_steps == 8
    assert load(model, **parts(files), scheduler={"shift": 6.0}).model.defaults.num_inference_steps == 50


def test_the_name_of_a_file_tells_what_its_arrays_do_not(files: dict[str, Path], tmp_path: Path) -> None:
    """Where neither it nor the caller does, the model is taken for Turbo, with a warning."""
    base: dict[str, Any] = {"scheduler": {"shift": 6.0}}
    for name, given, steps in (("turbo", {}, 8), ("base", {}, 50), ("mine", {}, 8), ("mine", base, 50)):
        model = shutil.copy(files["model"], tmp_path / f"{name}.safetensors")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe = load(model, **parts(files), **given)
        assert [one.category for one in caught] == [canvax.HintWarning] * ((name, given) == ("mine", {}))
        assert pipe.model.defaults.num_inference_steps == steps


@pytest.mark.slow
def test_parts_that_are_folders(files: dict[str, Path], folder: Path, wanted: np.ndarray) -> None:
    """A part may be a folder as well; the tokenizer beside a text encoder need not be named."""
    given = parts(files, text_encoder=folder / "text_encoder", vae=folder, tokenizer=folder)
    np.testing.assert_array_equal(draw(load(files["model"], **given), guidance_scale=1.5).pixels, wanted)
    given = parts(files, text_encoder=folder, tokenizer=None)
    np.testing.assert_array_equal(draw(load(files["model"], **given), guidance_scale=1.5).pixels, wanted)
    pipe = load(folder, text_encoder=files["text_encoder"])
    np.testing.assert_array_equal(draw(pipe, guidance_scale=1.5).pixels, wanted)


def test_gguf(
    files: dict[str, Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Weights are the numbers in the files, which commands find in a folder of models."""
    pytest.importorskip("gguf")
    from tests.support.gguf_files import both

    small, plain = both(files, arrays(folder, "text_encoder"), tmp_path, "Q8_0")
    one, other = (load(found["model"], **parts(found)).params for found in (small, plain))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    monkeypatch.setenv("CANVAX_DATA_DIR", str(tmp_path))
    words = ["a fox", "-m", small["model"].name, "--text-encoder", small["text_encoder"].name, "-W", "32", "-H", "32"]
    words += ["--vae", str(files["vae"]), "--tokenizer", str(files["tokenizer"]), "--steps", "1", "--mesh", "data=1"]
    assert main(["generate", *words, "--dtype", "float32", "-q", "-o", str(tmp_path / "a.png")]) == 0
    for part, flag in (("model", "--model"), ("text_encoder", "--text-encoder")):
        capsys.readouterr()
        assert main(["info", str(small[part]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["flag"], "Q8_0" in report["stored"]) == (flag, True)
    with pytest.raises(canvax.CheckpointError):
        load(small["text_encoder"], **parts(small))
    with pytest.raises(canvax.CheckpointError):
        load(files["model"], **parts(files, text_encoder=small["model"]))


def test_a_transformer_alone(files: dict[str, Path]) -> None:
    """One error names all that is missing, and of the parts that are given none."""
    with pytest.raises(canvax.InputError) as caught:
        load(files["model"])
    assert caught.value.argument == "model"
    assert all(f"{{{name}=" in caught.value.cure for name in ("text_encoder", "vae"))
    with pytest.raises(canvax.InputError) as caught:
        load(files["model"], vae=files["vae"])
    assert "{vae=" not in caught.value.cure
    with pytest.raises(canvax.CheckpointError):  # the tokenizer in the package has more words than this text encoder
        load(files["model"], **parts(files, tokenizer=None))


def test_files_as_comfyui_has_them(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A transformer in a folder of models is one model with the text encoder and the autoencoder that fit it."""
    text = safetensors.numpy.load_file(files["text_encoder"])
    words = text["model.embed_tokens.weight"]
    text["model.embed_tokens.weight"] = np.resize(words, (151936, words.shape[1]))
    models = tmp_path / "ComfyUI" / "models"
    write(models / "diffusion_models" / "z.safetensors", safetensors.numpy.load_file(files["model"]))
    write(models / "text_encoders" / "qwen.safetensors", text)
    write(models / "text_encoders" / "a_vl.safetensors", text)  # a model of vision has other weights
    narrow = {name: array[tuple(slice(side // 2) for side in array.shape)] for name, array in text.items()}
    write(models / "text_encoders" / "a_narrow.safetensors", narrow)
    vae = safetensors.numpy.load_file(files["vae"])
    write(models / "vae" / "ae.safetensors", vae)
    write(models / "vae" / "a_half.safetensors", {name: array for name, array in vae.items() if "encoder" in name})
    given = {"text_encoder": models / "text_encoders" / "qwen.safetensors", "vae": models / "vae" / "ae.safetensors"}
    wanted = draw(load(models / "diffusion_models" / "z.safetensors", **given)).pixels
    beside = load(models / "diffusion_models" / "z.safetensors")  # without a folder of models: those beside it
    np.testing.assert_array_equal(draw(beside).pixels, wanted)
    monkeypatch.setenv("CANVAX_DATA_DIR", str(tmp_path / "ComfyUI"))
    assert local_models().models.keys() == {"z"}
    pipe = load("z")  # type: ignore[arg-type]
    np.testing.assert_array_equal(draw(pipe).pixels, wanted)
    assert pipe.model.overrides == {"text_encoder": "qwen", "vae": "ae"}
    words = ["generate", "a fox", "-m", "z", "-W", "32", "-H", "32", "--steps", "1", "-s", "1", "--dtype", "float32"]
    assert main([*words, "--mesh", "data=1", "-o", str(tmp_path / "a.png")]) == 0
    assert "text encoder: qwen" in capsys.readouterr().err
    assert main(["generate", "--from-image", str(tmp_path / "a.png"), "-o", str(tmp_path / "b.png"), "-q"]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    (models / "vae" / "ae.safetensors").unlink()
    models_now, left_out = local_models()
    assert (set(models_now), "z.safetensors" in left_out) == (set(), True)
    with pytest.raises(canvax.InputError) as caught:
        load("z")  # type: ignore[arg-type]
    assert (caught.value.argument, caught.value.value) == ("model", "z")


def test_wrong_parts(files: dict[str, Path], tmp_path: Path) -> None:
    """A part of another kind, a stray array and a missing one are errors before anything is read."""
    for changes in ({"text_encoder": files["vae"]}, {"vae": files["text_encoder"]}, {"text_encoder": files["model"]}):
        with pytest.raises(canvax.CheckpointError):
            load(files["model"], **parts(files, **changes))
    named, qkv = safetensors.numpy.load_file(files["model"]), "layers.0.attention.qkv.weight"
    for name, changed in {
        "stray": {**named, "stray.weight": np.ones(2, np.float32)},
        "missing": {key: array for key, array in named.items() if key != qkv},
        "ragged": {**named, qkv: np.concatenate([named[qkv], named[qkv][:1]])},
    }.items():
        with pytest.raises(canvax.CheckpointError):
            load(write(tmp_path / f"{name}.safetensors", changed), **parts(files))
    with pytest.raises(canvax.InputError) as caught:
        canvax.load("emoji", text_encoder=files["text_encoder"])
    assert caught.value.argument == "text_encoder"


def test_info(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is recognised, with the flag that takes it."""
    flags = {"model": "--model", "text_encoder": "--text-encoder", "vae": "--vae"}
    for name, flag in flags.items():
        assert main(["info", str(files[name]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["flag"] == flag
        assert name != "model" or report["family"] == "Z-Image"


def test_info_of_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A language model reads a prompt at once, and has no layers to leave out; memory is that of each part."""
    assert main(["info", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"]["tokens"], report["text"]["layers"]) == (512, None)
    words = [
        "info",
        str(folder),
        "--memory",
        "--json",
        "-W",
        "32",
        "-H",
        "32",
        "--dtype",
        "float32",
        "--mesh",
        "data=1",
    ]
    assert main(words) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["components"].keys() == {"transformer", "text_encoder", "vae"}
    assert sum(memory["components"].values()) == memory["weights"]


def test_room_for_a_prompt(folder: Path) -> None:
    """Chunks are 128 tokens here, and 75 of CLIP's 77."""
    assert load(folder).model.text.room((256,)) == 256
    assert clip_encoders(ClipTextConfig()).room((154,)) == 150


def test_command_line(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags of the parts, metadata that repeats them, and the missing ones by their flags."""
    monkeypatch.chdir(files["model"].parent)
    words = ["generate", "a fox", "-m", "z_image_turbo_bf16.safetensors", "-W", "32", "-H", "32", "--steps", "1"]
    words += ["-s", "1", "--dtype", "float32", "--json", "-q", "--mesh", "data=1"]
    given = ["--text-encoder", "qwen_3_4b.safetensors", "--vae", "ae.safetensors", "--tokenizer", "words"]
    assert main([*words, *given, "-o", str(tmp_path / "a.png")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metadata"][0]["tokenizer"] == "words"
    again = ["generate", "--from-image", str(tmp_path / "a.png"), "-o", str(tmp_path / "b.png"), "-q"]
    assert main([*again, "--mesh", "data=1"]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    capsys.readouterr()
    assert main([*words, "-o", str(tmp_path / "c.png")]) == 2
    assert "--text-encoder" in capsys.readouterr().err


def in_diffusers(folder: Path) -> np.ndarray:
    pipe = diffusers.ZImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return reference(pipe, PROMPTS, noise(), guidance_scale=0.7, num_inference_steps=2)


def test_saved(files: dict[str, Path], folder: Path, wanted: np.ndarray, tmp_path: Path) -> None:
    """A saved folder is the same model in canvax and in diffusers, layers that canvax does not read included."""
    load(files["model"], **parts(files)).save(tmp_path / "saved")
    np.testing.assert_array_equal(draw(load(tmp_path / "saved"), guidance_scale=1.5).pixels, wanted)
    np.testing.assert_array_equal(in_diffusers(tmp_path / "saved"), in_diffusers(folder))
    saved, original = (arrays(path, "text_encoder") for path in (tmp_path / "saved", folder))
    assert {name.removeprefix("model."): array.tobytes() for name, array in saved.items()} == {
        name: array.tobytes() for name, array in original.items()
    }


def test_converted(files: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    """Files become a folder bit for bit, without a device; a model of several files cannot become one."""
    names = {"--vae": "vae", "--text-encoder": "text_encoder", "--tokenizer": "tokenizer"}
    flags = [word for flag, name in names.items() for word in (flag, str(files[name]))]
    assert main(["convert", str(files["model"]), str(tmp_path / "folder"), "-q", *flags]) == 0
    for component in ("transformer", "vae"):
        found, original = (arrays(path, component) for path in (tmp_path / "folder", folder))
        assert found.keys() == original.keys()
        assert all(np.array_equal(found[name], original[name]) for name in original)
    with pytest.raises(canvax.InputError) as caught:
        convert(tmp_path / "folder", tmp_path / "one.safetensors")
    assert caught.value.argument == "output"


def shapes_of(spec: Any, names: Names | None = None) -> dict[str, tuple[int, ...]]:
    """Shapes of a file as PyTorch has it."""
    nothing = np.zeros(0, np.float32)
    found = [
        ArrayToSave(name, param.checkpoint_shapes[0], nothing.dtype, lambda: nothing) for name, param in flatten(spec)
    ]
    return {one.name: one.shape for one in (names.to_external(found) if names else found)}


def test_sizes_of_the_released_files() -> None:
    """ComfyUI's file has 453 arrays; the sizes read off shapes are those of the released models."""
    layout = Z_IMAGE.single_file
    assert layout is not None
    assert len(shapes_of(z_image_spec(ZImageConfig()), Names(Z_IMAGE.names))) == 453
    config = layout.config(shapes_of(z_image_spec(ZImageConfig())))
    assert ZImageConfig.from_dict(config) == ZImageConfig()
    qwen = DecoderConfig(head_dim=128)
    config = {**layout.configs["text_encoder"], **language_model_config(shapes_of(decoder_lm_spec(qwen, 36)))}
    assert DecoderConfig.from_dict(config) == qwen


def scaled(found: Arrays, marker: str) -> Arrays:
    """Large weights as float8 with scales, under the names of either generation of ComfyUI's files."""
    out: Arrays = {}
    for name, array in found.items():
        if array.ndim != 2 or min(array.shape) < 32 or "embed" in name:
            out[name] = array
            continue
        stem, scale = name.removesuffix("weight"), np.float32(np.abs(array).max() / 448)
        out[name] = (array / scale).astype(ml_dtypes.float8_e4m3fn)
        out[f"{stem}{marker}"] = np.full((1,) if marker == "weight_scale" else (), scale, np.float32)
        if marker == "weight_scale":
            out[f"{stem}comfy_quant"] = np.frombuffer(b'{"format": "float8_e4m3fn"}', np.uint8)
    return out if marker == "weight_scale" else {**out, "scaled_fp8": np.zeros(0, ml_dtypes.float8_e4m3fn)}


@pytest.mark.parametrize("marker", ["scale_weight", "weight_scale"])
def test_scaled_float8(files: dict[str, Path], wanted: np.ndarray, tmp_path: Path, marker: str) -> None:
    """Scales are multiplied while loading, those of the stacked queries, keys and values too."""
    small = {name: scaled(safetensors.numpy.load_file(files[name]), marker) for name in ("model", "text_encoder")}
    plain = {
        name: {
            key: np.asarray(array, np.float32) * found[scale] if (scale := key.removesuffix("weight") + marker) in found
            else array for key, array in found.items() if marker not in key and not key.endswith(("quant", "fp8"))
        }
        for name, found in small.items()
    }  # fmt: skip
    pixels = []
    for kind, found in {"small": small, "plain": plain}.items():
        paths = {name: write(tmp_path / kind / f"{name}.safetensors", one) for name, one in found.items()}
        pixels.append(draw(load(paths["model"], **parts(files, text_encoder=paths["text_encoder"]))).pixels)
    np.testing.assert_array_equal(*pixels)
