"""How the model in the package is made: drawings, captions, vocabulary, recipe, and the measure of its quality."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import canvax
from canvax.errors import InputError
from canvax.models.clip import text_encoder_spec
from canvax.models.unet import unet_spec
from canvax.models.vae import up_blocks, vae_middle, vae_spec
from canvax.parallel.mesh import make_mesh
from canvax.params import count, init_params
from canvax.tokenizers.clip import ClipTokenizer
from canvax.tokenizers.concepts import Concepts
from canvax.train import session as sessions
from canvax.train.loop import Session
from canvax.train.pictures import read_pictures
from canvax.train.state import read_facts, save_state
from canvax.weights.safetensors import open_safetensors
from recipes.emoji import drawings, recipe
from recipes.emoji.captions import FORMS, STYLES, captions, plain_caption, with_article
from recipes.emoji.enlarge import enlarged, train_pieces
from recipes.emoji.quality import (
    check_measure,
    draw_and_score,
    nearest,
    score,
    score_colours,
    score_places,
)
from recipes.emoji.recipe import RECIPES, Run, learnt_captions, make_model
from recipes.emoji.variations import (
    COLOURS,
    MainColour,
    coloured_captions,
    count_captions,
    held_out_colour,
    held_out_pair,
    main_colour,
    pair_captions,
    plural,
    posed,
    posed_captions,
    recoloured,
    side_by_side,
    variations,
)
from recipes.emoji.vocabulary import learn_vocabulary, save_vocabulary

pytestmark = pytest.mark.weekly

DATA = Path(__file__).parent / "drawings.zip"


# Captions and drawings


@pytest.mark.parametrize(
    ("name", "want"),
    [("red apple", "a red apple"), ("apple", "an apple"), ("cherries", "cherries"), ("octopus", "an octopus"),
     ("8 ball", "8 ball"), ("drinking glass", "a drinking glass")],
)  # fmt: skip
def test_articles(name: str, want: str) -> None:
    assert with_article(name) == want


def test_captions_of_a_drawing() -> None:
    texts = captions("red apple", ["fruit", "apple", "food"], "noto")
    assert len(texts) == FORMS
    assert {"a red apple in the style of noto", "red apple, noto style", "fruit: red apple", "a red apple"} <= {*texts}
    assert sum("noto" in text for text in texts) == 15
    assert all("apple" in text for text in texts[:-2])
    assert texts[0] == plain_caption("red apple", "noto")
    assert len(captions("cat", [], "fluent flat")) == FORMS
    (learnt,) = learnt_captions(RECIPES["cpu"], [texts])
    assert learnt[:16] == texts[:16]
    assert Counter(learnt)["red apple"] == Counter(learnt)["a red apple"] == 9


def test_the_split_hides_one_style_of_a_concept() -> None:
    concepts = [{"label": f"thing {i}", "group": 7, "tags": ["a"]} for i in range(1015)]
    rows = drawings.describe(concepts)
    assert len(rows) == 4060
    hidden = [row for row in rows if row["split"] == "test"]
    assert len(hidden) == 203
    assert max(Counter(row["label"] for row in hidden).values()) == 1
    styles = Counter(row["style"] for row in hidden)
    assert set(styles) == set(STYLES)
    assert min(styles.values()) >= 50
    assert rows == drawings.describe(concepts)


def write_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tarballs like the real ones, of two concepts that all have and one that a style lacks."""
    folder.mkdir()
    square = '<rect width="16" height="16" fill="#{:06x}"/>'
    labels = [
        {"emoji": "🟥", "label": "red square", "group": 7, "tags": ["red"]},
        {"emoji": "👁", "label": "cat’s eye", "group": 3, "tags": []},
        {"emoji": "🧍", "label": "lonely", "group": 3, "tags": []},
        {"emoji": "🧑", "label": "person", "group": 1, "tags": []},
    ]

    def pack(package: drawings.Package, name: str, content: Any) -> drawings.Package:
        data = json.dumps(content).encode()
        info = tarfile.TarInfo(name)
        info.size = len(data)
        with tarfile.open(folder / package.file, "w:gz") as archive:
            archive.addfile(info, io.BytesIO(data))
        return replace(package, sha256=hashlib.sha256((folder / package.file).read_bytes()).hexdigest())

    styles = {}
    for i, (style, package) in enumerate(drawings.DRAWINGS.items()):
        names = ["red-square", "cats-eye", "person", *(["lonely"] if i else [])]
        icons = {name: {"body": square.format(0x400000 * i + 255 * j)} for j, name in enumerate(names)}
        styles[style] = pack(package, "package/icons.json", {"icons": icons, "width": 16, "height": 16})
    monkeypatch.setattr(drawings, "DRAWINGS", styles)
    monkeypatch.setattr(drawings, "LABELS", pack(drawings.LABELS, "package/en/data.json", labels))
    monkeypatch.setattr(drawings, "PACKAGES", (drawings.LABELS, *styles.values()))


def test_drawings_are_the_same_file_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    write_packages(tmp_path / "npm", monkeypatch)
    files = [drawings.prepare_drawings(tmp_path / f"{i}.zip", packages=tmp_path / "npm") for i in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()
    pictures = read_pictures(files[0], 128)
    assert [row["label"] for row in pictures.rows] == ["red square"] * 4 + ["cat’s eye"] * 4
    assert (pictures.pixels[0] == (0, 0, 0)).all()
    assert (pictures.pixels[1] == (64, 0, 0)).all()
    with zipfile.ZipFile(files[0]) as archive:
        text = archive.read("LICENCES.txt").decode()
        archive.extract("concepts.json", tmp_path)
    known = Concepts.of(tmp_path)
    assert known.words == {"🟥": ["red square", "red"], "👁": ["cat’s eye"]}
    (tmp_path / "concepts.json").unlink()
    assert all(licence in text for licence in ("Apache-2.0", "CC-BY-4.0", "MIT", "Google", "Twitter", "Microsoft"))
    with pytest.raises(InputError, match="exists already"):
        drawings.prepare_drawings(files[0], packages=tmp_path / "npm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.zip", "1.zip", "npm"]


def test_a_package_that_is_not_the_pinned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    write_packages(tmp_path / "npm", monkeypatch)
    path = tmp_path / "npm" / drawings.LABELS.file
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(InputError, match="sha256"):
        drawings.prepare_drawings(tmp_path / "x.zip", packages=tmp_path / "npm")
    path.unlink()
    with pytest.raises(InputError, match="npm pack emojibase-data"):
        drawings.prepare_drawings(tmp_path / "x.zip", packages=tmp_path / "npm")
    assert not (tmp_path / "x.zip").exists()


# The vocabulary


def test_vocabulary_spells_everything(tmp_path: Path) -> None:
    texts = ["a red apple", "a green apple", "it's a cat’s café", "apple pie"] * 3
    vocabulary, merges = learn_vocabulary(texts, 530)
    assert (vocabulary, merges) == learn_vocabulary(reversed(texts), 530)
    assert len(vocabulary) == 530
    assert sorted(vocabulary.values()) == list(range(530))
    save_vocabulary(tmp_path, vocabulary, merges, 77)
    tokenizer = ClipTokenizer.from_folder(tmp_path)
    assert (tokenizer.bos, tokenizer.eos) == (528, 529)
    (ids,) = tokenizer(["apple"])
    assert list(ids[:4]) == [528, vocabulary["apple</w>"], 529, 529]
    tokenizer(["zebra", "日本 🍎", "x_y 7"])  # a warning that one does not fit would be an error


# The recipe


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke recipe, stopped once on the way."""
    folder = tmp_path_factory.mktemp("smoke")
    data = Path(shutil.copy(DATA, folder))
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("concepts.json", '{"🍎": ["red apple", "fruit"]}')
    run = Run(RECIPES["smoke"], data, folder, make_mesh(jax.devices()[:1]))
    assert make_model(replace(run, deadline=0.0)) is None
    for changed in ({"kl": 1.0}, {"variations": {}}):
        with pytest.raises(InputError) as refusal:
            make_model(replace(run, recipe=replace(run.recipe, **changed)))
        assert (refusal.value.argument, next(iter(changed)) in refusal.value.problem) == ("output", True)
    model = make_model(run)
    assert model == folder / "model"
    (model / "LICENCES.txt").unlink()  # a process that was killed between the last two files
    assert make_model(run) == model
    assert (model / "LICENCES.txt").is_file()
    with pytest.raises(InputError) as refusal:
        make_model(replace(run, start=model))
    assert "start" in refusal.value.problem
    return folder


def test_the_recipe_makes_a_model(smoke: Path) -> None:
    pipe = canvax.load(smoke / "model", mesh=make_mesh(jax.devices()[:1]))
    assert pipe.model.native_size == (64, 64)
    assert pipe.model.concepts.names == ["red apple"]
    assert pipe("a red apple", seed=1, options=canvax.Options(progress=False)).images[0].size == (64, 64)
    assert (smoke / "previews" / "0000008.png").is_file()


def test_nothing_is_made_again(smoke: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither variations nor latents nor programs, unless they were made of something else."""
    folder = Path(shutil.copytree(smoke, tmp_path / "again"))
    shutil.rmtree(folder / "model")
    run = Run(RECIPES["smoke"], smoke / DATA.name, folder, make_mesh(jax.devices()[:1]))
    for module, name in ((recipe, "variations"), (recipe, "encode_pictures"), (sessions, "_compile")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("made again"))
    assert make_model(run) == folder / "model"
    for part in ("unet", "vae"):
        (old,), (new,) = ((where / "model" / part).glob("*.safetensors") for where in (smoke, folder))
        assert old.read_bytes() == new.read_bytes()
    for path in (folder / "samples.safetensors", folder / "versions.safetensors"):
        shutil.rmtree(folder / "model", ignore_errors=True)
        kept, facts = path.read_bytes(), read_facts(path)
        save_state(path, {entry.name: entry.read() for entry in open_safetensors(path)}, facts | {"data": "other"})
        with pytest.raises(pytest.fail.Exception):
            make_model(run)
        path.write_bytes(kept)


def test_its_latents_are_uncorrelated(smoke: Path) -> None:
    from recipes.emoji.autoencoder import VARIANCE

    of_all = next(entry for entry in open_safetensors(smoke / "samples.safetensors") if entry.name == "latents")
    latents = of_all.read()[: len(read_pictures(DATA, 16).split("train"))].astype(np.float32)
    covariance = np.cov(latents.reshape(-1, latents.shape[-1]), rowvar=False)
    np.testing.assert_allclose(np.diag(covariance).mean(), VARIANCE, rtol=0.05)  # they are float16 on disk
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=0.02 * covariance.max())


def test_a_larger_autoencoder_begins_with_the_small_one(smoke: Path) -> None:
    """Each of its old levels is there, in its place; on pieces, the new ones alone are trained."""
    small, cfg = RECIPES["smoke"].small.design.vae, RECIPES["smoke"].design.vae
    before = init_params(vae_spec(small), 1)
    larger = enlarged(before, small, cfg)
    parts = {name: part for name, part in larger.items() if name != "critic"}
    jax.tree.map(lambda leaf, param: None, parts, init_params(vae_spec(cfg), 0))  # the same parameters
    latents = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 8, 4), np.float32))
    features = vae_middle(before, latents, small)
    np.testing.assert_array_equal(vae_middle(larger, latents, cfg), features)
    old = {i: {"resnets": larger["decoder"]["up_blocks"][i]["resnets"]} for i in ("2",)}
    wanted = {i: before["decoder"]["up_blocks"][i] for i in ("2",)}
    np.testing.assert_array_equal(up_blocks(old, features, cfg), up_blocks(wanted, features, small))
    for i in range(3):
        jax.tree.map(
            np.testing.assert_array_equal,
            before["encoder"]["down_blocks"][str(i)],
            larger["encoder"]["down_blocks"][str(i + 1)],
        )
    pictures = read_pictures(DATA, 64)
    session = Session(smoke / "edges-again", "edges", make_mesh(jax.devices()[:1]))
    versions = np.zeros((48, 1, 8, 8, 4), np.float16)
    plan = replace(RECIPES["smoke"].edges, average=0.0)
    trained, finished = train_pieces(
        larger, before, pictures.pixels, versions, (small, cfg), plan, session, crop=16, new=True
    )  # fmt: skip
    assert finished
    moved = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), trained, larger)
    assert moved["decoder"]["up_blocks"]["2"]["upsamplers"]["0"]["conv"]["weight"]
    assert moved["decoder"]["conv_out"]["weight"]
    assert moved["encoder"]["conv_in"]["weight"]
    for part in (moved["decoder"]["up_blocks"]["2"]["resnets"], moved["encoder"]["mid_block"], moved["quant_conv"]):
        assert not any(jax.tree.leaves(part))


def test_colours_are_changed_and_named() -> None:
    """The main colour becomes the named one; white and other colours stay."""
    pictures = read_pictures(DATA, 64)

    def named(pixels: np.ndarray) -> MainColour:
        main = main_colour(pixels)
        assert main is not None
        return main

    apples = [i for i, row in enumerate(pictures.rows) if row["label"] == "red apple"]
    mains = {i: named(pictures.pixels[i]) for i in apples}
    assert {main.name for main in mains.values()} == {"red"}
    for colour in COLOURS:
        made = [(recoloured(pictures.pixels[i], mains[i], colour), i) for i in apples]
        names = [named(pixels).name for pixels, _ in made]
        assert names.count(colour) >= 3, (colour, names)
        for pixels, i in made:
            white = (pictures.pixels[i] == 255).all(-1)
            assert (pixels[white] >= 254).all()
    assert "a blue apple in the style of noto" in coloured_captions("red apple", "blue", "noto")
    assert main_colour(np.full((64, 64, 3), 255, np.uint8)) is None


def test_variations_leave_out_what_is_held_out() -> None:
    pictures = read_pictures(DATA, 64)
    counts = {"mirrored": 5, "coloured": 300, "pair": 200, "count": 20}
    made = list(variations(pictures, counts))
    assert Counter(variation.kind for variation in made)["coloured"] == 300
    texts = {variation.captions[0] for variation in made}
    labels = {row["label"] for row in pictures.rows}
    held = {
        coloured_captions(label, colour, style)[0]
        for label in labels for colour in COLOURS for style in STYLES
        if held_out_colour(label, colour)
    }  # fmt: skip
    true = {i: main_colour(pixels) for i, pixels in enumerate(pictures.pixels)}
    natural = {
        coloured_captions(pictures.rows[i]["label"], main.name, pictures.rows[i]["style"])[0]
        for i, main in true.items() if main is not None
    }  # fmt: skip
    assert held
    assert not texts & (held - natural)
    pairs = {
        pair_captions(a, b, style)[0]
        for a in labels for b in labels for style in STYLES if held_out_pair(a, b)
    }  # fmt: skip
    assert pairs
    assert not texts & pairs
    again = list(variations(pictures, counts))
    assert all(
        np.array_equal(a.pixels, b.pixels) and a.captions == b.captions for a, b in zip(made, again, strict=True)
    )


def test_posed_drawings_are_whole_and_where_they_should_be() -> None:
    square = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    np.testing.assert_allclose(posed(square, 90, 1, np.zeros(2)), np.rot90(square, -1), atol=1)
    mark = np.full((64, 64, 3), 255, np.uint8)
    mark[10:50, 20:60] = (200, 0, 0)

    def bounds(pixels: np.ndarray) -> list[int]:
        rows, columns = np.nonzero((pixels < 250).any(-1))
        return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]

    assert bounds(mark) == [20, 10, 60, 50]
    assert bounds(posed(mark, 0, 0.5, np.array([0.25, 1]))) == [11, 44, 31, 64]
    for degrees in (-25, 25):
        left, top, right, bottom = bounds(posed(mark, degrees, 1, np.array([1, 0])))
        assert (right, top) == (64, 0)
        assert abs(right - left - 40 * 1.329) < 2  # cos 25 + sin 25 degrees
        assert abs(bottom - top - 40 * 1.329) < 2


def test_posed_drawings_have_no_held_out_colours() -> None:
    """One in another colour has a caption that names none."""
    pictures = read_pictures(DATA, 64)
    seen: dict[str, set[str]] = {}
    for variation in variations(pictures, {"posed": 500}):
        main = main_colour(variation.pixels)
        if main is not None:
            seen.setdefault(variation.captions[1], set()).add(main.name)
    assert seen["red apple"] == {"red"}
    shown = seen["apple"]
    assert len(shown) > 3
    assert not {colour for colour in shown if held_out_colour("apple", colour)}
    assert posed_captions("apple", "noto", True, False)[4:] == ["a tilted apple", "a tilted apple in the style of noto"]


def test_pairs_and_counts_are_where_the_measure_looks() -> None:
    pictures = read_pictures(DATA, 64)
    asked = [(0, 20), (8, 8, 8)]
    drawn = np.stack([side_by_side([pictures.pixels[i] for i in of_one]) for of_one in asked]) / np.float32(255)
    assert score_places(drawn, asked, pictures) == (1, 1)
    swapped = drawn[:, :, ::-1]
    assert score_places(swapped[:1], asked[:1], pictures) == (0, 0)
    assert count_captions(3, "cherry", "noto")[1] == "3 cherries, noto style"
    assert [plural(label) for label in ("box", "cat face", "boy", "scissors", "leaf")] == [
        "boxes", "cat faces", "boys", None, None,
    ]  # fmt: skip


def test_colours_are_measured() -> None:
    """A true recoloured drawing is right, one in its old colour wrong, and grey is no colour."""
    pictures = read_pictures(DATA, 64)
    index = next(i for i, row in enumerate(pictures.rows) if row["label"] == "red apple")
    main = main_colour(pictures.pixels[index])
    assert main is not None
    drawn = [
        recoloured(pictures.pixels[index], main, "blue"),
        pictures.pixels[index],
        np.full((64, 64, 3), 128, np.uint8),
    ]
    asked = [(index, "blue")] * 3
    assert score_colours(np.stack(drawn) / np.float32(255), asked, pictures) == (1 / 3, 1 / 3)


def test_training_goes_on_from_a_finished_model(smoke: Path, tmp_path: Path) -> None:
    """Its vocabulary and latents stay; of another recipe's model nothing is begun."""
    run = Run(RECIPES["smoke"], DATA, tmp_path / "more", make_mesh(jax.devices()[:1]), start=smoke / "model")
    model = make_model(run)
    before, after = (canvax.load(folder, mesh=run.mesh).params for folder in (smoke / "model", model))
    for part in ("encoder", "quant_conv"):
        jax.tree.map(np.testing.assert_array_equal, before["vae"][part], after["vae"][part])
    for name in ("vocab.json", "merges.txt"):
        assert (smoke / "model" / "tokenizer" / name).read_bytes() == (model / "tokenizer" / name).read_bytes()
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before["unet"], after["unet"])
    assert 0 < max(jax.tree.leaves(moved)) < 0.1
    other = replace(run, recipe=replace(RECIPES["smoke"], channels=(16, 32, 32)), folder=tmp_path / "other")
    with pytest.raises(canvax.InputError, match="is a model of other sizes than the recipe's"):
        make_model(other)
    with pytest.raises(canvax.CheckpointError, match="has no tokenizer; start from a finished model"):
        make_model(replace(run, start=tmp_path, folder=tmp_path / "third"))


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_the_model_fits_into_the_package(name: str) -> None:
    """24 MB in float16, with what the tokenizer, pictures and words beside it take."""
    design = RECIPES[name].design
    specs = (unet_spec(design.unet), vae_spec(design.vae), text_encoder_spec(design.text))
    assert 2 * sum(map(count, specs)) < 24_000_000


def test_pytorch_diffusers_draws_the_same(smoke: Path) -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    pipe = canvax.load(smoke / "model", mesh=make_mesh(jax.devices()[:1]))
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(smoke / "model", torch_dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    noise = np.random.default_rng(0).standard_normal((2, 8, 8, 4), np.float32)
    prompts = ["a red apple in the style of noto", "cherries"]
    how = {"num_inference_steps": 8, "guidance_scale": 3.0}
    ours = pipe(prompts, latents=noise, options=canvax.Options(progress=False), **how)
    latents = torch.from_numpy(np.ascontiguousarray(np.moveaxis(noise, -1, 1)))
    want = theirs(prompts, latents=latents, output_type="np", **how).images
    error = np.square(ours.pixels - want).mean()
    assert -10 * np.log10(error) >= 40


# The measure


def test_the_measure_finds_spoiled_drawings() -> None:
    pictures = read_pictures(DATA, 64)
    found = check_measure(pictures, range(len(pictures)))
    assert found["as they are"].both == 1
    assert found["noise of 0.1"].both == 1
    assert found["moved by 1/32"].both == 1
    assert found["noise of 0.3"].concepts >= 0.9


def test_the_measure_finds_nothing_in_noise() -> None:
    """A model that draws nothing must not pass."""
    pictures = read_pictures(DATA, 64)
    noise = np.random.default_rng(0).random((48, 64, 64, 3), np.float32)
    assert score(noise, range(48), pictures).concepts < 0.3
    grey = np.full((48, 64, 64, 3), 0.8, np.float32)
    assert score(grey, range(48), pictures).concepts < 0.3


def test_nearest_works_at_any_size() -> None:
    small, large = read_pictures(DATA, 32), read_pictures(DATA, 64)
    np.testing.assert_array_equal(nearest(small.pixels / np.float32(255), large.pixels), np.arange(48))
    with pytest.raises(InputError, match="divisible by 32"):
        nearest(np.zeros((1, 40, 40, 3), np.float32), large.pixels)


def test_the_model_in_the_package_draws_what_it_is_told(emoji: canvax.Pipeline) -> None:
    """A small version of recipes/emoji/measure.py: among twelve concepts, chance is one in twelve."""
    pictures = read_pictures(DATA, emoji.model.native_size[0])
    asked = list(range(0, 48, 3))
    options = canvax.Options(progress=False)
    drawn = draw_and_score(emoji, pictures, asked, num_inference_steps=15, options=options)
    assert drawn.concepts >= 0.9
    assert drawn.both >= 0.7
