"""Errors of Python calls, as the command line says them."""

from __future__ import annotations

import pytest

from canvax.cli import main
from canvax.cli.arguments import parse
from canvax.cli.wording import in_flags

SAID = {
    "image without a mask: give image= as well": "--image without a mask: give --image as well",
    "guidance_scale=nan is not a finite number": "--cfg-scale=nan is not a finite number",
    "seed=x is none": "-s x is none",
    "steps=0 is not a whole number": "--steps=0 is not a whole number",
    "padding_mask_crop without a mask: give mask=": "--padding-mask-crop without a mask: give --mask",
    "write prompt_syntax='compel'": "write --prompt-syntax='compel'",
    "give hires=2 as well (or height=64)": "give --hires=2 as well (or --height=64)",
    "negative_prompt is ignored": "--negative-prompt is ignored",
    "pass token=... or set HF_TOKEN": "pass --token or set HF_TOKEN",
    "pass local_files_only=True": "pass --local-files-only",
    "model = 'emojy': there is none": "--model 'emojy': there is none",
    "options.prompt_2 means nothing to emoji": "--prompt-2 means nothing to emoji",
    "safety_checker=True: none (its model_index.json)": "--safety-checker: none (its model_index.json)",
    "mesh 'data=4,model=1' is one of 4 devices": "--mesh 'data=4,model=1' is one of 4 devices",
    "the model's own mask= is": "the model's own --mask is",
}
SAME = (
    "m/scheduler_config.json: prediction_type='x'",
    *("prompts.txt, line 3: height=63", "row 7: width=3", "write data=4,model=2", "--x steps=5,10", "--set norm=2.5"),
    *("canvax.load(model, dtype='x')", "prompt 'strength=3' is text", "the image, the mask and the seed", "a strength"),
    *("nothing=3", "pipe.image = 3", "prompt=3"),
)


@pytest.fixture(scope="module")
def flags() -> dict[str, str]:
    return parse(["generate", "a cat", "--cfg-scale", "3", "-s", "1"]).flags


@pytest.mark.parametrize("said", SAID)
def test_names_of_arguments_become_flags(flags: dict[str, str], said: str) -> None:
    assert in_flags(said, flags) == SAID[said]


@pytest.mark.parametrize("said", SAME)
def test_others_stay(flags: dict[str, str], said: str) -> None:
    assert in_flags(said, flags) == said


@pytest.mark.bad
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "a cat", "--padding-mask-crop", "3"], "--padding-mask-crop without"),
        (["generate", "a cat", "--strength", "0.5"], "--strength without an image: give --image as well"),
        (["generate", "a cat", "--hires-steps", "3"], "--hires-steps=3 has no effect without hires; add --hires=2"),
        (["generate", "a cat", "--sampler", "list"], "canvax samplers lists them"),
        (["generate", "a cat", "--steps", "1,000"], "'1,000' is not a whole number; write 1000"),
        (["generate", "a cat", "--steps", "1,5"], "'1,5' is not a whole number, such as 2"),
        (["generate", "a cat", "--width", "64px"], "'64px' is not a whole number; write 64"),
        (["generate", "a cat", "--seed", "1e400"], "is not a whole number, such as 7"),
        (["generate", "a cat", "--mask-blur", "wide"], "'wide' is not a number, such as 4"),
        (["generate", "a cat", "--mesh", "data=9"], "--mesh 'data=9,model=1' is one of 9 devices, and there are 8"),
        (["generate", "a cat", "-o", "cat.pgn"], "cat.pgn: .pgn is no format here; did you mean .png?"),
        (["generate", "a cat", "-m", "x.safetensors.crdownload"], "there is no such"),
        (["serve", "emoji", "--api-key", "x"], "write --keys FILE"),
        (["train", "lora", ".", "-o", "x", "--lr-num-cycles", "2"], "AdamW trains"),
        (["dream", "a cat"], "did you mean: canvax generate"),
        (["sketch", "a cat"], "did you mean: canvax generate 'a cat'?"),
        (["a", "red", "apple", "--steps", "3"], "did you mean: canvax generate 'a red apple'?"),
        (["generate", "a cat", "-m", "emoji/"], "Bundled models: did you mean 'emoji'?"),
        (["generate", "a cat", "--sigmas", "beta57"], "--sigmas='beta57' is not known; there are 'automatic'"),
        (["generate", "a cat", "--seed-size", "64x64"], "expected 2 arguments, such as --seed-size 64 64"),
        (["generate", "a cat", "--image", "."], "--image='.' cannot be read (it is a folder)"),
        (["generate", "a cat", "-m", "./nowhere"], "-m './nowhere': there is no such folder"),
    ],
)
def test_errors_name_flags(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(words) in (1, 2)
    assert message in capsys.readouterr().err
