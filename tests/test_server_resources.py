"""What a server holds and for how long, and names and paths that leave it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.applications import Starlette
from starlette.testclient import TestClient

import canvax
from canvax.errors import InputError
from canvax.server import a1111, huggingface, openai
from canvax.server.control import publicly
from canvax.server.jobs import Ask, Job
from canvax.server.served import Served, model_names
from canvax.server.work import check
from tests import server_stub
from tests.server_stub import StubEngine

PIPE = canvax.load("emoji", progress=False)
MODEL = PIPE.model

# Names.


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("модель", "%D0%BC%D0%BE%D0%B4%D0%B5%D0%BB%D1%8C"),
        ("a\nb", "a%0Ab"),
        ("100%", "100%25"),
        ("owner/my model", "owner/my model"),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/images/generations", {"prompt": "x"}),
        ("/v1/images/generations", {"prompt": "x", "stream": True}),
        ("/sdapi/v1/txt2img", {"prompt": "x"}),
        ("/hf", {"inputs": "x"}),
    ],
)
def test_any_model_name_fits_into_a_header(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], name: str, header: str
) -> None:
    monkeypatch.setattr(server_stub, "CARD", replace(server_stub.CARD, id=name))
    engine = StubEngine()
    app = Starlette(routes=[*openai.routes(engine), *a1111.routes(engine), *huggingface.routes(engine)])
    answer = TestClient(app).post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-canvax-model"] == header


def test_a_model_on_the_disk_is_named_without_its_folders(tmp_path: Path) -> None:
    file, folder = tmp_path / "anime.v2.safetensors", tmp_path / "photo"
    save_file({"model.diffusion_model.x": np.zeros(2, np.float32)}, file)
    folder.mkdir()
    asked = [str(file), str(folder), "owner/name", "emoji"]
    assert model_names(asked) == dict(zip(["anime.v2", "photo", "owner/name", "emoji"], asked, strict=True))
    (tmp_path / "anime.v2").mkdir()
    with pytest.raises(InputError):
        model_names([str(file), str(tmp_path / "anime.v2")])


def test_the_metadata_of_an_image_names_no_folder_of_the_server() -> None:
    model: Any = MODEL
    asked = check(Ask("a red apple", seed=1), "public", model)
    job = Job(Ask("a red apple"), "public", asked.pictures(), cancel=lambda job: None)
    assert asked.item(job, job.pictures[0]).metadata(model)["model"] == "public"
    found = publicly({"controlnet": ["/home/alice/canny"], "vae": "/home/alice/fine.safetensors", "seed": 1})
    assert found == {"controlnet": ["canny"], "vae": "fine", "seed": 1}


@pytest.mark.parametrize("revision", [None, "0123abcd"])
def test_a_model_is_loaded_again_at_the_commit_of_its_first_load(revision: str | None) -> None:
    calls: list[dict[str, Any]] = []

    def load(name: str, **keywords: Any) -> Any:
        calls.append(keywords)
        model = SimpleNamespace(revision=revision, vae=MODEL.vae)
        return SimpleNamespace(model=model, programs=PIPE.programs, params={}, safety_checker=None)

    served = Served("x", load)
    served.take_off()
    served.put_on()
    assert calls == [{}, {"revision": revision} if revision else {}]
