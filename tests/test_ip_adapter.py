"""Image prompts: what a call says of them, what compiles, what company changes, and files that cannot be used.

Numbers are held against PyTorch diffusers in ``parity/test_features.py``.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

import canvax
from canvax import ImagePrompt
from canvax.cli import BAD_INPUT, main
from canvax.images.inputs import clip_square
from canvax.kernels import outline
from canvax.kernels.target import compiling_for
from canvax.models.blocks import _transformer_block, attention_spec, transformer_spec
from canvax.models.ip_adapter import attentions_to_text
from canvax.models.presets import SD15_UNET, SDXL_UNET
from canvax.parallel.mesh import make_mesh
from canvax.parallel.place import HOST
from canvax.params import init_params
from canvax.pipelines.image_prompts import layer_scales
from canvax.scale.data import _Settings as cluster_rows
from canvax.scale.rows import Row
from canvax.scale.work import Worker
from tests.support.control_files import controlnet
from tests.support.drawing import draw, far, one_device
from tests.support.hub_imitation import HubImitation, Repository, folder_files
from tests.support.ip_adapter_files import VISION, arrays, encoder, ip_adapter
from tests.support.refusals import refused
from tests.support.small_checkpoint import UNET

pytestmark = pytest.mark.slow


def photo(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    """Some colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    return Image.fromarray(np.kron(pixels, np.ones((8, 8, 1), np.uint8)))


def half(*, left: bool) -> Image.Image:
    mask = np.zeros((64, 64), np.uint8)
    mask[:, :32] = 255
    return Image.fromarray(mask if left else 255 - mask)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as that of the released adapters: two of them and the encoder."""
    root = tmp_path_factory.mktemp("ip")
    encoder(root / "models" / "image_encoder")
    for kind in ("plain", "plus"):
        ip_adapter(root / "models" / f"{kind}.safetensors", kind, UNET)
    return root


@pytest.fixture(scope="module")
def base(small: canvax.Pipeline) -> canvax.Pipeline:
    """A small random model of 64 x 64 pixels."""
    return small


@pytest.fixture(scope="module")
def pipe(base: canvax.Pipeline, root: Path) -> canvax.Pipeline:
    return base.with_ip_adapter([root / "models" / "plain.safetensors", root / "models" / "plus.safetensors"])


def test_strength_zero_is_no_image_prompt(base: canvax.Pipeline, pipe: canvax.Pipeline) -> None:
    want = draw(base).latents
    assert far(draw(pipe, image_prompt=ImagePrompt(photo(1), 0)).latents, want) < 1e-4
    assert far(draw(pipe, image_prompt=photo(1)).latents, want) > 1e-2
    assert draw(pipe).compilations == 0  # without one it is the model as it was
    np.testing.assert_array_equal(draw(pipe).latents, want)


def test_nothing_recompiles(pipe: canvax.Pipeline) -> None:
    found = [draw(pipe, image_prompt=ImagePrompt(photo(1), adapter=1)).latents]
    for image, scale in (
        (photo(2), 1.0), (photo(1, (64, 200)), 1.0), (np.asarray(photo(3)), 1.0), (photo(1), 0.5),
        (photo(1), {"down": 1.0}), (photo(1), {"up": {"block_1": [0, 1]}, "mid": 0.5}),
    ):  # fmt: skip
        result = draw(pipe, image_prompt=ImagePrompt(image, scale, adapter=1))
        assert result.compilations == 0, scale
        assert all(far(result.latents, other) > 1e-4 for other in found), scale
        found.append(result.latents)
    more = {"sampler": "Heun", "num_inference_steps": 5, "guidance_scale": 3.0}
    assert draw(pipe, image_prompt=ImagePrompt(photo(1), adapter=1), **more).compilations == 0


def test_adapters_wait_in_the_hosts_memory(base: canvax.Pipeline, pipe: canvax.Pipeline, root: Path) -> None:
    files = [root / "models" / f"{name}.safetensors" for name in ("plain", "plus")]
    waiting = canvax.load(base.model.name, mesh=base.mesh, offload=True).with_ip_adapter(files)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(waiting.params)} == {HOST}
    want, got = (draw(each, image_prompt=ImagePrompt(photo(1), adapter=1)).latents for each in (pipe, waiting))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("kind", "adapter"), [("int8", 0), ("float8", 1)])
def test_image_prompts_of_a_quantised_model(
    base: canvax.Pipeline, pipe: canvax.Pipeline, root: Path, kind: str, adapter: int
) -> None:
    """The adapter is quantised as the model is, and says what it says without."""
    files = [root / "models" / f"{name}.safetensors" for name in ("plain", "plus")]
    narrow = canvax.load(base.model.name, quantize=kind, mesh=one_device()).with_ip_adapter(files)
    prompt = ImagePrompt(photo(1), adapter=adapter)

    def effect(pipe: canvax.Pipeline) -> np.ndarray:
        prompted, plain = (draw(pipe, image_prompt=image, num_inference_steps=1) for image in (prompt, None))
        return prompted.latents - plain.latents

    want = effect(pipe)
    assert np.linalg.norm(effect(narrow) - want) < {"int8": 0.1, "float8": 0.3}[kind] * np.linalg.norm(want)


def test_masks_are_data(pipe: canvax.Pipeline) -> None:
    def masked(one: Image.Image, other: Image.Image) -> canvax.Result:
        prompts = [ImagePrompt(photo(1), mask=one), ImagePrompt(photo(2), 0.5, mask=other)]
        return draw(pipe, image_prompt=prompts)

    first = masked(half(left=True), half(left=False))
    second = masked(half(left=False), half(left=True))
    assert second.compilations == 0
    assert far(first.latents, second.latents) > 1e-3
    # White everywhere is as without a mask, for one image.
    white = Image.new("L", (64, 64), 255)
    got = draw(pipe, image_prompt=ImagePrompt(photo(1), 0.7, white)).latents
    assert far(got, draw(pipe, image_prompt=ImagePrompt(photo(1), 0.7)).latents) < 1e-4
    black = draw(pipe, image_prompt=ImagePrompt(photo(1), 0.7, Image.new("L", (64, 64)))).latents
    assert far(black, draw(pipe).latents) < 1e-4


def test_company_changes_nothing(pipe: canvax.Pipeline) -> None:
    prompts, seeds = ["a cat", "a dog"], [4, 9]
    alone = [
        draw(pipe, prompts[i], seed=seeds[i], image_prompt=ImagePrompt(photo(i), [1.0, 0.4][i])).latents[0]
        for i in range(2)
    ]
    both = draw(pipe, prompts, seed=seeds, image_prompt=ImagePrompt([photo(0), photo(1)], [1.0, 0.4])).latents
    for one, other in zip(alone, both, strict=True):
        assert far(one, other) < 1e-4


@pytest.mark.weekly
def test_two_devices(root: Path, pipe: canvax.Pipeline) -> None:
    model = 2
    own = canvax.load(pipe.model.name, mesh=make_mesh(jax.devices()[:2], model=model))
    own = own.with_ip_adapter(root / "models" / "plain.safetensors")
    more: dict[str, Any] = {"image_prompt": ImagePrompt([photo(0), photo(1)], mask=half(left=True))}
    got = draw(own, ["a cat", "a dog"], seed=[1, 2], **more)
    assert far(got.latents, draw(pipe, ["a cat", "a dog"], seed=[1, 2], **more).latents) < 1e-3


def test_rows_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks belong to rows; on the CPU large images take a few rows at a time."""
    p = init_params(transformer_spec(32, 16, 1, heads=2, linear_projection=True), 0)["transformer_blocks"]["0"]
    assert attention_spec(32, 16, heads=2).keys() == p["attn2"].keys()
    rng = np.random.default_rng(0)
    x, k, v = (rng.standard_normal(shape, np.float32) for shape in ((2, 1031, 32), (2, 7, 2, 16), (2, 7, 2, 16)))
    kv = [rng.standard_normal((2, 3, 4, 2, 16), np.float32) for _ in range(2)]
    images = ((*kv, rng.random((2, 1031, 3), np.float32)), (kv[0][:, 0], kv[1][:, 0], None))
    inner: Any = _transformer_block
    found = []
    for least in (1 << 60, 1):
        monkeypatch.setattr(outline, "LARGE_ROWS", least)
        with compiling_for("cpu", one_device()):
            found.append(inner.__wrapped__(p, x, k, v, images, heads=2, upcast=False))
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)


def test_order_of_attentions() -> None:
    """16 of them in Stable Diffusion 1.x, 70 in XL; down, up, middle."""
    for unet, count in ((SD15_UNET, 16), (SDXL_UNET, 70)):
        found = attentions_to_text(unet)
        assert len(found) == count
        parts = [one.path[0] for one in found]
        assert parts == sorted(parts, key=["down_blocks", "up_blocks", "mid_block"].index)


def test_strength_by_parts(pipe: canvax.Pipeline) -> None:
    net = pipe.model.networks.ip_adapters[0][1]  # attentions: down 0 (1), up 1 (2), middle
    np.testing.assert_allclose(layer_scales({"up": {"block_1": [0.2, 0.3]}}, net), [0, 0.2, 0.3, 0])
    np.testing.assert_allclose(layer_scales({"down": 2, "mid": 0.5}, net), [2, 0, 0, 0.5])


def test_a_pipeline_without(base: canvax.Pipeline, root: Path) -> None:
    with refused("image_prompt"):
        draw(base, image_prompt=photo(1))
    blind = base.with_ip_adapter(root / "models" / "plus.safetensors", image_encoder=False)
    with refused("image_prompt"):
        draw(blind, image_prompt=photo(1))
    embeds = np.random.default_rng(0).standard_normal((2, VISION.tokens, 64))
    draw(blind, image_prompt=ImagePrompt(embeds=embeds[0], negative_embeds=embeds[1]))
    assert "image_encoder" not in (blind.params or {})
    assert blind.with_ip_adapter(None).model.networks.ip_adapters == ()


def damaged(path: Path, change: Callable[[dict[str, np.ndarray]], Any], kind: str = "plain") -> Path:
    own = arrays(kind, UNET)
    own = change(own) or own
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(own, path)
    return path


def _drop(name: str) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda own: {key: array for key, array in own.items() if key != name}


FILES: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "attention alone": (lambda own: {k: v for k, v in own.items() if "image_proj" not in k}, "a part of an IP-Adapter"),
    "one array missing": (_drop("ip_adapter.3.to_k_ip.weight"), "ip_adapter.3.to_k_ip.weight"),
    "FaceID": (lambda own: {**own, "image_proj.proj.0.weight": np.zeros((2, 2), np.float32)}, "FaceID"),
    "NaN": (lambda own: own["image_proj.norm.bias"].fill(np.nan), "not finite"),
    "integers": (lambda own: {**own, "image_proj.norm.bias": np.zeros(48, np.int32)}, "mistyped"),
    "more layers": (
        lambda own: {**own, "ip_adapter.9.to_k_ip.weight": np.zeros((2, 2), np.float32)}, "keys for 5 attentions",
    ),
    "another width": (
        lambda own: {**own, "image_proj.norm.weight": np.ones(96, np.float32)}, "another kind of model",
    ),
    "something else": (lambda _: {"x.weight": np.zeros(1, np.float32)}, "no IP-Adapter"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_bad_files(case: str, base: canvax.Pipeline, root: Path, tmp_path: Path) -> None:
    change, said = FILES[case]
    path = damaged(tmp_path / "file.safetensors", change)
    before = dict(base.params or {})
    with pytest.raises(canvax.CheckpointError, match=said):
        base.with_ip_adapter(path, root / "models" / "image_encoder")
    assert base.params == before
    assert not base.model.networks.ip_adapters


def test_truncated_and_pickled(base: canvax.Pipeline, root: Path, tmp_path: Path) -> None:
    whole = (root / "models" / "plain.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "ip-adapter.bin").write_bytes(pickle.dumps({"image_proj": 1}))
    with pytest.raises(canvax.CheckpointError, match="cut"):
        base.with_ip_adapter(tmp_path / "cut.safetensors")
    with pytest.raises(canvax.CheckpointError, match="canvax convert"):
        base.with_ip_adapter(tmp_path / "ip-adapter.bin")
    with pytest.raises(canvax.InputError) as caught:
        base.with_ip_adapter(tmp_path / "nowhere.safetensors")
    assert caught.value.argument == "ip_adapter"


def test_encoders(base: canvax.Pipeline, root: Path, tmp_path: Path) -> None:
    """The one beside the adapter; another one is told by its widths."""
    alone = tmp_path / "alone" / "plus.safetensors"
    alone.parent.mkdir()
    shutil.copy(root / "models" / "plus.safetensors", alone)
    with pytest.raises(canvax.InputError) as caught:
        base.with_ip_adapter(alone)
    assert caught.value.argument == "image_encoder"
    with pytest.raises(canvax.InputError, match="image_encoder=True"):
        base.with_ip_adapter(alone, image_encoder=True)
    with pytest.raises(canvax.InputError, match="image_encoder='nope'"):
        base.with_ip_adapter(alone, image_encoder="nope")
    config = json.loads((root / "models" / "image_encoder" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(canvax.CheckpointError, match="features of 128 numbers, the adapter reads 64"):
        base.with_ip_adapter(alone, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps({"vision_config": config}))
    with pytest.raises(canvax.CheckpointError, match="whole CLIP model"):
        base.with_ip_adapter(alone, tmp_path / "other")
    # As in the released repository: sdxl_models/x.safetensors with models/image_encoder.
    (root / "sdxl_models").mkdir()
    shutil.copy(alone, root / "sdxl_models" / "plus.safetensors")
    found = base.with_ip_adapter(root / "sdxl_models" / "plus.safetensors").model.image_encoder
    assert found is not None
    assert Path(found.name) == root / "models" / "image_encoder"


def test_two_networks_of_images(pipe: canvax.Pipeline, tmp_path: Path) -> None:
    """A ControlNet beside an IP-Adapter, in whichever order they were given."""
    net = controlnet(tmp_path / "net", pipe, strength=0.5)
    both = pipe.with_controlnet(net)
    more: dict[str, Any] = {"image_prompt": photo(1), "height": 64, "width": 64}
    got = draw(both, control=photo(2), **more).latents
    assert far(got, draw(both, **more).latents) > 1e-3
    assert far(got, draw(both, control=photo(2), height=64, width=64).latents) > 1e-3
    names = [part.name for part in both.model.components]
    assert names[-4:] == ["controlnet", "ip_adapter", "ip_adapter_1", "image_encoder"]


@pytest.mark.parametrize("size", [(2, 4_000_000), (4_000_000, 2), (33, 3000)])
def test_a_long_image_is_seen_in_its_middle(size: tuple[int, int]) -> None:
    """Without the rest of it, which would be gigabytes."""
    image = Image.new("RGB", size, "white")
    reach = 20 * min(size)
    image.paste((0, 0, 255), (size[0] // 2 - reach, size[1] // 2 - reach, size[0] // 2 + reach, size[1] // 2 + reach))
    seen = clip_square(image, 28)
    assert seen.shape == (28, 28, 3)
    np.testing.assert_allclose(seen.mean((0, 1)), [0, 0, 1], atol=0.01)


def test_rows_of_a_file(pipe: canvax.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``canvax batch``: each row with its own image prompts."""
    monkeypatch.chdir(tmp_path)
    photo(1).save("one.png")
    photo(2).save("two.png")
    rows = [Row("both", {"prompt": "a cat", "ip_image": ["one.png:0.5", "two.png"]}), Row("none", {"prompt": "a cat"}),
            Row("few", {"prompt": "a cat", "ip_image": "one.png"}),
            Row("word", {"prompt": "a cat", "ip_image": ["one.png:strong", "two.png"]})]  # fmt: skip
    worker = Worker(pipe, batch=1, defaults={"num_inference_steps": 4, "seed": 1})
    made = {one.row.id: one for _, some in worker.run(rows) for one in some}
    assert all("ip_image" in made[name].error for name in ("few", "word"))
    prompts = [ImagePrompt(photo(1), 0.5), ImagePrompt(photo(2), adapter=1)]
    for name, given in (("both", prompts), ("none", None)):
        want = draw(pipe, image_prompt=given).images[0]
        apart = np.abs(np.asarray(made[name].image, np.int16) - np.asarray(want, np.int16))
        assert apart.max() <= 2, name


@pytest.mark.skipif(not find_spec("pyarrow"), reason="needs pyarrow: pip install 'canvax[batch]'")
def test_rows_on_a_cluster(base: canvax.Pipeline, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``canvax batch --ip-adapter --ray`` calls there, where another folder is the current one."""
    photo(1).save(tmp_path / "one.png")
    monkeypatch.setattr(canvax, "load", lambda *_, **__: base)
    monkeypatch.chdir(root)
    named = {"ip_adapter": ["models/plus.safetensors"], "ip_encoder": str(root / "models" / "image_encoder")}
    (tmp_path / "models").symlink_to(root / "models")
    generate = cluster_rows(str(tmp_path), batch_size=1, **named)
    row = {"prompt": "a cat", "num_inference_steps": 4, "seed": 1, "ip_image": "one.png:0.5"}
    table = generate({"id": ["a"], "settings": [json.dumps(row)]})
    (made,) = table.to_pylist()
    assert (made["error"], Path.cwd()) == (None, tmp_path)
    want = draw(base.with_ip_adapter(root / "models" / "plus.safetensors"), image_prompt=ImagePrompt(photo(1), 0.5))
    apart = np.abs(np.asarray(Image.open(io.BytesIO(made["image"])), np.int16) - np.asarray(want.images[0], np.int16))
    assert apart.max() <= 2


def test_names_of_diffusers(pipe: canvax.Pipeline) -> None:
    want = draw(pipe, image_prompt=[ImagePrompt(photo(1)), ImagePrompt(photo(2), adapter=1)]).latents
    np.testing.assert_array_equal(draw(pipe, ip_adapter_image=[photo(1), photo(2)]).latents, want)
    with refused("ip_adapter_image"):
        draw(pipe, ip_adapter_image=photo(1), image_prompt=photo(1))
    with pytest.raises(canvax.InputError, match="negative ones first"):
        draw(pipe, ip_adapter_image_embeds=[np.zeros((3, 1, 24))])
    with pytest.raises(AttributeError, match="with_ip_adapter"):
        pipe.load_ip_adapter("x")
    with pytest.raises(AttributeError, match=r"scale=0\.6"):
        pipe.set_ip_adapter_scale(0.6)


@pytest.mark.weekly
def test_command(base: canvax.Pipeline, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    photo(1).save("photo.png")
    photo(2).save("other.png")
    half(left=True).save("mask.png")
    model = ["-m", str(base.model.name), "--mesh", "data=1", "--steps", "4", "--seed", "1", "-q"]
    named = ["--ip-adapter", str(root / "models" / "plus.safetensors")]
    full = ["generate", "a cat", *model, *named, "--ip-image", "photo.png:0.6", "--ip-mask", "mask.png", "-o", "a.png"]
    assert main(full) == 0
    pipe = base.with_ip_adapter(root / "models" / "plus.safetensors")
    want = draw(pipe, image_prompt=ImagePrompt(photo(1), 0.6, half(left=True)))
    np.testing.assert_allclose(np.asarray(Image.open("a.png"), int), np.asarray(want.images[0], int), atol=1)
    capsys.readouterr()

    assert main(["info", "a.png"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"--ip-adapter \S+plus.safetensors --ip-image PROMPT1:0.6 --ip-mask MASK1", told)
    assert "not in the file" in told
    again = ["generate", "--from-image", "a.png", "-m", str(base.model.name), *named, "--mesh", "data=1", "-q", "-o"]
    assert main([*again, "b.png", "--ip-image", "photo.png:0.6", "--ip-mask", "mask.png"]) == 0
    np.testing.assert_array_equal(np.asarray(Image.open("a.png")), np.asarray(Image.open("b.png")))
    capsys.readouterr()
    assert main([*again, "c.png", "--ip-image", "other.png:0.6", "--ip-mask", "mask.png"]) == 0
    assert "--ip-image has another image" in capsys.readouterr().err

    lines = [{"prompt": "a cat", "ip_image": "photo.png"}, {"prompt": "a dog", "ip_image": ["other.png:0.4"]}]
    Path("lines.txt").write_text("\n".join(map(json.dumps, lines)))
    assert main(["generate", "--prompt-file", "lines.txt", *model, *named, "-o", "many", "--batch-size", "2"]) == 0
    assert len(list(Path("many").glob("*.png"))) == 2
    capsys.readouterr()
    for bad, said in (
        (["--ip-image", "photo.png"], "--ip-image"),
        ([*named, "--ip-image", "nowhere.png"], "nowhere.png"),
        ([*named, "--ip-mask", "mask.png"], "--ip-mask"),
        ([*named, *named, "--ip-image", "photo.png"], "--ip-image"),
        ([*named, "--ip-image", "photo.png", "--ip-mask", "mask.png", "--ip-mask", "none"], "--ip-mask"),
        (["--from-image", "a.png"], "--ip-image is needed"),
    ):  # fmt: skip
        assert main(["generate", "a cat", *model, *bad, "-o", "d.png"]) == BAD_INPUT
        assert said in capsys.readouterr().err


@pytest.mark.weekly
def test_the_page_runs(base: canvax.Pipeline, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/ip-adapter.md, with small random adapters in place of those it names."""
    page = (Path(__file__).parent.parent / "docs" / "ip-adapter.md").read_text(encoding="utf-8")
    given = canvax.Pipeline.with_ip_adapter

    def with_ip_adapter(self: canvax.Pipeline, file: Any, image_encoder: Any = None) -> canvax.Pipeline:
        names = ["plain"] if isinstance(file, str) else ["plain", "plus"]
        return given(self, [root / "models" / f"{name}.safetensors" for name in names])

    monkeypatch.setattr(canvax, "load", lambda _: base)
    monkeypatch.setattr(canvax.Pipeline, "with_ip_adapter", with_ip_adapter)
    names: dict[str, Any] = {"photo": photo(1), "other": photo(2), "left": half(left=True), "right": half(left=False)}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(block, names)
    assert isinstance(names["result"], canvax.Result)


# huggingface_hub reads HF_* when it is imported.
FROM_HUB = """
import json, sys
import canvax, jax
pipe = canvax.load(sys.argv[1], mesh=canvax.make_mesh(jax.devices()[:1]))
answers = []
for file, encoder in json.load(sys.stdin):
    try:
        made = pipe.with_ip_adapter(file, encoder, progress=False)
        answers.append([made.model.ip_adapters[0].name, made.model.image_encoder.name])
    except canvax.CanvaxError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


@pytest.mark.weekly
def test_hub(base: canvax.Pipeline, root: Path, tmp_path: Path) -> None:
    """The adapter's file and the encoder that suits it, of one commit, and nothing else; later without the Hub."""
    files = {f"models/{name}": data for name, data in folder_files(root / "models").items()}
    wide = tmp_path / "wide"
    encoder(wide, cfg=dataclasses.replace(VISION, hidden_size=96, projection_dim=40))
    files |= {f"sdxl_models/image_encoder/{name}": data for name, data in folder_files(wide).items()}
    files |= {"sdxl_models/plus_vit-h.safetensors": files["models/plus.safetensors"], "x.py": b"raise", "y.bin": b"PK"}
    with HubImitation() as hub:
        hub.repositories["o/ip"] = Repository()
        hub.repositories["o/ip"].commit("main", files)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        env = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}

        def ask(*calls: tuple[str, str | None], **variables: str) -> list[Any]:
            done = subprocess.run(
                [sys.executable, "-c", FROM_HUB, str(base.model.name)], input=json.dumps(calls), env=env | variables,
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        plus = "o/ip/sdxl_models/plus_vit-h.safetensors"
        assert ask((plus, None)) == [[plus, "o/ip/models/image_encoder"]]
        assert not {"x.py", "y.bin", "models/plain.safetensors", "sdxl_models/image_encoder/model.safetensors"} & set(
            hub.fetched()
        )
        found = ask(
            ("o/ip/models/plain.safetensors", "o/ip/models/image_encoder"), (plus, "o/ip/sdxl_models/image_encoder"),
            ("o/ip/models/none.safetensors", None), (plus, "o/ip/elsewhere"),
        )  # fmt: skip
        assert found[0] == ["o/ip/models/plain.safetensors", "o/ip/models/image_encoder"]
        assert "features of 96 numbers, the adapter reads 64" in found[1]
        assert "none.safetensors" in found[2]
        assert "elsewhere" in found[3]
        before = len(hub.requests)
        assert ask((plus, None), HF_HUB_OFFLINE="1") == [[plus, "o/ip/models/image_encoder"]]
        assert len(hub.requests) == before
