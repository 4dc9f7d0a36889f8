"""Weights, chunks, schedules and prompts that are added up; expected numbers come from the published rules."""

from __future__ import annotations

import random
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import canvax
from canvax.errors import InputError
from canvax.models.clip import clip_configs
from canvax.noise import initial_noise
from canvax.parallel.mesh import make_mesh
from canvax.prompts import BREAK, chunked, fragments, parts_of, schedule_of, weighed
from canvax.prompts.chunks import MOST_CHUNKS
from canvax.samplers import build_table
from canvax.samplers.table import DENOISED
from tests.support.small_sdxl import build
from tests.support.timing import processor_seconds

SYNTAXES: Any = ("plain", "a1111", "comfy", "compel")
STEPS = 6


def draw(emoji: canvax.Pipeline, prompt: Any, syntax: str = "a1111", **changes: Any) -> canvax.Result:
    usual = {"seed": 1, "num_inference_steps": STEPS, "guidance_scale": 4.0, "progress": False}
    return emoji(prompt, **{**usual, "prompt_syntax": syntax, **changes})


def weights(prompt: str, syntax: Any) -> list[tuple[str, float]]:
    return [(text, round(weight, 4)) for text, weight in fragments(prompt, syntax)]


# The grammars


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red apple", [("a red apple", 1)]),
        ("", [("", 1)]),
        ("(a)", [("a", 1.1)]),
        ("[a]", [("a", 0.9091)]),
        ("((a))", [("a", 1.21)]),
        ("(a:1.3)", [("a", 1.3)]),
        ("((a:1.3))", [("a", 1.43)]),
        ("(a:0)", [("a", 0)]),
        ("(a:-0.5)", [("a", -0.5)]),
        ("(a: 1.5 )", [("a", 1.5)]),
        ("a (b) c", [("a ", 1), ("b", 1.1), (" c", 1)]),
        ("(a", [("a", 1.1)]),
        ("[a", [("a", 0.9091)]),
        ("a)", [("a)", 1)]),
        ("a:1.3", [("a:1.3", 1)]),
        (r"\(a\) \[b\] \\", [("(a) [b] \\", 1)]),
        ("(a:1.2.3) b", [("a:1.2.3) b", 1.1)]),
        ("(a:much)", [("a:much", 1.1)]),
        ("a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
         [("a ", 1), ("house", 1.573), (" ", 1.1), ("on", 1), (" a ", 1.1), ("hill", 0.55), (", sun, ", 1.1),
          ("sky", 1.4641), (".", 1.1)]),
        ("a BREAK b", [("a", 1), BREAK, ("b", 1)]),
        ("a BREAKs b", [("a BREAKs b", 1)]),
        ("(a BREAK b:1.2)", [("a", 1.2), ("BREAK", -1.2), ("b", 1.2)]),
    ],
)  # fmt: skip
def test_a1111(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert weights(prompt, "a1111") == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("(a)", [("a", 1.1)]),
        ("[a]", [("[a]", 1)]),
        ("((a))", [("a", 1.21)]),
        ("((a:1.2):1.5)", [("a", 1.2)]),
        ("(a (b:2) c:1.5)", [("a ", 1.5), ("b", 2), (" c", 1.5)]),
        ("(a (b) c:1.5)", [("a ", 1.5), ("b", 1.65), (" c", 1.5)]),
        (r"\(a\)", [("(a)", 1)]),
        ("(a", [("(a", 1)]),
        ("a)", [("a)", 1)]),
        ("a BREAK b", [("a BREAK b", 1)]),
    ],
)
def test_comfy(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert weights(prompt, "comfy") == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red+ apple", [("a ", 1), ("red", 1.1), (" apple", 1)]),
        ("a red-- apple", [("a ", 1), ("red", 0.81), (" apple", 1)]),
        ("(a b)++ c", [("a b", 1.21), (" c", 1)]),
        ("(a b)1.3 c", [("a b", 1.3), (" c", 1)]),
        ("(a b)0.5, c", [("a b", 0.5), (", c", 1)]),
        ("(red+ apple)0.8", [("red", 0.88), (" apple", 0.8)]),
        ("(a) b", [("a b", 1)]),
        ("well-known a-b +c", [("well-known a-b +c", 1)]),
        ("a (b", [("a (b", 1)]),
    ],
)
def test_compel(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert weights(prompt, "compel") == expected


def tree(rng: random.Random, syntax: str, outer: float, depth: int = 0) -> tuple[str, list[tuple[str, float]]]:
    """A random prompt, and its words with the weights that the rules give them, put together on the way."""
    text, words = [], []
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["word", "word", "round", "square", "number"]) if depth < 3 else "word"
        number = rng.choice(["0.5", "1.3", "2", ".75", "0"])
        scale = {"word": 1.0, "round": 1.1, "square": 1 / 1.1 if syntax == "a1111" else 1.0, "number": float(number)}
        if kind == "word":
            word = rng.choice(["cat", "red dog", "a", "tree,"])
            text.append(word)
            words.append((word, outer))
            continue
        own = float(number) if kind == "number" and syntax == "comfy" else outer * scale[kind]
        inner, said = tree(rng, syntax, own, depth + 1)
        words += said
        text.append({"round": f"({inner})", "square": f"[{inner}]", "number": f"({inner}:{number})"}[kind])
    return " ".join(text), words


@pytest.mark.parametrize("syntax", ["a1111", "comfy"])
def test_random_prompts(syntax: Any) -> None:
    rng = random.Random(0)
    for _ in range(200):
        prompt, expected = tree(rng, syntax, 1.0)
        got = [(word, weight) for text, weight in fragments(prompt, syntax) for word in text.strip("[] ").split()]
        want = [(word, weight) for text, weight in expected for word in text.split()]
        got = [(word.strip("[]"), weight) for word, weight in got if word.strip("[]")]
        assert [word for word, _ in got] == [word for word, _ in want], prompt
        np.testing.assert_allclose([w for _, w in got], [w for _, w in want], rtol=1e-9, err_msg=prompt)


def test_anything_is_read() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        prompt = "".join(rng.choice("ab ()[]:|.1\\+- BREAK,AND") for _ in range(rng.randint(0, 30)))
        for syntax in SYNTAXES:
            try:
                assert fragments(prompt, syntax)
            except canvax.InputError as error:
                assert "weight" in str(error)  # noqa: PT017
        assert schedule_of(prompt, 10)[0][0] == 0
        assert parts_of(prompt)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [(0, "a")]),
        ("a [b:3]", [(0, "a "), (4, "a b")]),
        ("[a:b:0.5] c", [(0, "a c"), (6, "b c")]),
        ("[a::4]", [(0, "a"), (5, "")]),
        ("[(a:2):3]", [(0, ""), (4, "(a:2)")]),
        ("[[a:b:2]:c:5]", [(0, "a"), (3, "b"), (6, "c")]),
        ("(x [a:3]:1.2)", [(0, "(x :1.2)"), (4, "(x a:1.2)")]),
        ("[a:b:20]", [(0, "a")]),
        ("[a:b:0]", [(0, "b")]),
        ("[a|b] c", [(0, "a c"), *[(i, "ba"[i % 2] + " c") for i in range(2, 10)]]),
        ("[a:0.3]", [(0, ""), (4, "a")]),
        ("[a]", [(0, "[a]")]),
        ("[a:b:c]", [(0, "[a:b:c]")]),
        ("[a:b", [(0, "[a:b")]),
        ("a]:|", [(0, "a]:|")]),
        ("[a:3] \\", [(0, "[a:3] \\")]),  # what cannot be read as a whole is text
        ("[a (b:3]", [(0, "[a (b:3]")]),
        (r"\[a:3\]", [(0, r"\[a:3\]")]),
    ],
)
def test_schedules(prompt: str, expected: list[tuple[int, str]]) -> None:
    assert schedule_of(prompt, 10) == expected


def test_parts() -> None:
    assert parts_of("a cat AND a dog :1.2 AND sky:-.5") == [("a cat", 1), (" a dog", 1.2), (" sky", -0.5)]
    assert parts_of("SAND and LAND") == [("SAND and LAND", 1)]
    assert parts_of("a:b") == [("a:b", 1)]


def test_features_of_mean_zero_are_not_blown_up() -> None:
    """Where a text encoder's features have no mean, bringing it back would divide rounding by rounding."""
    features = np.random.default_rng(0).standard_normal((1, 77, 8)).astype(np.float32)
    features -= features.mean(axis=-1, keepdims=True)
    weights = np.ones((1, 77), np.float32)
    weights[:, 1] = 1.5
    got = weighed(features, weights, features, "a1111")
    np.testing.assert_allclose(got, features * weights[..., None])
    got = weighed(features + 1, weights, features, "a1111")
    np.testing.assert_allclose(got.mean(), 1, rtol=1e-5)


# Chunks


class Letters:
    """A tokenizer of one token for each letter, of which only the comma matters here."""

    bos, eos, pad = 1000, 1001, 1002

    def ids(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def units(self, text: str) -> list[tuple[int, ...]]:
        return [(token,) for token in self.ids(text)]


def cut(text: str) -> list[int]:
    """Tokens of the prompt in each chunk."""
    return [ids.index(Letters.eos) - 1 for ids, _ in chunked(Letters(), [(text, 1.0)])]


def test_chunks() -> None:
    assert cut("") == [0]
    assert cut("a" * 75) == [75]
    assert cut("a" * 76) == [75, 1]
    assert cut("a" * 64 + "," + "a" * 20) == [65, 20]  # behind the last comma
    assert cut("a" * 40 + "," + "a" * 50) == [75, 16]  # which is too far
    assert cut("a" * 75 + ",a") == [75, 2]
    assert cut("a" * 75 * MOST_CHUNKS) == [75] * MOST_CHUNKS
    with pytest.raises(canvax.InputError, match="has 9 chunks of 75 tokens, more than 8"):
        cut("a" * (75 * MOST_CHUNKS + 1))
    ((ids, heavy),) = chunked(Letters(), [("a", 1.0), ("b", 1.5)])
    assert ids[:5] == (1000, 97, 98, 1001, 1002)
    assert heavy[:5] == (1.0, 1.0, 1.5, 1.0, 1.0)
    assert len(ids) == len(heavy) == 77
    assert [ids[1] for ids, _ in chunked(Letters(), [("a", 1.0), BREAK, ("b", 1.0)])] == [97, 98]


# What is generated


def test_a_plain_prompt_is_the_same_in_every_syntax(emoji: canvax.Pipeline) -> None:
    results = [draw(emoji, "a red apple, a dog", syntax) for syntax in SYNTAXES]
    for result in results[1:]:
        np.testing.assert_array_equal(result.latents, results[0].latents)
        assert result.compilations == 0


def test_nothing_compiles_for_weights_syntax_and_schedules(emoji: canvax.Pipeline) -> None:
    draw(emoji, "a red apple")
    seen = [draw(emoji, "a red apple").latents]
    for prompt, syntax in (
        ("a (red:1.4) apple", "a1111"), ("a (red:1.4) apple", "comfy"), ("a red++ apple", "compel"),
        ("a red- apple", "compel"), ("a [red:green:3] apple", "a1111"), ("a [red|green] apple", "a1111"),
    ):  # fmt: skip
        result = draw(emoji, prompt, syntax)
        assert result.compilations == 0
        assert all(np.abs(result.latents - other).max() > 1e-3 for other in seen)
        seen.append(result.latents)


@pytest.mark.weekly
def test_chunks_of_a_batch_do_not_meet(emoji: canvax.Pipeline) -> None:
    """A short prompt gives the image that it gives alone, beside one of two chunks and with a long negative."""
    prompts = ["a cat", "a dog BREAK a (red:1.2) house"]
    both = draw(emoji, prompts, seed=[1, 2])
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(both.latents[i], draw(emoji, prompt, seed=i + 1).latents[0], atol=2e-4)
    assert draw(emoji, [prompts[1], "a fox"]).compilations == 0


@pytest.mark.parametrize("counts", [(3, 4), pytest.param((5, 8), marks=pytest.mark.weekly)])
def test_nothing_compiles_for_chunks_within_a_bucket(counts: tuple[int, int], emoji: canvax.Pipeline) -> None:
    few, many = (
        draw(emoji, " BREAK ".join(["a red apple", "a dog", "a cat", "a fox"] * 2)[:count]) for count in counts
    )
    assert many.compilations == 0
    assert np.abs(many.latents - few.latents).max() > 1e-3


@pytest.mark.slow
def test_a_long_prompt_is_read_whole(emoji: canvax.Pipeline) -> None:
    words = "a red apple, " * 30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, other = (draw(emoji, words + last, "plain").latents for last in ("a dog", "a cat"))
    assert np.abs(one - other).max() > 1e-3


def test_scheduled_texts_stand_at_their_steps(emoji: canvax.Pipeline) -> None:
    """[a:b:2] is a for the first three steps and b for the others: what a run in two parts gives."""
    kept: list[np.ndarray] = []
    draw(emoji, "a red apple", sampler="ddim", callback=lambda step: kept.append(step.latents.copy()))
    parts = draw(emoji, "a dog", sampler="ddim", callback=lambda step: kept[2] if step.index == 2 else None)
    whole = draw(emoji, "[a red apple:a dog:2]", sampler="ddim")
    np.testing.assert_allclose(whole.latents, parts.latents, atol=1e-5)
    heun = draw(emoji, "[a red apple:a dog:2]", sampler="heun")  # two evaluations in each step
    draw(emoji, "a red apple", sampler="heun", callback=lambda step: kept.append(step.latents.copy()))
    assert heun.compilations == 0


def test_scheduled_texts_of_a_part_of_a_run(emoji: canvax.Pipeline) -> None:
    """Steps are counted from the beginning of the whole run, or of the steps that strength leaves."""

    def latents(prompt: str, **part: Any) -> np.ndarray:
        return draw(emoji, prompt, sampler="ddim", **part).latents

    begun: dict[str, Any] = {"denoising_end": 0.5}
    np.testing.assert_array_equal(latents("[a red apple:a dog:0.6]", **begun), latents("a red apple", **begun))
    rest: dict[str, Any] = {"denoising_start": 0.5, "latents": latents("a red apple", **begun)}
    np.testing.assert_array_equal(latents("[a red apple:a dog:0.2]", **rest), latents("a dog", **rest))
    image: dict[str, Any] = {"image": np.full((64, 64, 3), 0.5, np.float32), "strength": 0.5}
    first, second, both = (latents(text, **image) for text in ("a red apple", "a dog", "[a red apple:a dog:1]"))
    assert all(np.abs(both - other).max() > 1e-3 for other in (first, second))


@pytest.mark.slow
def test_prompts_that_are_added_up(emoji: canvax.Pipeline) -> None:
    """Against a loop by hand: u + s (w1 (c1 - u) + w2 (c2 - u)) and DDIM's rows."""
    got = draw(emoji, "a cat AND a red apple:0.6", sampler="ddim")
    table = build_table(emoji.model.scheduler, STEPS, sampler="ddim")
    one, two, none = (emoji.encode(text) for text in ("a cat", "a red apple", ""))
    x = np.asarray(initial_noise([1], (8, 8, 32)))
    for i in range(STEPS):
        said = (none, one, two)
        u, first, second = (np.asarray(emoji.denoiser(table.c_in[i] * x, table.timestep[i], each)) for each in said)
        output = u + 4.0 * ((first - u) + 0.6 * (second - u))
        x = table.M[i, 0, 0] * x + table.M[i, 0, DENOISED] * (table.p[i] * x + table.q[i] * output)
    np.testing.assert_allclose(got.latents, x, atol=1e-3)
    assert draw(emoji, "a dog AND a (green:1.2) house :1.3", sampler="ddim").compilations == 0
    only = draw(emoji, "a cat AND a red apple:0", sampler="ddim").latents
    np.testing.assert_allclose(only, draw(emoji, "a cat", sampler="ddim").latents, atol=1e-4)


@pytest.mark.slow
def test_conditions_in_place_of_prompts(emoji: canvax.Pipeline) -> None:
    plain = draw(emoji, "a red apple", negative_prompt="a dog")
    again = draw(emoji, emoji.encode("a red apple"), negative_prompt=emoji.encode("a dog"))
    np.testing.assert_allclose(again.latents, plain.latents, atol=1e-5)
    long = emoji.encode(["a (cat:1.3) BREAK a dog", "a fox"], prompt_syntax="a1111")
    texts = draw(emoji, ["a (cat:1.3) BREAK a dog", "a fox"])
    np.testing.assert_allclose(draw(emoji, long).latents, texts.latents, atol=2e-4)
    # A tensor of PyTorch that records gradients cannot become an array.
    tensor = SimpleNamespace(detach=lambda: emoji.encode("a red apple")["text"])
    named = emoji(prompt_embeds=tensor, seed=1, progress=False, steps=2)  # type: ignore
    np.testing.assert_allclose(
        named.latents, draw(emoji, "a red apple", num_inference_steps=2, guidance_scale=None).latents, atol=1e-5
    )


# Two text encoders, many devices


@pytest.fixture(scope="module")
def xl(tmp_path_factory: pytest.TempPathFactory) -> tuple[canvax.Pipeline, canvax.Pipeline]:
    """On one device, and on four."""
    folder = build(tmp_path_factory.mktemp("prompts") / "model")
    one, four = (
        canvax.load(folder, dtype="float32", mesh=make_mesh(jax.devices()[:n]), progress=False) for n in (1, 4)
    )
    return one, four


@pytest.mark.slow
def test_sdxl_conditions(xl: tuple[Any, Any]) -> None:
    """Weighted conditions of ``pipe.encode`` give what the text gives, pooled output and zeros included."""
    pipe = xl[0]
    want = draw(pipe, "a (red:1.4) apple BREAK b", num_inference_steps=3)
    said = pipe.encode("a (red:1.4) apple BREAK b", prompt_syntax="a1111")
    np.testing.assert_allclose(draw(pipe, said, num_inference_steps=3).latents, want.latents, atol=1e-4)
    arrays = {"prompt_embeds": said["text"], "pooled_prompt_embeds": said["pooled"]}
    named = pipe(**arrays, num_inference_steps=3, seed=1, guidance_scale=4.0, progress=False)
    np.testing.assert_allclose(named.latents, want.latents, atol=1e-4)
    with pytest.raises(canvax.InputError, match="prompt has no 'pooled'"):
        draw(pipe, {"text": said["text"]})


def test_each_encoder_has_its_own_shares(xl: tuple[Any, Any]) -> None:
    """A piece that weighs less in the prompt of one encoder alone, which Compel mixes from two texts."""
    pipe, width, less = xl[0], clip_configs(xl[0].model.text)["text_encoder"].hidden_size, "a (red)0.3 apple"
    plain, light, both = (
        np.asarray(pipe.encode("a dog" if one is None else one, two, prompt_syntax="compel")["text"])
        for one, two in ((None, "a dog"), (less, less), (None, less))
    )
    np.testing.assert_allclose(both[..., :width], plain[..., :width], atol=1e-6)
    np.testing.assert_allclose(both[..., width:], light[..., width:], atol=1e-6)


@pytest.mark.parametrize("syntax", ["a1111", "comfy", "compel"])
@pytest.mark.parametrize(
    ("opening", "middle", "closing"),
    [("[", "", ""), ("(", "a", ")"), ("\\", "", ""), ("", "a", "+"), ("([", "", ""), ("[a:", "", ""), ("[a|", "", "")],
)  # fmt: skip
def test_no_prompt_is_too_deep_or_takes_long(opening: str, middle: str, closing: str, syntax: Any) -> None:
    """Time grows with the length and not with its square, however fast the machine is."""

    def seconds(count: int) -> float:
        prompt = opening * count + middle + closing * count

        def parse() -> None:
            schedule_of(prompt, 20)
            with suppress(InputError):  # of weights that no image could have
                fragments(prompt, syntax)

        return processor_seconds(parse)

    short, long = (min(seconds(count) for _ in range(3)) for count in (1250, 5000))
    assert long < 10 * short + 0.05
