"""Features of weighted prompts: against Compel itself, and against the rules of A1111 and ComfyUI in PyTorch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import compel
import numpy as np
import pytest
import torch
import transformers

import canvax
from canvax.prompts import fragments
from tests.support.drawing import one_device

from .peer import build


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, canvax.Pipeline]:
    folder: Path = build(tmp_path_factory.mktemp("model") / "m", "epsilon")
    text = transformers.CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer")
    return tokenizer, text, canvax.load(folder, dtype="float32", mesh=one_device())


def features(tokenizer: Any, text: Any, pieces: list[tuple[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Features of pieces of text [77, D], and the weights of their tokens [77]."""
    ids, weights = [tokenizer.bos_token_id], [1.0]
    for piece, weight in pieces:
        own = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids, weights = ids + own, weights + [weight] * len(own)
    ids += [tokenizer.eos_token_id] + [tokenizer.pad_token_id] * (76 - len(ids))
    weights += [1.0] * (77 - len(weights))
    with torch.no_grad():
        return text(torch.tensor([ids])).last_hidden_state[0].numpy().astype(np.float64), np.array(weights)


# Read by hand, so that the parser has no part in it.
HAND: list[tuple[str, str, list[tuple[str, float]]]] = [
    ("a1111", "a (red:1.4) apple", [("a", 1), ("red", 1.4), ("apple", 1)]),
    ("a1111", "((a dog)) and [a cat]", [("a dog", 1.21), ("and", 1), ("a cat", 1 / 1.1)]),
    ("a1111", "a (tree (in:0.5) snow:1.2), night", [("a", 1), ("tree", 1.2), ("in", 0.6), ("snow", 1.2),
                                                     (", night", 1)]),
    ("comfy", "a (red:1.4) apple", [("a", 1), ("red", 1.4), ("apple", 1)]),
    ("comfy", "a (tree (in:0.5) snow:1.2), night", [("a", 1), ("tree", 1.2), ("in", 0.5), ("snow", 1.2),
                                                     (", night", 1)]),
    ("comfy", "((a dog)) and (a cat:0)", [("a dog", 1.21), ("and", 1), ("a cat", 0)]),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "prompt", "pieces"), HAND)
def test_weighted_features(syntax: Any, prompt: str, pieces: Any, pair: Any) -> None:
    tokenizer, text, ours = pair
    z, w = features(tokenizer, text, pieces)
    if syntax == "a1111":
        want = z * w[:, None]
        want *= z.mean() / want.mean()
    else:
        empty, _ = features(tokenizer, text, [("", 1.0)])
        want = (z - empty) * w[:, None] + empty
    got = np.asarray(ours.encode(prompt, prompt_syntax=syntax)["text"][0])
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_two_chunks(pair: Any) -> None:
    tokenizer, text, ours = pair
    first, second = (features(tokenizer, text, [(piece, 1.0)])[0] for piece in ("a dog", "a red cat"))
    got = np.asarray(ours.encode("a dog BREAK a red cat", prompt_syntax="a1111")["text"][0])
    np.testing.assert_allclose(got, np.concatenate([first, second]), atol=1e-5)


COMPEL = [
    "a red apple", "a red++ apple", "a red- apple", "(a dog)1.5 and a (cat)0.3", "a (red (big)+ apple)++ tree",
    "(red+ apple)0.8, night", "a well-known+ house", "a, dog+, cat", "(a dog)---- tree", "a (dog",
]  # fmt: skip


@pytest.mark.parametrize("prompt", COMPEL)
def test_compel(prompt: str, pair: Any) -> None:
    tokenizer, text, ours = pair
    (parsed,) = compel.PromptParser().parse_conjunction(prompt).prompts
    want = [(piece.text, round(piece.weight, 6)) for piece in parsed.children]
    assert [(piece.strip(), round(weight, 6)) for piece, weight in fragments(prompt, "compel")] == want
    theirs = compel.Compel(
        tokenizer, text, downweight_mode=compel.DownweightMode.REMOVE,
        returned_embeddings_type=compel.ReturnedEmbeddingsType.LAST_HIDDEN_STATES_NORMALIZED,
    )  # fmt: skip
    features = theirs(prompt).detach().numpy()[0]
    got = np.asarray(ours.encode(prompt, prompt_syntax="compel")["text"][0])
    np.testing.assert_allclose(got, features, atol=1e-5 * np.abs(features).max())


def compel_prompt(rng: random.Random, depth: int = 0) -> str:
    """A random prompt with signs, numbers and brackets in brackets."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        word = rng.choice(["cat", "red", "well-known", "tree,", "a"])
        if depth < 2 and rng.random() < 0.35:
            word = f"({compel_prompt(rng, depth + 1)})" + rng.choice(["", "+", "--", "1.3", "0.5"])
        elif word[-1] != "," and rng.random() < 0.4:
            word += rng.choice(["+", "++", "-", "---"])
        pieces.append(word)
    return " ".join(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.weekly) for seed in range(1, 9))])
def test_compel_reads_random_prompts_alike(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        prompt = compel_prompt(rng)
        (parsed,) = compel.PromptParser().parse_conjunction(prompt).prompts
        # Letter by letter: spaces and commas between pieces may belong to either.
        want = [(letter, piece.weight) for piece in parsed.children for letter in piece.text if letter not in " ,"]
        got = [
            (letter, weight) for text, weight in fragments(prompt, "compel") for letter in text if letter not in " ,"
        ]
        assert [letter for letter, _ in got] == [letter for letter, _ in want], prompt
        np.testing.assert_allclose([w for _, w in got], [w for _, w in want], rtol=1e-6, err_msg=prompt)
