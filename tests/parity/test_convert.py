"""Models in other forms, beside what PyTorch writes and what the names of the original code are by hand."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import canvax
from canvax.cli import main
from canvax.weights.pickled import read_pickled
from canvax.weights.safetensors import read_metadata

Made = Callable[[str], tuple[Path, Path]]
LEFT_BY_TRAINING = (
    "alphas_cumprod",
    "betas",
    "model_ema.decay",
    "position_ids",
    "logit_scale",
    "model.text_projection",
)
NEW, OLD = {}, {"_use_new_zipfile_serialization": False}


@pytest.mark.parametrize(
    "kind", ["xl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sd1", "sd2", "refiner"))]
)
def test_both_ways_bit_for_bit(kind: str, made: Made, tmp_path: Path) -> None:
    folder, single = made(kind)
    want, got = load_file(single), load_file(canvax.convert(folder, tmp_path / "x.safetensors"))
    assert all(torch.equal(want[name], array) for name, array in got.items())
    assert all(name.endswith(LEFT_BY_TRAINING) for name in want.keys() - got.keys())
    again = canvax.convert(tmp_path / "x.safetensors", tmp_path / "folder")
    for path in folder.rglob("*.safetensors"):
        want, got = (
            {
                name.removeprefix("text_model."): array
                for name, array in load_file(root / path.relative_to(folder)).items()
            }
            for root in (folder, again)
        )
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want), path
    assert {path.name for path in again.iterdir()} == {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_diffusers_reads_what_is_written(made: Made, tmp_path: Path) -> None:
    folder, _ = made("xl")
    canvax.convert(folder, tmp_path / "x.safetensors", dtype="float16")
    cls = diffusers.StableDiffusionXLPipeline
    theirs = cls.from_single_file(str(tmp_path / "x.safetensors"), config=str(folder), local_files_only=True)
    want = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    got = theirs.unet.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name].half(), got[name].half()) for name in want)


@pytest.mark.slow
def test_what_it_predicts_is_kept(made: Made, tmp_path: Path) -> None:
    folder = canvax.convert(made("xl")[0], tmp_path / "v")
    path = folder / "scheduler/scheduler_config.json"
    own = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    single = canvax.convert(folder, tmp_path / "v.safetensors")
    assert {"v_pred", "ztsnr"} <= load_file(single).keys()
    assert read_metadata(single)["modelspec.prediction_type"] == "v"
    again = json.loads((canvax.convert(single, tmp_path / "w") / "scheduler/scheduler_config.json").read_text())
    assert {name: again[name] for name in own} == own


@pytest.mark.slow
def test_what_one_file_cannot_say(tmp_path: Path, made: Made) -> None:
    with pytest.raises(canvax.InputError, match=r"cannot say what emoji is: its tokenizer is not CLIP's"):
        canvax.convert("emoji", tmp_path / "x.safetensors")
    folder, single = made("sd1")
    with pytest.raises(canvax.InputError, match="exists already"):
        canvax.convert(folder, single)
    with pytest.raises(canvax.InputError, match="not empty"):
        canvax.convert(single, folder)
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    other = tmp_path / "other"
    canvax.convert(folder, other)
    (other / "scheduler" / "scheduler_config.json").write_text(json.dumps({**config, "beta_end": 0.02}))
    with pytest.raises(canvax.InputError, match=r"beta_end is 0\.02"):
        canvax.convert(other, tmp_path / "x.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))


# Pickles.


class Attack:
    """Runs a command where a pickle is run."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch attacked",)


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    base = torch.randn(6, 8)
    return {
        "plain": torch.randn(3, 4), "half": torch.randn(5).half(), "bfloat": torch.randn(5).bfloat16(),
        "turned": base.T, "part": base[2:4, ::2], "whole": base, "one": torch.tensor(2.5), "none": torch.zeros(0, 3),
        "ids": torch.arange(77)[None], "bool": torch.tensor([True, False]), "spread": torch.ones(1).expand(1, 1),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }  # fmt: skip


@pytest.mark.parametrize("form", [NEW, OLD], ids=["zip", "legacy"])
def test_tensors_are_those_that_torch_reads(form: dict[str, Any], tmp_path: Path) -> None:
    path, own = tmp_path / "x.ckpt", state()
    nested = {"state_dict": OrderedDict(own), "global_step": 5, "callbacks": {"when": {1, 2}}, "np": np.float64(2.0)}
    torch.save(nested, path, **form)
    with pytest.warns(UserWarning, match="left out what is no tensor: callbacks, global_step, np"):
        written = load_file(canvax.convert(path, tmp_path / "x.safetensors"))
    assert written.keys() == own.keys()
    for name, want in own.items():
        assert written[name].dtype == want.dtype
        assert torch.equal(written[name], want.detach()), name


def test_module_and_nested_tables(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
    torch.save({"image_proj": module.state_dict(), "ip_adapter": {"1.to_k": torch.ones(2)}}, tmp_path / "x.bin")
    got = {one.name: one.get() for one in read_pickled(tmp_path / "x.bin").arrays}
    want = {f"image_proj.{name}": array for name, array in module.state_dict().items()}
    assert got.keys() == want.keys() | {"ip_adapter.1.to_k"}
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array.numpy())


def test_numbers_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.tensor([1.0, 1e30]), "ids": torch.arange(3)}, path)
    with pytest.raises(canvax.InputError) as caught:
        canvax.convert(path, tmp_path / "x.safetensors", dtype="float16")
    assert (caught.value.argument, caught.value.value) == ("dtype", "float16")
    assert not (tmp_path / "x.safetensors").exists()
    written = load_file(canvax.convert(path, tmp_path / "x.safetensors", dtype=jnp.bfloat16))
    assert (written["a"].dtype, written["ids"].dtype) == (torch.bfloat16, torch.int64)
    torch.save({"a": torch.tensor([1.0, 2.5]).double(), "b": torch.tensor(3.0)}, path)
    written = load_file(canvax.convert(path, tmp_path / "y.safetensors", dtype="float16"))
    assert (written["a"].tolist(), written["b"].item()) == ([1.0, 2.5], 3.0)


def test_an_embedding_of_a1111(tmp_path: Path) -> None:
    path = tmp_path / "style.pt"
    vectors = torch.randn(3, 8)
    own = {"string_to_token": {"*": 265}, "string_to_param": {"*": vectors}, "name": "style", "step": 10}
    torch.save(own, path)
    with pytest.warns(UserWarning, match="left out"):
        canvax.convert(path, tmp_path / "style.safetensors")
    assert torch.equal(load_file(tmp_path / "style.safetensors")["emb_params"], vectors)
    assert read_metadata(tmp_path / "style.safetensors")["name"] == "style"


def test_the_pickles_of_a_folder(tmp_path: Path) -> None:
    """In place, without those that are damaged or there already; not those of a network."""
    for name in ("a.pt", "b.bin", "c.pt"):
        torch.save(state(), tmp_path / name)
    (tmp_path / "b.bin").write_bytes(b"damaged")
    (tmp_path / "c.safetensors").write_bytes(b"kept")
    with pytest.warns(UserWarning, match=r"b\.bin|c\.pt") as warned:
        assert canvax.convert(tmp_path, tmp_path) == tmp_path
    assert [path.name for path in sorted(tmp_path.glob("*.safetensors"))] == ["a.safetensors", "c.safetensors"]
    assert [name for name in ("a.pt:", "b.bin:", "c.pt:") if any(name in str(one.message) for one in warned)] == [
        "b.bin:",
        "c.pt:",
    ]
    assert (tmp_path / "c.safetensors").read_bytes() == b"kept"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(canvax.CheckpointError):
        canvax.convert(tmp_path, tmp_path / "out")


def test_a_whole_model_from_a_pickle(made: Made, tmp_path: Path) -> None:
    folder, single = made("sd1")
    torch.save({"state_dict": load_file(single), "global_step": 1}, tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="global_step"):
        canvax.convert(tmp_path / "x.ckpt", tmp_path / "x.safetensors")
    again = canvax.convert(tmp_path / "x.safetensors", tmp_path / "folder")
    name = "unet/diffusion_pytorch_model.safetensors"
    want, got = load_file(folder / name), load_file(again / name)
    assert all(torch.equal(want[key], got[key]) for key in want)


def refused(path: Path, match: str) -> None:
    with pytest.raises(canvax.CheckpointError, match=match) as caught:
        canvax.convert(path, path.with_name("out.safetensors"))
    assert len(str(caught.value)) < 400
    assert not path.with_name("out.safetensors").exists()


@pytest.mark.parametrize("form", [NEW, OLD], ids=["zip", "legacy"])
def test_nothing_is_run(form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.ckpt"
    torch.save({"a": torch.ones(2), "b": Attack()}, path, **form)
    refused(path, r"asks for (posix|os)\.system")
    torch.save(torch.nn.Linear(2, 2), path, **form)
    refused(path, r"asks for torch\.nn\.modules\.linear\.Linear")
    for program in (
        b"cos\nsystem\n(S'touch attacked'\ntR.",
        b"(S'touch attacked'\nios\nsystem\n.",
        b"\x80\x02\x82\x01.",  # an extension code
        b"\x80\x02}r\x00\x00\x00\x08.",  # a memo of 2 GB
        b"\x80\x02ctorch._utils\n_rebuild_tensor\nN}X\x0c\x00\x00\x00__defaults__)s\x86b.",  # attributes of a function
    ):
        path.write_bytes(program if program.startswith(b"\x80") else b"\x80\x02" + program)
        refused(path, "file is refused|attributes of a function")
    assert not (tmp_path / "attacked").exists()


def test_broken_pickles(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(state(), path)
    whole = path.read_bytes()
    for cut in (10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(path, "no whole zip file|cannot be followed|not where")
    torch.save(state(), path, **OLD)
    whole = path.read_bytes()
    for cut in (10, 100, len(whole) - 200, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(path, "cannot be followed|does not fit|not those that it lists")
    path.write_bytes(b"not a pickle at all")
    refused(path, "none of the files that torch.save writes")
    torch.save({"a": 1}, path)
    refused(path, "holds no tensors")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "x")
    refused(path, "without data.pkl")
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2))
    refused(path, "not one that torch.save writes")


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    """The same zip with another program in it."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def test_sizes_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(6.0)}, path)
    rewritten(path, lambda data: data.replace(b"K\x06\x85", b"K\x07\x85", 1))  # a shape of 7 where there are 6
    refused(path, "does not fit")
    torch.save({"a": torch.arange(6.0)}, path)
    rewritten(
        path, lambda data: data.replace(b"K\x06\x85", b"J\xff\xff\xff\x7f\x85", 1).replace(b"K\x01\x85", b"K\x00\x85")
    )
    refused(path, "does not fit")  # two thousand million times the first number
    deep = b"\x80\x02}X\x01\x00\x00\x00aq\x00" + b"}X\x01\x00\x00\x00a" * 3000 + b"N" + b"s" * 3001 + b"."
    torch.save({"a": torch.arange(6.0)}, path)
    rewritten(path, lambda data: deep)
    refused(path, "too deep")
    rewritten(path, lambda data: b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.")  # a table in itself
    refused(path, "too deep")


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # of pickletools
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_pickles_of_strangers(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A true file of which bytes are changed ends in tensors or in one of canvax's own errors."""
    path = tmp_path_factory.getbasetemp() / "strange.pt"
    out = io.BytesIO()
    torch.save({"a": torch.arange(6.0), "b": {"c": torch.ones(2, 2).T}}, out, **data.draw(st.sampled_from([NEW, OLD])))
    raw = bytearray(out.getvalue())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    try:
        for one in read_pickled(path).arrays:
            assert one.get().shape == one.shape
    except canvax.CheckpointError:
        pass


@pytest.mark.slow
def test_command_line(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, single = made("sd1")
    assert main(["convert", str(single), str(tmp_path / "out"), "--dtype", "float16", "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    weights = load_file(tmp_path / "out/unet/diffusion_pytorch_model.safetensors")
    assert {array.dtype for array in weights.values()} == {torch.float16}
    assert main(["convert", str(folder), str(single)]) == 2
    assert "exists already" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["convert", str(folder), str(tmp_path / "x.safetensors"), "--json"]) == 0
