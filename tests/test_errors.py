"""Errors and hints are records; entry points make sentences of them. All wording is in ``golden/errors.txt``.

It has calls that fail, with ``pipe`` the bundled model, small ones that are ``steered`` by a ControlNet, ``typed`` by a
ControlNet-Union or ``prompted`` by two IP-Adapters, ``table`` of samplers and ``job`` of servers, and commands that
fail before they do anything; below each is its error. Add a line for another one. Where a change of wording is meant,
``CANVAX_WRITE_GOLDEN=1 pytest tests/test_errors.py`` writes the file again, and its diff is read.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import pickle
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import canvax
from canvax import ImagePrompt
from canvax.cli import BAD_INPUT, FAILED, main
from canvax.cli.arguments import parse
from canvax.cli.images import gather
from canvax.compile.monitor import compilations
from canvax.errors import (
    HintWarning,
    InputError,
    check_count,
    check_flag,
    check_function,
    check_number,
    check_utf8,
    conflict,
    needs,
    plain,
    refuse_tracers,
    shown,
)
from canvax.models.configs import UNetConfig
from canvax.models.presets import SD15_UNET
from canvax.samplers import SamplerTable, build_table, from_scheduler_config
from canvax.scale.rows import Row
from canvax.scale.serve import ServeArgs
from canvax.scale.work import Worker
from canvax.server.jobs import JobRequest, Rejected
from canvax.server.work import check
from canvax.train import controlnet, dreambooth, finetune, loop, lora, step, task, textual_inversion
from tests.support import control_files, ip_adapter_files, small_sdxl
from tests.support.drawing import one_device
from tests.support.small_checkpoint import UNET
from tests.test_finetune import write_pictures

GOLDEN = Path(__file__).parent / "golden" / "errors.txt"


class Strange:
    """Raises whenever something looks at it, as an array does whose buffer is gone."""

    def _fail(self, *_: Any) -> Any:
        raise RuntimeError("gone")

    __index__ = __float__ = __repr__ = __len__ = __iter__ = __array__ = __bool__ = _fail


def table(steps: Any = 20, *, config: Any = None, **given: Any) -> SamplerTable:
    """A table of a sampler, of Stable Diffusion's config with some fields changed."""
    fields = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    own = {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False, "clip_sample": False}
    return build_table(from_scheduler_config({**fields, **own, **(config or {})}), steps, **given)


@pytest.fixture(scope="module")
def networks(small: canvax.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, canvax.Pipeline]:
    """Pipelines that read further images."""
    root = tmp_path_factory.mktemp("networks")
    adapters = [ip_adapter_files.ip_adapter(root / f"{kind}.safetensors", kind, UNET) for kind in ("plain", "plus")]
    xl = canvax.load(small_sdxl.build(root / "xl"), dtype="float32", mesh=one_device())
    return {
        "steered": small.with_controlnet(control_files.controlnet(root / "net", small)),
        "typed": xl.with_controlnet(control_files.union(root / "union", xl)),
        "prompted": small.with_ip_adapter(adapters, ip_adapter_files.encoder(root / "encoder")),
    }


def said(source: str, pipe: canvax.Pipeline, networks: dict[str, canvax.Pipeline]) -> str:
    """The error of a call: its kind, its argument and its message."""
    names = {
        **networks, "edges": control_files.edges, "ImagePrompt": ImagePrompt, "PHOTO": control_files.edges(1, (40, 32)),
        "loop": loop, "lora": lora, "finetune": finetune, "dreambooth": dreambooth, "controlnet": controlnet,
        "step": step, "task": task, "textual_inversion": textual_inversion, "ServeArgs": ServeArgs,
        "unet": lambda **fields: UNetConfig.from_dict({**dataclasses.asdict(SD15_UNET), **fields}),
        "pipe": pipe, "canvax": canvax, "jax": jax, "np": np, "Image": Image, "table": table, "STRANGE": Strange(),
        "IMAGE": Image.new("RGB", (64, 64)), "LATENTS": np.zeros((1, 8, 8, 32), np.float32),
        "job": lambda prompt, **given: check(JobRequest(prompt, **given), "emoji", pipe.model),
    }  # fmt: skip

    def row(**given: Any) -> None:
        raise canvax.CanvaxError(Worker(pipe).check(Row("1", given)).error)  # type: ignore[union-attr]

    try:
        eval(source, names | {"row": row})
    except Rejected as refused:
        return f"{refused.status} {refused.code}({refused.param}): {refused}"
    except (canvax.CanvaxError, AttributeError, TypeError) as error:
        argument = getattr(error, "argument", "")
        problem = re.sub(r"/\S+/(?=(small|xl)\b)", "", str(error))  # the folder of this run
        return f"{type(error).__name__}{argument and f'({argument})'}: {problem}"
    raise AssertionError(f"{source} is taken")


@pytest.mark.filterwarnings("ignore:arguments after:DeprecationWarning")
def test_wording(
    emoji: canvax.Pipeline, networks: dict[str, canvax.Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In an empty folder, beside which are rows and pictures; no weights are read for a command."""
    write_pictures(tmp_path / "pictures")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a cat"}')
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.delenv("CANVAX_KEYS", raising=False)
    monkeypatch.setattr("canvax.server.logs.log_to_stderr", lambda quiet: None)  # of this process, for good
    monkeypatch.setattr("canvax.server.engine.ImageEngine.start", None)  # errors come before a model is loaded
    golden, lines = GOLDEN.read_text().splitlines(), []
    for source in (line for line in golden if line and not line.startswith(" ")):
        if source.startswith("canvax "):
            with monkeypatch.context() as patch:
                if "--seed-size" not in source:  # which is refused late
                    patch.setattr("canvax.pipelines.loaded.load_components", None)
                code = main(shlex.split(source)[1:])
            assert code in (BAD_INPUT, FAILED), source
            lines += [source, f"    {code}: {capsys.readouterr().err.strip().splitlines()[-1]}"]
        else:
            before = compilations()
            lines += [source, f"    {said(source, emoji, networks)}"]
            early = source.startswith(("pipe(", *(f"{name}(" for name in networks))) and "progress=False" not in source
            assert compilations() == before or not early, source
    assert len(lines) > 150
    assert not list(empty.iterdir())
    if os.environ.get("CANVAX_WRITE_GOLDEN"):
        GOLDEN.write_text("\n".join(lines) + "\n")
    else:
        assert lines == golden


# The record


def test_each_entry_point_writes_arguments_its_way() -> None:
    error = InputError("hires_steps", "needs a second pass", cure="add {hires=2} or leave {hires_steps} out", value=5)
    assert str(error) == "hires_steps=5 needs a second pass; add hires=2 or leave hires_steps out"
    flags = parse(["generate", "a cat"]).write
    assert error.format(flags) == "--hires-steps 5 needs a second pass; add --hires 2 or leave --hires-steps out"
    assert error.about("second_steps").argument == "second_steps"
    assert pickle.loads(pickle.dumps(error)).argument == "hires_steps"
    assert InputError("x", "is odd").format(flags) == "x is odd"
    plain = InputError("a {b} sentence")
    assert (str(plain), plain.argument, plain.about("c")) == ("a {b} sentence", "", plain)
    hint = HintWarning("mask_blur", "has no effect without a mask")
    assert hint.format(flags) == "--mask-blur has no effect without a mask"


def test_errors_about_several_arguments_write_all_of_them() -> None:
    flags = parse(["generate", "a cat"]).write
    error = conflict("control", "reuse", "guidance_method='apg'", why="{mask} is odd", value=1)
    assert (error.argument, error.value) == ("control", 1)
    assert all(part in str(error) for part in ("control=1 ", "reuse", "guidance_method='apg'", "mask"))
    assert all(part in error.format(flags) for part in ("--control 1 ", "--reuse", "--guidance-method 'apg'", "--mask"))
    error = needs("mask", "image", cure="give {hires=2}")
    assert error.argument == "mask"
    assert all(part in error.format(flags) for part in ("--mask ", "--image", "--hires 2"))


@pytest.mark.parametrize(
    ("words", "argument", "value", "written"),
    [
        (["generate", "x"], "num_inference_steps", "3", "--steps 3"),
        (["generate", "x"], "steps", "3", "--steps 3"),
        (["generate", "x"], "sampler_settings", None, "--set"),
        (["generate", "x"], "local_files_only", "True", "--local-files-only"),
        (["generate", "x"], "prompt", "'x'", "prompt='x'"),
        (["generate", "x"], "nothing", "3", "nothing=3"),
        (["info", "emoji"], "what", "'x'", "MODEL|IMAGE.png 'x'"),
        (["train", "lora", ".", "-o", "m"], "average", "2", "--ema 2"),
        (["sheet", "x"], "x", "'a=1'", "--x 'a=1'"),
    ],
)
def test_flags_of_a_command(words: list[str], argument: str, value: str | None, written: str) -> None:
    assert parse(words).write(argument, value) == written


def test_a_command_writes_flags_in_errors_and_hints(
    emoji: canvax.Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(canvax, "load", lambda *_, **__: emoji)
    assert main(["generate", "a cat", "--strength", "0.5"]) == BAD_INPUT
    assert "--strength" in capsys.readouterr().err
    assert main(["generate", "a cat", "--mask-mode", "soft", "--steps", "1", "-q"]) == 0
    assert "--mask-mode" in capsys.readouterr().err


def test_errors_name_an_argument_as_the_caller_did(emoji: canvax.Pipeline) -> None:
    for given, argument in (({"cfg_scale": "x"}, "cfg_scale"), ({"guidance_scale": "x"}, "guidance_scale")):
        with pytest.raises(InputError) as caught:
            emoji("a", **given)  # type: ignore[arg-type]
        assert caught.value.argument == argument


# Values


def test_values_are_shown_in_short() -> None:
    assert shown("x" * 500) == "'" + "x" * 76 + "..."
    assert shown(np.zeros((2, 3), np.float32)) == "<array float32 [2, 3]>"
    assert shown(np.float32(2.5)) == shown(jnp.float32(2.5)) == "2.5"
    assert (shown(Path("a/b")), shown(int)) == ("'a/b'", "the class int")
    assert shown(Strange()) == "<Strange that cannot be read>"
    seen = list[str]()
    jax.eval_shape(lambda x: seen.append(shown(x)), jnp.float32(1))
    assert seen == ["<array float32 []>"]


@pytest.mark.parametrize("value", ["x", float("nan"), float("inf"), 1e39, 10**400, True, None, 1j, [1]])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(InputError) as caught:
        check_number("x", value)
    assert caught.value.argument == "x"


def test_values_of_other_libraries_count() -> None:
    assert check_count("n", np.int32(3)) == check_count("n", jnp.int32(3)) == 3
    assert check_number("x", jnp.float32(2.5)) == 2.5
    assert check_flag("b", True)
    for value in (1, "yes", None, np.ones(2)):
        with pytest.raises(InputError) as caught:
            check_flag("b", value)
        assert caught.value.argument == "b"
    with pytest.raises(InputError):
        check_utf8("text", "\ud800")


async def later(step: canvax.Step) -> None: ...


@pytest.mark.parametrize("function", [5, "x", lambda: None, lambda a, b: None, later])
def test_what_is_no_callback(function: Any) -> None:
    with pytest.raises(InputError) as caught:
        check_function("callback", function, 1, "a canvax.Step")
    assert caught.value.argument == "callback"
    check_function("callback", print, 1, "a canvax.Step")


def test_tracers_are_refused() -> None:
    refuse_tracers("control", [{"depth": 1, 3: 2}])  # names that cannot be sorted
    for inside in (lambda x: refuse_tracers("x", [{"depth": x, 3: 2}]), lambda x: plain(x, "x")):
        with pytest.raises(InputError) as caught:
            jax.jit(inside)(1.0)
        assert caught.value.argument == "x"


def test_errors_of_one_sentence_name_no_arguments_to_be_written() -> None:
    """``{name}`` in them would stay as it is."""
    for path in Path(canvax.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_error = isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("InputError", "HintWarning")
            if isinstance(call, ast.Call) and is_error and len(call.args) == 1:
                words = [part.value for part in ast.walk(call.args[0]) if isinstance(part, ast.Constant)]
                assert not re.search(r"\{\w+(=[^}]*)?\}", " ".join(map(str, words))), f"{path}:{call.lineno}"


def test_what_cannot_be_read_is_named(emoji: canvax.Pipeline) -> None:
    gone = {"image": jnp.zeros((8, 8, 3)), "latents": jnp.zeros((1, 8, 8, 4)), "guidance_scale": jnp.float32(2)}
    for name, array in gone.items():
        array.delete()
        call: dict[str, Any] = {name: array}
        with pytest.raises(InputError) as caught:
            emoji("a cat", **call)
        assert caught.value.argument == name


def test_a_fault_of_canvax_is_no_error_of_the_user(
    emoji: canvax.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its type, from wherever it is called."""

    def broken(*_: Any, **__: Any) -> Any:
        raise TypeError("a slip of ours")

    monkeypatch.setattr("canvax.pipelines.request.check_prompts", broken)
    monkeypatch.setattr("canvax.cli.images.check_prompts", broken)
    (tmp_path / "prompts.txt").write_text("a cat\n")
    for call in (
        lambda: emoji("a cat"),
        lambda: gather(parse(["generate", "--prompt-file", str(tmp_path / "prompts.txt")])),
        lambda: Worker(emoji).check(Row("1", {"prompt": "a cat"})),
    ):
        with pytest.raises(TypeError):
            call()
    monkeypatch.setattr("canvax.pipelines.options._RULES", (broken,))
    with pytest.raises(TypeError):
        canvax.Options()
