"""Finding checkpoints: names, folders, and a hub on this machine that imitates the real one."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save, save_file

from canvax.cli import main
from canvax.errors import CheckpointError, InputError
from canvax.families.convert import convert
from canvax.models.configs import TinyConfig
from canvax.models.tiny import tiny_spec
from canvax.params import init_params
from canvax.planning.plan import architecture
from canvax.weights.hub import within
from canvax.weights.load import Component
from canvax.weights.location import BUNDLED, Location, warn_unused_cache
from canvax.weights.open import open_files
from canvax.weights.overrides import Overrides
from canvax.weights.save import save_component
from tests.support.bundled import TEXT_WIDTH
from tests.support.checkpoints import INDEX, raw_safetensors, toy_params, write_checkpoint, write_frame, write_json
from tests.support.forks import run_fork
from tests.support.hub_imitation import HubImitation, Repository, folder_files

# huggingface_hub reads HF_* when it is imported, so what depends on them runs in a process of its own.
from tests.support.refusals import refused

SCRIPT = """
import json, sys, warnings
from canvax.errors import CanvaxError
from canvax.weights.open import find_tokenizer, open_files, open_network, read_config
from canvax.weights.location import Location
def refuse(index):
    raise CanvaxError("not wanted: " + index["_class_name"])
def look(files):
    raise CanvaxError("looked: " + files.config("unet")["_class_name"])
answers = []
for call in json.load(sys.stdin):
    options = {}
    if call.pop("refuse", False):
        options["accept"] = refuse
    if call.pop("look", False):
        options["look"] = look
    without = call.pop("without", False)
    config = call.pop("config", None)
    network, preview = call.pop("network", None), call.pop("preview", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if preview:
                from canvax import load_preview
                answers.append({"blocks": load_preview(**call).cfg.num_decoder_blocks})
                continue
            source = Location(call.pop("model"), **call)
            if source.argument == "tokenizer":
                answers.append(sorted(path.name for path in find_tokenizer(source).iterdir()))
                continue
            if config:
                answers.append(read_config(source, config))
                continue
            if network is not None:
                files = open_network(source, component=network)
                names = sorted(path.name for path in files.path.iterdir())
                answers.append({"sha": files.revision, "files": names, "arrays": len(files.entries(network))})
                continue
            files = open_files(source, weights=not without, **options)
            if without:
                answers.append({"sha": files.revision, "unet": files.config("unet")})
                continue
            answer = {"folder": str(files.folder()), "sha": files.revision, "name": str(files),
                      "unread": files.unread, "weights": {n: sorted({e.path.name for e in files.entries(n)})
                      for n in ("unet", "vae", "text_encoder") if n in files.components}}
        except CanvaxError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
    answers.append({**answer, "warnings": [str(w.message) for w in caught if w.category is UserWarning]})
print(json.dumps(answers))
"""


class Client:
    """Opens models in a separate process, which downloads from the imitation of the Hub."""

    def __init__(self, url: str, home: Path) -> None:
        self.url, self.home = url, home
        self.stderr = ""

    def __call__(self, *calls: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        env = {
            **kept,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_ETAG_TIMEOUT": "2",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TQDM_POSITION": "-1",
            "NO_PROXY": "127.0.0.1",
            **variables,
        }
        answers, self.stderr = run_fork(SCRIPT, calls, env, self.home.parent / "fork")
        return answers


@pytest.fixture
def hub() -> Iterator[HubImitation]:
    with HubImitation() as server:
        yield server


@pytest.fixture
def client(hub: HubImitation, tmp_path: Path) -> Client:
    return Client(hub.url, tmp_path / "home")


NEEDED = [
    "canvax.json",
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]

NOT_NEEDED = {
    "README.md": b"# a model",
    "v1-5-pruned.ckpt": b"PK\x03\x04",
    "v1-5-pruned.safetensors": b"?",
    "unet/diffusion_pytorch_model.bin": b"PK\x03\x04",
    "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
    "unet/diffusion_flax_model.msgpack": b"\x80",
    "unet/pipeline.py": b"raise SystemExit",
    "safety_checker/model.safetensors": b"unread",
    "feature_extractor/preprocessor_config.json": b"{}",
}


@pytest.fixture
def toy(tmp_path: Path) -> dict[str, bytes]:
    return folder_files(write_checkpoint(tmp_path / "toy", toy_params()))


def test_one_commit_and_only_needed_files(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    sha = hub.put("someone/toy", {**toy, **NOT_NEEDED})
    hub.after_info = lambda: hub.repositories["someone/toy"].commit(
        "main", {"model_index.json": b"[]"}
    )  # the branch moves at once
    (answer,) = client({"model": "someone/toy"})
    assert answer["sha"] == sha
    assert answer["name"] == f"someone/toy at {sha[:12]}"
    assert answer["unread"] == ["safety_checker", "feature_extractor"]
    assert hub.fetched() == NEEDED
    assert hub.revisions_used() == {sha}
    assert [path for _, path in hub.requests if "main" in path] == ["/api/models/someone/toy/revision/main"]
    assert folder_files(Path(answer["folder"])).keys() == set(NEEDED)
    assert "Fetching 3 files: 100%" in client.stderr


def test_a_second_time_asks_for_the_commit_only(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    sha = hub.put("someone/toy", toy)
    client({"model": "someone/toy", "progress": False})
    assert client.stderr == ""
    hub.requests.clear()
    (again,) = client({"model": "someone/toy"})
    assert [path for _, path in hub.requests] == ["/api/models/someone/toy/revision/main"]
    hub.requests.clear()
    offline, by_sha = client(
        {"model": "someone/toy", "local_files_only": True}, {"model": "someone/toy", "revision": sha}
    )
    (env,) = client({"model": "someone/toy"}, HF_HUB_OFFLINE="1")
    (missing,) = client({"model": "someone/other"}, HF_HUB_OFFLINE="1")
    assert [path for _, path in hub.requests] == [f"/api/models/someone/toy/revision/{sha}"]
    assert offline["sha"] == env["sha"] == again["sha"] == by_sha["sha"] == sha
    assert missing["error"] == "HubError"
    assert "is not in the cache" in missing["text"]
    assert "HF_HUB_OFFLINE" in missing["text"]


def test_a_modular_pipeline(hub: HubImitation, client: Client) -> None:
    """Its index has another name, in the cache too; a component in another repository is known before downloads."""
    where = {"pretrained_model_name_or_path": "someone/klein", "revision": None, "variant": None}
    kinds = {"transformer": ["diffusers", "Flux3Transformer2DModel"], "tokenizer": ["transformers", "AutoProcessor"]}
    index: dict[str, Any] = {"_class_name": "Flux3ModularPipeline", "_blocks_class_name": "Flux3AutoBlocks"}
    for name, kind in kinds.items():
        index[name] = [None, None, {"type_hint": kind, "subfolder": name, **where}]
    files = {
        "modular_model_index.json": json.dumps(index).encode(),
        "transformer/config.json": b"{}",
        "transformer/diffusion_pytorch_model.safetensors": save({"a": np.zeros(2)}),
        "tokenizer/tokenizer.json": b"{ }",
    }
    sha = hub.put("someone/klein", {**files, "README.md": b"?"})
    (answer,) = client({"model": "someone/klein", "progress": False})
    assert answer.get("sha") == sha
    assert hub.fetched() == sorted(files)
    (offline,) = client({"model": "someone/klein", "local_files_only": True})
    assert offline.get("sha") == sha
    hub.put("someone/bare", {k: v for k, v in files.items() if not k.startswith("tokenizer")})
    hub.requests.clear()
    (missing,) = client({"model": "someone/bare"})
    assert missing["error"] == "CheckpointError"
    assert "someone/klein" in missing["text"]
    assert hub.fetched() == ["modular_model_index.json"]


def test_configs_alone(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    """What planning needs; it does not pass for the whole checkpoint afterwards, nor does it need one."""
    bare = {name: data for name, data in toy.items() if not name.endswith(".safetensors")}
    sha = hub.put("someone/toy", bare)
    (answer,) = client({"model": "someone/toy", "without": True})
    assert (answer["sha"], answer["unet"]) == (sha, json.loads(toy["unet/config.json"]))
    assert hub.fetched() == [name for name in NEEDED if not name.endswith(".safetensors")]
    assert hub.revisions_used() == {sha}
    (whole,) = client({"model": "someone/toy", "local_files_only": True})
    assert whole["error"] in ("HubError", "CheckpointError")


@pytest.mark.slow
def test_a_network_of_its_own(hub: HubImitation, client: Client) -> None:
    """A repository without model_index.json; the second time it is in the cache, also offline."""
    files = {"config.json": b"{}", "diffusion_pytorch_model.safetensors": raw_safetensors({})}
    hub.repositories["someone/tiny"] = Repository()
    more = {"diffusion_pytorch_model.bin": b"PK", "other/diffusion_pytorch_model.safetensors": b"?"}
    sha = hub.repositories["someone/tiny"].commit("main", files | more)
    call = {"model": "someone/tiny", "network": ""}
    assert client(call) == [{"sha": sha, "files": sorted(files), "arrays": 0}]
    assert hub.fetched() == sorted(files)
    hub.requests.clear()
    assert client(call | {"local_files_only": True}) == [{"sha": sha, "files": sorted(files), "arrays": 0}]
    assert hub.requests == []
    assert client(call | {"model": "someone/nothing"})[0]["error"] == "HubError"
    hub.repositories["someone/tiny"].commit("main", {"config.json": b"{}", "diffusion_pytorch_model.bin": b"PK"})
    assert "pickle" in client(call)[0]["text"]
    branch = hub.repositories["someone/tiny"].commit("other", files | {"config.json": b'{"a": 1}'})
    assert client(call | {"revision": "other"})[0]["sha"] == branch


def test_a_safety_checker_if_asked(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    own = {"config.json": b"{}", "model.safetensors": raw_safetensors({})}
    inside = {f"safety_checker/{name}": data for name, data in own.items()}
    index = json.loads(toy["model_index.json"]) | {"safety_checker": ["stable_diffusion", "X"]}
    hub.repositories["someone/toy"] = Repository()
    sha = hub.repositories["someone/toy"].commit(
        "main", toy | inside | {"model_index.json": json.dumps(index).encode(), "safety_checker/x.bin": b"PK"}
    )
    client({"model": "someone/toy"})
    assert not any(name.startswith("safety_checker") for name in hub.fetched())
    call = {"model": "someone/toy", "network": "safety_checker"}
    assert client(call) == [{"sha": sha, "files": sorted(own), "arrays": 0}]


def test_one_config(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    hub.put("someone/toy", toy)
    name = "scheduler/scheduler_config.json"
    assert client({"model": "someone/toy", "config": name}) == [{"_class_name": "DDIMScheduler"}]
    assert hub.fetched() == [name]
    (absent,) = client({"model": "someone/toy", "config": "scheduler_config.json"})
    assert "has no file scheduler_config.json" in absent["text"]


@pytest.mark.slow
def test_a_tokenizer_of_a_model(hub: HubImitation, client: Client) -> None:
    """Of a repository its files alone are fetched, from ``tokenizer``, the top or a folder; later without the Hub."""
    words = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "chat_template.jinja": b""}
    for name, folder in (("o/model", "tokenizer/"), ("o/words", ""), ("o/deep", "a/b/")):
        files = {folder + file: data for file, data in words.items()}
        hub.put(name, {"model.safetensors": b"?", **files})
    calls = [{"model": name, "argument": "tokenizer"} for name in ("o/model", "o/words", "o/deep/a/b")]
    assert client(*calls) == [sorted(words)] * 3
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
    hub.requests.clear()
    assert client(*calls, HF_HUB_OFFLINE="1") == [sorted(words)] * 3
    assert hub.requests == []
    assert client({"model": "o/deep", "argument": "tokenizer"})[0]["error"] == "CheckpointError"


def test_every_argument_of_a_preview_reaches_the_hub(hub: HubImitation, client: Client, tmp_path: Path) -> None:
    """A branch of its own, a token, a folder for the files, and a second time without asking."""
    repository = hub.repositories["someone/tiny"] = Repository(token="secret")
    for branch, blocks in (("main", (1, 1)), ("deeper", (2, 1))):
        cfg = TinyConfig(encoder_block_out_channels=(4, 4), decoder_block_out_channels=(4, 4),
                         num_encoder_blocks=(1, 1), num_decoder_blocks=blocks)  # fmt: skip
        spec, values = tiny_spec(cfg), dataclasses.asdict(cfg) | {"_class_name": "AutoencoderTiny"}
        save_component(tmp_path / branch, Component("", spec, "diffusers"), init_params(spec, 0), values)
        repository.commit(branch, folder_files(tmp_path / branch))
    usual = {"model": "someone/tiny", "preview": True, "token": "secret"}
    elsewhere = usual | {"cache_dir": str(tmp_path / "files"), "revision": "deeper"}
    main, deeper, without, nowhere, refused = client(
        usual,
        elsewhere,
        elsewhere | {"local_files_only": True},
        usual | {"local_files_only": True, "revision": "deeper"},
        usual | {"token": None, "revision": "deeper"},
    )
    assert (main, deeper, without) == ({"blocks": [1, 1]}, {"blocks": [2, 1]}, {"blocks": [2, 1]})
    assert "is not in the cache" in nowhere["text"]
    assert refused["error"] == "HubError"


def test_variants(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    files = {name: data for name, data in toy.items() if name != "text_encoder/model.safetensors"}
    files["unet/diffusion_pytorch_model.fp16.safetensors"] = toy["unet/diffusion_pytorch_model.safetensors"]
    files["text_encoder/model.fp16.safetensors"] = toy["text_encoder/model.safetensors"]
    hub.put("someone/toy", files)
    half, plain, other = client(
        {"model": "someone/toy", "variant": "fp16"},
        {"model": "someone/toy"},
        {"model": "someone/toy", "variant": "bf16"},
    )
    assert half["weights"] == {
        "unet": ["diffusion_pytorch_model.fp16.safetensors"],
        "vae": ["diffusion_pytorch_model.safetensors"],
        "text_encoder": ["model.fp16.safetensors"],
    }
    assert "unet/diffusion_pytorch_model.safetensors" not in hub.fetched()
    assert "holds only variants of the weights; pass variant='fp16'" in plain["text"]
    assert "no weights of variant = 'bf16'; it has 'fp16'" in other["text"]


def test_shards_and_flax_branch(hub: HubImitation, client: Client, toy: dict[str, bytes], tmp_path: Path) -> None:
    repository = hub.repositories["someone/toy"] = Repository()
    files = dict(toy)
    weights = files.pop("unet/diffusion_pytorch_model.safetensors")
    shards = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    names = sorted(load(weights))
    table = {name: shards[i % 2] for i, name in enumerate(names)}
    files["unet/diffusion_pytorch_model.safetensors.index.json"] = json.dumps({"weight_map": table}).encode()
    files |= {f"unet/{shard}": weights for shard in shards}
    repository.commit("main", files)
    flax = folder_files(write_checkpoint(tmp_path / "flax", toy_params(), form="flax"))
    sha = repository.commit("refs/pr/95", {**flax, "unet/diffusion_pytorch_model.bin": b"PK\x03\x04"})
    sharded, branch = client({"model": "someone/toy"}, {"model": "someone/toy", "revision": "refs/pr/95"})
    (offline,) = client({"model": "someone/toy", "revision": "refs/pr/95", "local_files_only": True})
    assert sharded["weights"]["unet"] == shards
    assert branch["sha"] == offline["sha"] == sha
    assert branch["weights"]["text_encoder"] == ["flax_model.msgpack"]
    assert not any(name.endswith(".bin") for name in hub.fetched())


def test_pickles_only_are_refused(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    files = {name.replace(".safetensors", ".bin"): data for name, data in toy.items()}
    hub.put("someone/pickles", files)
    hub.put("someone/single", {"model.ckpt": b"PK", "README.md": b""})
    pickles, single = client({"model": "someone/pickles"}, {"model": "someone/single"})
    for answer in (pickles, single):
        assert answer["error"] == "CheckpointError"
        assert "does not open pickles" in answer["text"]
        assert "canvax convert" in answer["text"]
    assert hub.fetched() == ["model_index.json"]


def test_who_may_read(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    hub.put("someone/private", toy, token="hf_secret")
    hub.put("someone/gated", toy, token="hf_secret", gated=True)
    calls = [
        {"model": "someone/private"},
        {"model": "someone/gated"},
        {"model": "someone/nothing"},
        {"model": "someone/gated", "revision": "nowhere"},
        {"model": "someone/private", "token": "hf_secret"},
    ]
    private, gated, nothing, nowhere, allowed = client(*calls)
    assert "no such repository, or it is private" in private["text"]
    assert "HF_TOKEN" in private["text"]
    assert "is gated. Accept its terms" in gated["text"]
    assert "no such repository" in nothing["text"]
    assert "'nowhere'" in nowhere["text"]
    assert "no such revision" in nowhere["text"]
    assert {answer["error"] for answer in (private, gated, nothing, nowhere)} == {"HubError"}
    assert allowed["sha"]
    (by_env,) = client({"model": "someone/gated"}, HF_TOKEN="hf_secret")
    assert by_env["sha"]


def test_hub_out_of_reach(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    sha = hub.put("someone/toy", toy)
    client({"model": "someone/toy"})
    nowhere = "http://127.0.0.1:9"
    cached, missing = client({"model": "someone/toy"}, {"model": "someone/other"}, HF_ENDPOINT=nowhere)
    assert cached["sha"] == sha
    assert "cannot be reached" in cached["warnings"][0]
    assert sha in cached["warnings"][0]
    assert missing["error"] == "HubError"
    assert "cannot be reached" in missing["text"]


def test_an_answer_that_drips_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        within(0.1, threading.Event().wait)
    assert time.monotonic() - began < 5
    assert within(5, lambda: 1) == 1
    with pytest.raises(KeyError):
        within(5, lambda: {}["a"])


def test_hashes_that_are_paths(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    """The Hub library makes the name of a file of a hash; nothing may be written there."""
    evil = client.home.parent / "evil"
    for i, etag in enumerate(["../../../../evil", str(evil), "..", ""]):
        hub.put(f"someone/evil{i}", toy, etags={"unet/config.json": [etag] * 9})
    for answer in client(*({"model": name} for name in hub.repositories)):
        assert answer["error"] == "HubError"
        assert "not with those of a Hub" in answer["text"]
        assert "unet/config.json" in answer["text"]
    assert not any(name.endswith("config.json") for name in hub.fetched())
    assert not list(client.home.parent.rglob("evil"))
    # A Hub that answers well the first time cannot be stopped, but neither goes it unnoticed.
    hub.put("someone/two", toy, etags={"unet/config.json": ["0" * 64, str(evil)]})
    assert f"written to {evil}, outside of the cache" in client({"model": "someone/two"})[0]["text"]


def test_names_outside_the_repository(hub: HubImitation, client: Client) -> None:
    for i, name in enumerate(["../evil.json", "/evil.json", "unet/../../evil.json", "..\\evil.json", "C:evil.json"]):
        hub.put(f"someone/evil{i}", {"model_index.json": b"{}", name: b"{}"})
    for answer in client(*({"model": name} for name in hub.repositories)):
        assert answer["error"] == "HubError"
        assert "no name inside a folder" in answer["text"]
    assert hub.fetched() == []


def test_descriptions_that_are_none(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    """Those of a login page, of an empty proxy, and of no Hub."""
    evil = b'{"id": "a/b", "sha": "../../../../evil", "siblings": []}'
    pages = [
        b"<html>log in</html>",
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"id": "a/b", "siblings": [{}]}',
        evil,
        b"[" * 60_000,
    ]
    for i, info in enumerate(pages):
        hub.put(f"someone/toy{i}", toy, info=info)
    for answer in client(*({"model": name} for name in hub.repositories)):
        assert answer["error"] == "HubError"
        assert "not that of a Hub" in answer["text"] or "not with that of a Hub" in answer["text"]
    assert hub.fetched() == []


def test_bad_downloads_are_not_kept(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    """What a proxy sent once, a login page or half a file, is downloaded again the next time."""
    weights = "unet/diffusion_pytorch_model.safetensors"
    names = ["model_index.json", "unet/config.json", "tokenizer/merges.txt", weights]
    for i, name in enumerate(names):
        content = toy[name][: len(toy[name]) // 2] if name == weights else b"<!DOCTYPE html><html>Log in</html>"
        hub.put(f"someone/toy{i}", toy, contents={name: content})
    for name, answer in zip(names, client(*({"model": model} for model in hub.repositories)), strict=True):
        assert answer["error"] == "CheckpointError"
        assert name in answer["text"].replace(os.sep, "/")
        assert "was removed from the cache; try again" in answer["text"]
    for repository in hub.repositories.values():
        repository.contents.clear()
    for name, answer in zip(names, client(*({"model": model} for model in hub.repositories)), strict=True):
        assert (Path(answer["folder"]) / name).read_bytes() == toy[name]


def test_unwanted_models_are_not_fetched(hub: HubImitation, client: Client, toy: dict[str, bytes]) -> None:
    hub.put("someone/toy", toy)
    code = {**INDEX, "unet": ["my_unet", "Unet"]}
    hub.put("someone/code", {**toy, "model_index.json": json.dumps(code).encode()})
    unwanted, coded = client({"model": "someone/toy", "refuse": True}, {"model": "someone/code"})
    assert unwanted["text"] == "not wanted: StableDiffusionPipeline"
    assert "never runs code" in coded["text"]
    assert hub.fetched() == ["model_index.json"] * 2


def test_what_is_wrong_is_seen_before_weights_are_fetched(
    hub: HubImitation, client: Client, toy: dict[str, bytes]
) -> None:
    """And weights that nobody wants are not fetched at all."""
    sha = hub.put("someone/toy", toy)
    looked, without = client({"model": "someone/toy", "look": True}, {"model": "someone/toy", "without": True})
    assert looked["text"] == "looked: UNet2DConditionModel"
    assert without["sha"] == sha
    assert not any(name.endswith(".safetensors") for name in hub.fetched())
    again, whole, offline = client(
        {"model": "someone/toy", "local_files_only": True},
        {"model": "someone/toy"},
        {"model": "someone/toy", "local_files_only": True},
    )
    assert "is not in the cache" in again["text"]  # what is not whole is not remembered
    assert whole["weights"] == offline["weights"] != {}


def test_bundled_model_and_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = open_files(Location("emoji"))
    assert bundled.folder() == BUNDLED["emoji"]
    assert bundled.components["scheduler"] == "DDIMScheduler"
    assert bundled.config("unet")["cross_attention_dim"] == TEXT_WIDTH
    write_checkpoint(tmp_path / "emoji", toy_params())
    monkeypatch.chdir(tmp_path)
    assert open_files(Location("emoji")).folder() == BUNDLED["emoji"]
    own = open_files(Location("./emoji"))
    assert own.folder().resolve() == tmp_path / "emoji"
    assert own.unread == ("safety_checker", "feature_extractor")
    assert open_files(Location(Path("emoji"))).folder().resolve() == tmp_path / "emoji"
    with pytest.warns(UserWarning, match="'bf16' is ignored"):
        open_files(Location("./emoji", revision="bf16"))
    with pytest.warns(UserWarning, match="cache_dir=.* is ignored"):
        warn_unused_cache(tmp_path, "./emoji")
    warn_unused_cache(None, "emoji")
    warn_unused_cache(tmp_path, "emoji", "someone/toy")
    with refused("cache_dir"):
        Location(cache_dir=tmp_path / "emoji" / "model_index.json" / "cache")


def test_a_part_on_the_hub_has_use_for_cache_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing warns that it is ignored; warnings are errors here."""
    monkeypatch.setattr(Overrides, "apply", lambda self, files, **_: files)
    convert("emoji", tmp_path / "out", vae="someone/vae", cache_dir=tmp_path)
    architecture(BUNDLED["emoji"], Overrides.of("someone/vae"), cache_dir=tmp_path)
    assert main(["info", "emoji", "--vae", "someone/vae", "--cache-dir", str(tmp_path)]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "model",
    [
        *("./nowhere", "a/b/c", "emojy", "someone/../other", "a" * 5000, "~nobody-of-that-name/x", "a\0b"),
        "https://example.com/model.safetensors",
    ],
    ids=lambda model: model[:20],
)
def test_names_that_mean_nothing(model: str) -> None:
    with pytest.raises(InputError) as caught:
        open_files(Location(model))
    assert (caught.value.argument, caught.value.value) == ("model", model)


def test_places_by_argument() -> None:
    """What may stand behind a Hub id depends on what is looked for."""
    for argument, name, place in (
        ("model", "o/n", ("o/n", "")),
        ("model", "https://huggingface.co/o/n/", ("o/n", "")),
        ("vae", "o/n/vae", ("o/n", "vae")),
        ("image_encoder", "o/n/a/b", ("o/n", "a/b")),
        ("source", "o/n/a/b.safetensors", ("o/n", "a/b.safetensors")),
        ("source", "o/n/a", None),
        ("controlnet", "o/n/a", None),
        ("vae", "o/n/../a", None),
    ):
        assert Location(name, argument=argument).repository == place


def test_files_instead_of_folders(tmp_path: Path) -> None:
    single = tmp_path / "model.safetensors"
    single.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is truncated"):
        open_files(Location(single))
    other = {"is a LoRA": "unet.x.lora_down.weight", "is a textual": "emb_params", "holds no whole model": "x.weight",
             "is for FLUX": "double_blocks.0.x.weight",
             "is for Stable Diffusion 3": "model.diffusion_model.joint_blocks.0.x.weight"}  # fmt: skip
    for words, name in other.items():
        save_file({name: np.zeros((2, 2), np.float32)}, single)
        with pytest.raises(CheckpointError, match=words):
            open_files(Location(single))
    (tmp_path / "notes.txt").write_text("a")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        open_files(Location(tmp_path / "notes.txt"))
    (tmp_path / "model.safetensors.crdownload").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is a download that has not finished"):
        open_files(Location(tmp_path / "model.safetensors.crdownload"))
    (tmp_path / "models" / "checkpoints").mkdir(parents=True)
    (tmp_path / "models" / "checkpoints" / "dream.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"Pass the file of a model in it, such as .*dream\.safetensors"):
        open_files(Location(tmp_path / "models"))
    with pytest.raises(CheckpointError, match=r"not a checkpoint.*Pass one of its files"):
        open_files(Location(tmp_path))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.ckpt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="does not open pickles"):
        open_files(Location(tmp_path / "bare"))
    with pytest.raises(CheckpointError, match="does not open pickles"):
        open_files(Location(tmp_path / "bare" / "model.ckpt"))
    (tmp_path / "bare" / "model.safetensors").touch()
    with pytest.raises(CheckpointError) as refused:
        open_files(Location(tmp_path / "bare" / "model.ckpt"))
    assert str(refused.value).endswith("model.safetensors")
    assert "convert" not in str(refused.value)


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_opened(tmp_path: Path, what: str) -> None:
    """A pipe would be waited for, and a device read without an end."""
    write_checkpoint(tmp_path, toy_params())
    for name in ("unet/config.json", "vae/diffusion_pytorch_model.safetensors"):
        (tmp_path / name).unlink()
        if what == "pipe":
            os.mkfifo(tmp_path / name)
        elif what == "device":
            (tmp_path / name).symlink_to("/dev/zero")
        else:
            (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"unet/config.json: cannot be read"):
        open_files(Location(tmp_path))
    (tmp_path / "unet/config.json").unlink() if what != "folder" else (tmp_path / "unet/config.json").rmdir()
    write_json(tmp_path / "unet/config.json", {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_files(Location(tmp_path)).entries("vae")


def test_look_is_called_once_before_weights_are_opened(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_params())
    seen: list[Any] = []
    files = open_files(Location(tmp_path), look=seen.append)
    assert seen == [files]


def test_missing_components_are_reported_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_params())
    shutil.rmtree(tmp_path / "unet")
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (tmp_path / "text_encoder" / "config.json").unlink()
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(CheckpointError) as caught:
        open_files(Location(tmp_path))
    text = str(caught.value)
    assert "unet: the folder is missing" in text
    assert "vae: no weights found" in text
    assert "text_encoder/config.json: cannot be read" in text.replace(os.sep, "/")
    assert "tokenizer: the folder is missing" in text


def test_damaged_index(tmp_path: Path) -> None:
    write_frame(tmp_path)
    for content, message in (("{", "not valid JSON"), ("[]", "not a JSON object"), ("[" * 100000, "not valid JSON")):
        (tmp_path / "model_index.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            open_files(Location(tmp_path))
    write_json(tmp_path / "model_index.json", {**INDEX, "unet": "UNet"})
    with pytest.raises(CheckpointError, match="describes 'unet' as UNet"):
        open_files(Location(tmp_path))


def test_shards_outside_the_folder_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_params())
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    index = tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    for name in ("../../etc/secret.safetensors", "..\\..\\secret.safetensors", "C:secret.safetensors"):
        write_json(index, {"weight_map": {"a": name}})
        with pytest.raises(CheckpointError, match="not a safetensors file name"):
            open_files(Location(tmp_path))
    write_json(index, {"weight_map": {"a": "diffusion_pytorch_model-00001-of-00001.safetensors"}})
    with pytest.raises(CheckpointError, match="1 of 1 shards are missing"):
        open_files(Location(tmp_path))
