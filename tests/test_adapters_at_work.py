"""Adapters at work: images, prompts that name them, textual inversions, metadata; and nothing compiles."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import canvax
from canvax.compile.monitor import counting
from canvax.errors import HintWarning, InputError
from canvax.parallel.place import HOST
from canvax.pipelines.adapter_files import file_of
from canvax.weights.lora import RECORD, adapter_info, suggested
from tests.support.adapter_files import Draw, layers, lora, write
from tests.support.control_files import controlnet
from tests.support.drawing import one_device
from tests.support.refusals import refused
from tests.support.small_sdxl import build

STEPS = {"num_inference_steps": 2, "seed": 1, "progress": False}


@pytest.fixture(scope="module")
def folder(small_folder: Path) -> Path:
    return small_folder


@pytest.fixture(scope="module")
def sd(small: canvax.Pipeline) -> canvax.Pipeline:
    small("a cat", **STEPS)
    return small


@pytest.fixture(scope="module")
def loras(sd: canvax.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for i, name in enumerate(("ink", "clay")):
        draw, arrays = Draw(i), {}
        for (component, module), shape in layers(sd.model.networks.specs()).items():
            if "attn" in module:
                arrays |= {f"{component}.{module}{end}": a for end, a in lora(draw, shape).arrays.items()}
        write(folder / f"{name}.safetensors", arrays, {"ss_output_name": f"{name}-v1"})
    return folder


@pytest.fixture(autouse=True)
def empty(sd: canvax.Pipeline) -> Any:
    yield
    sd.adapters.remove()
    sd.adapters.folder = None


def pixels(pipe: canvax.Pipeline, prompt: Any = "a cat", **more: Any) -> np.ndarray:
    return pipe(prompt, **STEPS, **more).pixels


def test_nothing_compiles(sd: canvax.Pipeline, loras: Path, tmp_path: Path) -> None:
    """Loading, weighing and removing, of adapters and of textual inversions, and the images between."""
    word = write(tmp_path / "wool.safetensors", {"emb_params": Draw()(3, 48)})
    with counting() as counts:
        plain = pixels(sd)
        sd.adapters.load("ink", loras / "ink.safetensors")
        inked = pixels(sd)
        sd.adapters.load("clay", loras / "clay.safetensors", weight=0.5)
        both = pixels(sd)
        sd.adapters.set({"ink": 0.25})
        less = pixels(sd)
        sd.adapters.load_embedding(word)
        woollen = pixels(sd, "a wool cat")
        sd.adapters.remove()
        again = pixels(sd)
        unknown = pixels(sd, "a wool cat")
    assert counts.compilations == 0
    np.testing.assert_array_equal(again, plain)
    different = [plain, inked, both, less, woollen, unknown]
    assert all(np.abs(a - b).max() > 1e-3 for i, a in enumerate(different) for b in different[:i])


def test_metadata_tells_of_adapters(sd: canvax.Pipeline, loras: Path) -> None:
    assert "adapters" not in sd("a cat", **STEPS).metadata[0]
    sd.adapters.load("ink", loras / "ink.safetensors", weight=0.5)
    entry = sd("a cat", **STEPS).metadata[0]["adapters"]["ink"]
    assert entry["weight"] == 0.5
    assert entry["file"].endswith("ink.safetensors")
    assert (len(entry["sha256"]), len(entry["a1111_hash"])) == (64, 12)
    assert sd.params is not None
    assert "adapters" not in sd("a cat", params=dict(sd.params), **STEPS).metadata[0]  # which may be any
    sd.adapters.set({"ink": {"text_encoder": 0}})  # and 1 of the rest
    assert sd("a cat", **STEPS).metadata[0]["adapters"]["ink"]["weight"] == {"text_encoder": 0}
    sd.adapters.set({})
    assert "adapters" not in sd("a cat", **STEPS).metadata[0]


def test_prompts_name_adapters(sd: canvax.Pipeline, loras: Path) -> None:
    """From a folder that the user gave alone; afterwards the weights are as they were."""
    sd.adapters.load("ink", loras / "ink.safetensors", weight=0.5)
    wanted = pixels(sd)
    sd.adapters.remove()
    with pytest.warns(HintWarning, match="<lora:ink:0.5>"):
        as_text = pixels(sd, "a cat <lora:ink:0.5>")
    sd.adapters.folder = loras
    for tag in ("<lora:ink:0.5>", "<Lora:ink:0.5>"):
        np.testing.assert_array_equal(pixels(sd, f"a cat {tag}"), wanted)
    with pytest.warns(HintWarning, match="<lora:ink:1>"):
        sd("a cat", "a dog <lora:ink:1>", **STEPS)
    np.testing.assert_array_equal(pixels(sd, ["a <lora:ink-v1:0.5> cat"]), wanted)  # by the name of its trainer
    assert np.abs(as_text - wanted).max() > 1e-3
    assert {name: one.weight for name, one in sd.adapters.items()} == {"ink": 0.0, "ink-v1": 0.0}
    half = pixels(sd, "a cat <lora:ink:0:0.5>")
    sd.adapters.set({"ink": {"text_encoder": 0, "unet": 0.5}})
    np.testing.assert_array_equal(half, pixels(sd))
    entry = sd("a cat <lora:clay:0.5>", **STEPS).metadata[0]
    assert entry["prompt"] == "a cat"
    assert entry["adapters"].keys() == {"ink", "clay"}
    for prompt in (
        "a cat <lora:sand>",
        "a cat <lora:../ink>",
        "a cat <lora:ink:much>",
        "a cat <lora:ink:1:2:3>",
        ["a cat <lora:ink>", "a dog"],
    ):
        with refused("prompt", "prompts"):
            sd(prompt, **STEPS)


def test_a_pickled_pipeline_brings_its_adapters(sd: canvax.Pipeline, loras: Path, tmp_path: Path) -> None:
    sd.adapters.load("ink", loras / "ink.safetensors", weight=0.5)
    sd.adapters.load_embedding(write(tmp_path / "w.safetensors", {"<wool>": Draw()(2, 48)}))
    sd.adapters.folder = loras
    other = pickle.loads(pickle.dumps(sd))
    assert other.adapters["ink"].weight == 0.5
    assert other.adapters.folder == loras
    assert other.adapters.words == ("<wool>",)
    assert other.params is not None
    assert sd.params is not None
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), sd.params, other.params)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_a_pipeline_with_other_weights_is_not_pickled(folder: Path) -> None:
    """The copy would have those of the checkpoint."""
    pipe = canvax.load(folder)
    pickle.dumps(pipe)
    pipe.params = pipe.params
    pickle.dumps(pipe)
    pipe.params = jax.tree.map(lambda leaf: 0.5 * leaf, pipe.params)
    for edited in (pipe, pipe.with_controlnet(None)):
        with pytest.raises(TypeError):
            pickle.dumps(edited)


def test_the_file_of_a_folder_is_recorded(sd: canvax.Pipeline, loras: Path) -> None:
    """So that the name alone loads the same again."""
    sd.adapters.load("ink", loras, weight_name="ink.safetensors")
    record = sd.adapters._record()["adapters"]["ink"]
    assert sd.adapters.load("again", record["file"], 0.0).sha256 == record["sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_a_prompt_that_names_a_few_step_adapter(beside: bool, sd: canvax.Pipeline, loras: Path, tmp_path: Path) -> None:
    """A hint has the settings that it was made for, when it is loaded."""
    (tmp_path / "ink-lcm.safetensors").write_bytes((loras / "ink.safetensors").read_bytes())
    sd.adapters.folder = tmp_path
    if beside:
        sd.adapters.beside(rank=8)
    prompts = ["a cat <lora:ink-lcm>", "a dog <lora:ink-lcm>"]
    with pytest.warns(HintWarning, match="num_inference_steps=4") as seen:
        sd(prompts, **STEPS | {"seed": [1, 2]})
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", HintWarning)
        sd(prompts, **STEPS | {"seed": [1, 2]})
    sd.adapters.beside(None)


def test_a_callback_that_removes_an_adapter_loses_no_image(sd: canvax.Pipeline, loras: Path) -> None:
    sd.adapters.folder = loras
    sd.adapters.load("clay", loras / "clay.safetensors", 0.0)
    result = sd("a cat <lora:ink>", **STEPS, callback=lambda _: sd.adapters.remove() if sd.adapters else None)
    assert len(result.images) == 1
    assert not sd.adapters


# Textual inversions


def expected(sd: canvax.Pipeline, prompt: list[Any]) -> np.ndarray:
    """The text's features with vectors put in by hand: ``prompt`` holds words, and vectors [n, D]."""
    from canvax.models.clip import clip_configs, text_encoder

    assert sd.params is not None
    p = sd.params["text_encoder"]
    table = np.asarray(p["text_model"]["embeddings"]["token_embedding"]["weight"])
    tokenizer, rows, ids = sd.tokenizer, [], []
    for piece in prompt:
        if isinstance(piece, str):
            found = tokenizer.ids(piece)
            rows.append(table[found])
            ids += found
        else:
            rows.append(piece)
            ids += [0] * len(piece)
    whole = np.concatenate(rows)
    framed = np.concatenate([table[[tokenizer.bos]], whole, table[[tokenizer.eos]]])
    framed = np.concatenate([framed, np.repeat(table[[tokenizer.pad]], 77 - len(framed), 0)])
    inner = dict(p["text_model"])
    inner["embeddings"] = dict(inner["embeddings"], token_embedding={"weight": framed})
    cfg = clip_configs(sd.model.text)["text_encoder"]
    assert cfg is not None
    return np.asarray(text_encoder({"text_model": inner}, np.arange(77)[None], cfg))


def test_a_word_of_several_vectors(sd: canvax.Pipeline, tmp_path: Path) -> None:
    """Of the file's name or its own, in large letters too, twice in a prompt; beside a longer one that begins alike."""
    draw = Draw()
    three, one = draw(3, 48), draw(1, 48)
    sd.adapters.load_embedding(write(tmp_path / "wool.safetensors", {"emb_params": three}))
    sd.adapters.load_embedding(write(tmp_path / "x.safetensors", {"wool cat": one[0]}))
    for prompt, pieces in (
        ("a wool hat", ["a", three, "hat"]),
        ("WOOL, and wool", [three, ", and", three]),
        ("a wool cat", ["a", one]),
        ("embedding:wool", [three]),
        ("woolly", ["woolly"]),
    ):
        found = np.asarray(sd.encode(prompt)["text"])
        np.testing.assert_allclose(found, expected(sd, pieces), atol=2e-5, err_msg=prompt)


def test_a_word_is_never_cut(sd: canvax.Pipeline, tmp_path: Path) -> None:
    """At the end of a chunk it moves to the next one."""
    vectors = Draw()(4, 48)
    sd.adapters.load_embedding(write(tmp_path / "wool.safetensors", {"emb_params": vectors}))
    ids = sd.tokenizer.added["wool"]
    from canvax.prompts import chunked

    (comma,) = sd.tokenizer.ids(",")
    first, second = chunked(sd.tokenizer, [("! " * 73 + "wool", 1.0)])
    assert first[0][1:77] == (*sd.tokenizer.ids("! " * 73), sd.tokenizer.eos, sd.tokenizer.pad, sd.tokenizer.pad)
    assert second[0][1:5] == ids
    assert comma not in ids
    assert sd.tokenizer(["! " * 73 + "wool"], length=80).shape == (1, 80)


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> canvax.Pipeline:
    return canvax.load(build(tmp_path_factory.mktemp("xl")), mesh=one_device())


def test_both_encoders_of_sdxl(xl: canvax.Pipeline, tmp_path: Path) -> None:
    """clip_l and clip_g of one file; two files of diffusers; names of their own for each row."""
    draw = Draw()
    first, second = draw(2, 16), draw(2, 24)
    plain = {name: np.asarray(array) for name, array in xl.encode("a wool hat").items()}
    xl.adapters.load_embedding(write(tmp_path / "wool.safetensors", {"clip_l": first, "clip_g": second}))
    changed = xl.encode("a wool hat")
    for part in (slice(0, 16), slice(16, 40)):
        assert np.abs(np.asarray(changed["text"])[..., part] - plain["text"][..., part]).max() > 1e-3
    # The pooled output is that of the end of the text, not of the word: its id is not the largest.
    assert np.argmax(xl.tokenizer(["a wool hat"])[0]) == 1 + 1 + 2 + len(xl.tokenizer.ids("hat"))
    xl.adapters.remove()
    two = tmp_path / "two"
    two.mkdir()
    write(two / "learned_embeds.safetensors", {"<wool>": first})
    write(two / "learned_embeds_2.safetensors", {"<wool>": second})
    assert xl.adapters.load_embedding(two) == ("<wool>",)
    for name, array in xl.encode("a <wool> hat").items():
        np.testing.assert_array_equal(array, changed[name])
    xl.adapters.remove()
    names = xl.adapters.load_embedding(tmp_path / "wool.safetensors", token=["<s0>", "<s1>"])
    assert names == ("<s0>", "<s1>")
    for name, array in xl.encode("a <s0><s1> hat").items():
        np.testing.assert_array_equal(array, changed[name])
    xl.adapters.remove()
    with pytest.warns(HintWarning, match="has no vectors for text_encoder_2"):
        xl.adapters.load_embedding(write(tmp_path / "l.safetensors", {"clip_l": first}))
    xl.adapters.remove()


def test_embeddings_in_a_lora(sd: canvax.Pipeline, loras: Path, tmp_path: Path) -> None:
    """They come and go with it."""
    from safetensors.numpy import load_file

    vectors = Draw()(2, 48)
    arrays = load_file(loras / "ink.safetensors")
    file = write(tmp_path / "b.safetensors", arrays | {"bundle_emb.wool.string_to_param.*": vectors})
    sd.adapters.load("b", file, weight=0.0)
    assert sd.adapters.words == ("wool",)
    np.testing.assert_allclose(
        np.asarray(sd.encode("a wool hat")["text"]), expected(sd, ["a", vectors, "hat"]), atol=2e-5
    )
    sd.adapters.remove("b")
    assert sd.adapters.words == ()


def test_room_for_words_ends(sd: canvax.Pipeline, tmp_path: Path) -> None:
    file = write(tmp_path / "w.safetensors", {"emb_params": Draw()(70, 48)})
    sd.adapters.load_embedding(file, "<one>")
    sd.adapters.load_embedding(file, "<two>")
    with pytest.raises(InputError, match="text_encoder has room for 6 more; remove"):
        sd.adapters.load_embedding(file, "<three>")
    sd.adapters.remove("<one>")
    sd.adapters.load_embedding(file, "<three>")
    with pytest.raises(InputError, match="is loaded already"):
        sd.adapters.load_embedding(file, "<Three>")
    with pytest.warns(HintWarning, match="is a common word"):
        sd.adapters.load_embedding(write(tmp_path / "v.safetensors", {"emb_params": Draw()(1, 48)}), "cat")


@pytest.mark.parametrize("deep", ["deep", "zdeep"])
def test_two_files_of_one_name(deep: str, loras: Path, tmp_path: Path) -> None:
    """Neither is taken by the order of names: a prompt says which is meant."""
    (tmp_path / deep).mkdir()
    for name in ("ink", f"{deep}/ink", f"{deep}/sand"):
        write(tmp_path / f"{name}.safetensors", {"x": np.zeros(1, np.float32)}, {"ss_output_name": "both"})
    with pytest.raises(InputError) as fault:
        file_of(tmp_path, "ink")
    assert "./ink" in str(fault.value)
    assert f"{deep}/ink" in str(fault.value)
    assert file_of(tmp_path, f"{deep}/ink") == tmp_path / deep / "ink.safetensors"
    assert file_of(tmp_path, "./ink") == tmp_path / "ink.safetensors"
    assert file_of(tmp_path, "sand") == file_of(tmp_path, f"{deep}/sand") == tmp_path / deep / "sand.safetensors"
    with pytest.raises(InputError):
        file_of(tmp_path, "both")
    with pytest.raises(InputError):
        file_of(tmp_path / deep, "../ink")


@pytest.mark.weekly
def test_the_page(sd: canvax.Pipeline, loras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/adapters.md runs, one after another, and generates different images."""
    page = (Path(__file__).parent.parent / "docs" / "adapters.md").read_text(encoding="utf-8")
    monkeypatch.setattr(canvax, "load", lambda *_, **__: sd)
    monkeypatch.chdir(tmp_path)
    for name, source in (("ink", "ink"), ("clay", "clay"), ("lcm-lora", "ink")):
        (tmp_path / f"{name}.safetensors").write_bytes((loras / f"{source}.safetensors").read_bytes())
    write(tmp_path / "wool.safetensors", {"emb_params": Draw()(2, 48)})
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(block, names)
        names["pipe"].adapters.remove("wool") if "wool" in names["pipe"].adapters.words else None
    images = [value.pixels for value in names.values() if isinstance(value, canvax.Result)]
    assert len(images) == 6
    assert all(np.abs(a - b).max() > 1e-3 for i, a in enumerate(images) for b in images[:i])
    assert names["lcm"].suggested["sampler"] == "LCM"


# Several pipelines and several threads


def test_edited_parameters_leave_adapters_in_the_metadata(sd: canvax.Pipeline, loras: Path) -> None:
    sd.adapters.load("ink", loras / "ink.safetensors", weight=0.5)
    assert sd.params is not None
    bias = sd.params["unet"]["conv_out"]
    bias["bias"] = np.array(bias["bias"])  # on the host, so that the call places it
    for _ in range(2):
        assert sd("a cat", **STEPS).metadata[0]["adapters"].keys() == {"ink"}


def test_pipelines_over_the_same_weights_change_their_own(sd: canvax.Pipeline, loras: Path, tmp_path: Path) -> None:
    """Adapters come along with the weights; after that neither pipeline changes those of the other, words neither."""
    plain = pixels(sd)
    sd.adapters.load("ink", loras / "ink.safetensors")
    inked = pixels(sd)
    net = controlnet(tmp_path / "net", sd)
    other = sd.with_controlnet(net)
    np.testing.assert_array_equal(pixels(other), inked)
    assert other("a cat", **STEPS).metadata[0]["adapters"].keys() == {"ink"}
    other.adapters.remove("ink")
    np.testing.assert_array_equal(pixels(other), plain)
    np.testing.assert_array_equal(pixels(sd), inked)
    other.params = canvax.load(sd.model.files.path, mesh=sd.mesh).params
    assert other.params is not None
    other = canvax.Pipeline(other.model, other.programs, other.params | {"controlnet": {}})
    other = other.with_controlnet(net)
    other.adapters.load("clay", loras / "clay.safetensors")
    other.adapters.load_embedding(write(tmp_path / "wool.safetensors", {"emb_params": Draw()(3, 48)}))
    np.testing.assert_array_equal(pixels(sd), inked)
    assert sd("a wool cat", **STEPS).metadata[0].keys().isdisjoint({"embeddings"})
    assert not any(tokenizer.added for tokenizer in sd.model.tokenizers.values())
    assert np.abs(pixels(other) - plain).max() > 1e-3


def adding(kind: str, sd: canvax.Pipeline, tmp_path: Path) -> Path:
    """A file with a network that adds to the UNet's weights."""
    arrays = load_file(controlnet(tmp_path / "net", sd) / "diffusion_pytorch_model.safetensors")
    if kind == "a difference":
        arrays["difference"] = np.zeros(1, np.float32)
    else:
        draw, own, factors = Draw(), {}, {}
        for name, array in arrays.items():
            if name.startswith("controlnet_"):
                own[name] = array
            elif array.ndim > 1:
                module = name.removesuffix(".weight")
                factors |= {f"{module}.up": draw(len(array), 2), f"{module}.down": draw(2, *array.shape[1:])}
        arrays = own | factors
        arrays["lora_controlnet"] = np.zeros(1, np.float32)
    return write(tmp_path / "net.safetensors", arrays)


SHOWN = np.random.default_rng(0).random((64, 64, 3), np.float32)


@pytest.mark.parametrize("kind", ["a control-LoRA", "a difference"])
def test_the_order_of_adapters_and_networks_changes_nothing(
    kind: str, sd: canvax.Pipeline, loras: Path, tmp_path: Path
) -> None:
    """A network that adds to the UNet's weights adds to the trained ones."""
    file = adding(kind, sd, tmp_path)
    first = sd.with_controlnet(file)
    first.adapters.load("ink", loras / "ink.safetensors")
    sd.adapters.load("ink", loras / "ink.safetensors")
    second = sd.with_controlnet(file)
    made = [pipe("a cat", control=SHOWN, **STEPS) for pipe in (first, second)]
    np.testing.assert_array_equal(made[0].latents, made[1].latents)
    assert made[0].metadata == made[1].metadata
    sd.adapters.remove()
    third = sd.with_controlnet(file)("a cat", control=SHOWN, **STEPS)
    assert np.abs(third.latents - made[0].latents).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a control-LoRA", "a difference"])
def test_networks_wait_in_the_hosts_memory(kind: str, sd: canvax.Pipeline, folder: Path, tmp_path: Path) -> None:
    file = adding(kind, sd, tmp_path)
    waiting = canvax.load(folder, mesh=sd.mesh, offload=True).with_controlnet(file)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(waiting.params)} == {HOST}
    want, got = (pixels(pipe, control=SHOWN) for pipe in (sd.with_controlnet(file), waiting))
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_threads_with_prompts_that_name_adapters(sd: canvax.Pipeline, loras: Path) -> None:
    """Each image has the adapters of its call, also where another call in another thread changes the weights."""
    sd.adapters.folder = loras
    prompts = ["a cat", "a cat <lora:ink>", "a cat <lora:clay>"]
    steps = {**STEPS, "num_inference_steps": 6}
    wanted = [sd(prompt, **steps) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: sd(prompt, **steps), prompts * 4))
    for i, result in enumerate(found):
        np.testing.assert_array_equal(result.latents, wanted[i % 3].latents)
        assert result.metadata == wanted[i % 3].metadata


def test_a_pickled_pipeline_loads_from_the_same_place(
    folder: Path, sd: canvax.Pipeline, loras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the arguments of load but the token; an adapter of a folder with its file's name."""
    with pytest.warns(UserWarning, match="cache_dir"):
        pipe = canvax.load(folder, cache_dir=tmp_path, local_files_only=True, token="hf_secret", mesh=sd.mesh)
    pipe = pipe.with_controlnet(controlnet(tmp_path / "net", sd), token="hf_secret")
    pipe.adapters.load("ink", loras, weight_name="ink.safetensors", token="hf_secret")
    stored = pickle.dumps(pipe)
    assert b"hf_secret" not in stored
    asked: list[dict[str, Any]] = []
    load = canvax.load
    monkeypatch.setattr("canvax.pipelines.pipeline.load", lambda *a, **k: asked.append(k) or load(*a, mesh=k["mesh"]))
    other = pickle.loads(stored)
    assert asked[0]["cache_dir"] == tmp_path
    assert asked[0]["local_files_only"] is True
    assert len(other.model.controls) == 1
    assert other.adapters["ink"].sha256 == pipe.adapters["ink"].sha256


# The command


@pytest.mark.weekly
def test_the_command(
    folder: Path, loras: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--lora, --embedding and --lora-dir; metadata; and the command that info prints makes the same image."""
    from canvax.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    write(tmp_path / "wool.safetensors", {"emb_params": Draw()(2, 48)})
    shared = ["-m", str(folder), "-s", "1", "--steps", "2", "-b", "1", "-q"]

    def run(*words: str) -> tuple[int, str, str]:
        code = main([*words])
        return code, *capsys.readouterr()

    def image(name: str) -> np.ndarray:
        from PIL import Image

        return np.asarray(Image.open(tmp_path / name))

    ink = "./ink.safetensors"
    Path(ink).write_bytes((loras / ink).read_bytes())
    given = ["--lora", f"{ink}:0.5", "--embedding", "wool.safetensors"]
    assert run("generate", "a wool cat", *shared, *given, "-o", "a.png") == (0, "a.png\n", "")
    assert run("generate", "a wool cat <lora:ink:0.5>", "a dog <lora:clay>", *shared, "--lora-dir", str(loras),
               "--embedding", "wool.safetensors", "-o", "both")[0] == 0  # fmt: skip
    assert run("generate", "a wool cat", *shared, "-o", "plain.png")[0] == 0
    files = sorted((tmp_path / "both").iterdir())
    assert len(files) == 2
    np.testing.assert_array_equal(image("a.png"), image(str(files[0])))
    assert (image("a.png") != image("plain.png")).any()
    along = ["--x", "lora=0,0.5", "--y", "prompt=a cat;a dog"]
    code, out, _ = run("sheet", *shared, "--lora", ink, *along, "-o", "sheet.png", "--json")
    assert code == 0
    weights = [one.get("adapters", {}).get("ink", {}).get("weight") for one in json.loads(out)["metadata"]]
    assert weights == [None, 0.5, None, 0.5]
    code, out, _ = run("info", "a.png")
    assert code == 0
    line = out.strip().splitlines()[-1]
    assert f"--lora {ink}:0.5 --embedding ./wool.safetensors" in line
    again = line.replace("canvax ", "", 1).split("--prompt 'a wool cat'")
    code, out, err = run("generate", "a wool cat", *shlex.split(again[1]), *shared[:2], "-q", "-o", "again.png")
    assert (code, out) == (0, "again.png\n")
    assert "-m is given twice" in err
    np.testing.assert_array_equal(image("a.png"), image("again.png"))
    code, _, err = run("generate", "--from-image", "a.png", *shared[:2], "-q", "-o", "other.png")
    assert code == 0
    assert "was generated with ink, wool; name the files with --lora and --embedding" in err
    for name, is_same in (("ink", True), ("clay", False)):
        words = ("--lora", str(loras / f"{name}.safetensors"), "-q", "-o", f"with-{name}.png")
        code, _, err = run("generate", "--from-image", "a.png", *shared[:2], *words)
        assert (code, "--lora: no file" in err) == (0, not is_same)
    assert "<lora:ink:0.5>" in (tmp_path / "a.png").read_bytes().decode("latin-1")


def test_a_pipeline_generates_an_image_again(sd: canvax.Pipeline, loras: Path, tmp_path: Path) -> None:
    """With the weights that adapters had; one that is missing is refused by its name."""
    sd.adapters.load("ink", loras / "ink.safetensors", {"unet": 0.5})
    sd.adapters.load_embedding(write(tmp_path / "wool.safetensors", {"emb_params": Draw()(3, 48)}))
    want = sd("a wool cat", **STEPS)
    sd.adapters.remove("ink")
    with pytest.raises(canvax.InputError, match="'ink'") as refused:
        sd.again(want.metadata[0])
    assert refused.value.argument == "adapters"
    sd.adapters.load("blue", loras / "ink.safetensors", 0.1)
    got = sd.again(want.metadata[0], progress=False)
    np.testing.assert_array_equal(got.pixels, want.pixels)
    assert sd.adapters["blue"].weight == 0.1
    without = sd.again(want.metadata[0], adapters=None, progress=False)
    assert without.metadata[0]["adapters"]["blue"]["weight"] == 0.1
    sd.adapters.remove("wool")
    with pytest.raises(canvax.InputError, match="'wool'"):
        sd.again(want.metadata[0])


def test_info_of_adapters(loras: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from canvax.cli import main

    tags = json.dumps({"10_cats": {"inky cat": 40, "cat": 12}, "5_dogs": {"inky cat": 9, "dog": 3}})
    metadata = {"ss_tag_frequency": tags, "ss_network_module": "lycoris.kohya", "modelspec.title": "LCM of ink"}
    file = write(tmp_path / "style.safetensors", {
        "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight": Draw()(8, 768),
        "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k.lora_up.weight": Draw()(64, 8),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w1_a": Draw()(64, 8),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w1_b": Draw()(8, 64),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w2_a": Draw()(64, 8),
        "lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w2_b": Draw()(8, 64),
    }, metadata)  # fmt: skip
    assert main(["info", str(file)]) == 0
    out = capsys.readouterr().out
    for words in (": an adapter", "1 of UNet: LoRA", "1 of text encoder: LoHa", "Stable Diffusion 1.x",
                  "inky cat, cat, dog", "--sampler LCM --steps 4 --guidance-scale 1.0", "lycoris.kohya"):  # fmt: skip
        assert words in out, out
    word = write(tmp_path / "wool.safetensors", {"emb_params": Draw()(3, 768)})
    assert main(["info", str(word)]) == 0
    assert "wool (3 vectors)" in capsys.readouterr().out
    assert main(["generate", "a cat", "-m", str(file)]) == 1
    assert "is a LoRA, not a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("lcm-lora-sdv1-5", {"sampler": "LCM", "num_inference_steps": 4, "guidance_scale": 1.0}),
        ("sdxl_lightning_8step_lora", {"sampler": "Euler", "spacing": "trailing", "num_inference_steps": 8,
                                       "guidance_scale": 1.0}),
        ("Hyper-SD15-1step-lora", {"sampler": "TCD", "eta": 1.0, "num_inference_steps": 1, "guidance_scale": 1.0}),
        ("Hyper-SDXL-12steps-CFG-lora", {"sampler": "DDIM", "spacing": "trailing", "num_inference_steps": 12,
                                         "guidance_scale": 5.0}),
        ("tcd-sdxl", {"sampler": "TCD", "eta": 0.3, "num_inference_steps": 4, "guidance_scale": 1.0}),
        ("ink_lightning", {"sampler": "Euler", "spacing": "trailing", "num_inference_steps": 4, "guidance_scale": 1.0}),
        ("Hyper-SDXL-8steps-lora", {"sampler": "DDIM", "spacing": "trailing", "num_inference_steps": 8,
                                    "guidance_scale": 1.0}),
        ("lcm-lora-sdxl pytorch_lora_weights", {"sampler": "LCM", "num_inference_steps": 4, "guidance_scale": 1.0}),
        ("dmd2_sdxl_4step_lora_fp16", {"sampler": "LCM", "num_inference_steps": 4, "guidance_scale": 1.0}),
        ("ink", {}),
    ],
)  # fmt: skip
def test_suggestions(name: str, wanted: dict[str, Any]) -> None:
    assert suggested(name, {}, unet=True) == wanted


LIGHTNING = {"sampler_settings": ["shift=3", "shift_terminal=0"], "guidance_scale": 1.0}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Qwen-Image-Edit-2511-Lightning-4steps-V1.0-bf16", {**LIGHTNING, "num_inference_steps": 4}),
        ("Qwen-Image-Lightning-8steps-V2.0", {**LIGHTNING, "num_inference_steps": 8}),
        ("Hyper-FLUX.1-dev-8steps-lora", {"num_inference_steps": 8}),
        ("Hyper-FLUX.1-dev-16steps-lora", {"num_inference_steps": 16}),
        ("FLUX.1-Turbo-Alpha diffusion_pytorch_model", {"num_inference_steps": 8}),
        ("flux-lcm", {"num_inference_steps": 4}),
        ("ink", {}),
    ],
)
def test_suggestions_for_transformers(name: str, wanted: dict[str, Any]) -> None:
    """They keep their sampler and guidance scale: DDIM, LCM and TCD are not for flows."""
    assert suggested(name, {}, unet=False) == wanted


@pytest.mark.parametrize(
    ("layer", "sampler"),
    [("transformer.single_transformer_blocks.0.attn.to_q", None), ("unet.down_blocks.0.attentions.0.proj_in", "DDIM")],
)
def test_a_file_suggests_what_its_model_can_use(layer: str, sampler: str | None, tmp_path: Path) -> None:
    arrays = {f"{layer}.lora_A.weight": Draw()(2, 8), f"{layer}.lora_B.weight": Draw()(8, 2)}
    info = adapter_info(write(tmp_path / "Hyper-8steps-lora.safetensors", arrays))
    assert info["suggested"].get("sampler") == sampler
    assert [*info["parts"]] == ["UNet: LoRA" if sampler else "transformer: LoRA"]


@pytest.mark.parametrize("damage", ["[1]", '{"call": [1]}', "{", '{"call": {"num_inference_steps": [4]}}'])
def test_a_training_records_the_suggestion(damage: str) -> None:
    call = {"num_inference_steps": 4, "guidance_scale": 1.0}
    assert suggested("ink", {RECORD: json.dumps({"call": call | {"prompt": "a cat"}})}, unet=True) == call
    assert suggested("ink", {RECORD: damage}, unet=True) == {}
