"""The CLIP tokenizer: same ids as transformers, and clear words when something is wrong."""

from __future__ import annotations

import functools
import inspect
import json
import random
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import canvax
from canvax.errors import CheckpointError, InputError
from canvax.tokenizers.clip import BOS, EOS, ClipTokenizer, TruncationWarning
from canvax.weights.location import BUNDLED
from tests.support.bundled import VOCABULARY
from tests.support.small_checkpoint import write_small_checkpoint

EMOJI = BUNDLED["emoji"] / "tokenizer"

NASTY = [
    "", " ", "a red apple", "  A  Red\tAPPLE\n ", "🍎🍕 pizza", "👩‍👩‍👧‍👦 family", "🇩🇪 flag", "café", "cafe\u0301",
    "naïve Ångström", "ﬁne ligatures ½ ² №", "&amp; &lt;b&gt; &#39;", "it's they're we've I'm you'll he'd o'clock",
    "x'S Y'T", "1234567890 12.5", "a_b-c+d=e", "!!!", "wow! great!! ok", "...", "日本語のテキスト", "한국어",
    "العربية نص",
    "עברית", "हिन्दी", "ไทย", "\u200b\u200czero width", "\x00\x01control\x7f", "\u00a0nbsp\u2003em\u3000ideographic",
    "line\r\nbreak", "\ufeffbom", "<|endoftext|>", "a <|startoftext|> b <|endoftext|> c", "<|ENDOFTEXT|>",
    "<|endoftext|", "\U0001d54f\U0001f468", "İstanbul ǅ ẞ", "a" * 300, "supercalifragilisticexpialidocious",
    "\\ / \" ' `", "{}[]()<>|", "a\u0300\u0301\u0302\u0303b", "a<|EndOfText|>b <|STARTOFTEXT|>",
    "a <cat-toy> b<cat-toy>c <CAT-TOY> <Other> <other>", "[PAD] x", "a! " * 60, "é" * 100, "\u2028a\u2029b\x85c\x1cd",
    "ſK Å ﬀ Ǆ ẛ\u0323", "가각힣 \u1100\u1161 क़ख़", "ΑΣ ΑΣΑ Σ", "½ ² Ⅷ ⅷ ① ٣",
]  # fmt: skip


def random_strings(count: int) -> list[str]:
    rng = random.Random(7)
    blocks = [
        (0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x400, 0x530), (0x600, 0x700), (0x2000, 0x2070),
        (0x3040, 0x3100), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0x0, 0x20), (0x10000, 0x10FFFF),
    ]  # fmt: skip
    out = []
    for _ in range(count):
        text = "".join(chr(rng.randrange(*rng.choice(blocks))) for _ in range(rng.randrange(1, 40)))
        out.append(text.encode("utf-8", "ignore").decode())
    return out


@functools.cache
def trained_merges() -> list[tuple[str, str]]:
    """About 2,000 merges, learned from this corpus and the text of the standard library's json package."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trainee = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix="</w>"))
    trainee.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(vocab_size=2500, show_progress=False, end_of_word_suffix="</w>")
    text = inspect.getsource(json) + inspect.getsource(json.decoder)
    trainee.train_from_iterator([*NASTY, *text.lower().splitlines()], trainer)
    return [(first, second) for first, second in json.loads(trainee.to_str())["model"]["merges"]]


def train_large(folder: Path, pad: str) -> Path:
    """A vocabulary in CLIP's real order: 256 bytes, 256 bytes that end a word, merges, two special tokens."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (ord(c) > 255, c))
    merges = trained_merges()
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), *(first + second for first, second in merges), BOS, EOS]
    vocab = {text: i for i, text in enumerate(dict.fromkeys(tokens))}
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in merges) + "\n", encoding="utf-8"
    )
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": pad}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    config = names | {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer", "errors": "replace"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def token(content: str, **flags: bool) -> dict[str, object]:
    """A token with its flags as repositories store it; ``normalized`` is true in those of 2022."""
    return {"content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False, **flags}


# What real repositories say about special tokens, by file. "old": vocab.json and merges.txt; "new": tokenizer.json.
TYPED = {"__type": "AddedToken"}
SPECIAL_2022 = {"bos_token": token(BOS), "eos_token": token(EOS), "unk_token": token(EOS)}
CONFIG_2022 = {name: value | TYPED for name, value in SPECIAL_2022.items()} | {"pad_token": EOS, "model_max_length": 77}
LAST = VOCABULARY - 1  # id of EOS in the emoji vocabulary
DECODER = {"0": token("!", normalized=False, special=True), str(LAST - 1): token(BOS, special=True)}
FOLDERS: dict[str, tuple[str, dict[str, object]]] = {
    "emoji": ("old new", {"tokenizer_config.json": {"pad_token": EOS}}),
    "no_config": ("old", {}),
    "sd1": (
        "old",
        {"tokenizer_config.json": CONFIG_2022, "special_tokens_map.json": SPECIAL_2022 | {"pad_token": EOS}},
    ),
    # The two files of Stable Diffusion 2 disagree about padding, and the map is right.
    "sd2": (
        "old",
        {"tokenizer_config.json": CONFIG_2022, "special_tokens_map.json": SPECIAL_2022 | {"pad_token": "!"}},
    ),
    "sd2_new_form": ("new", {"tokenizer_config.json": {"pad_token": "!"}, "special_tokens_map.json": SPECIAL_2022}),
    # With an added_tokens_decoder the map is not read.
    "sdxl_2": (
        "old",
        {
            "tokenizer_config.json": {"added_tokens_decoder": DECODER, "pad_token": "!"},
            "special_tokens_map.json": {"pad_token": EOS},
        },
    ),
    "decoder_over_stored": ("new", {"tokenizer_config.json": {"added_tokens_decoder": DECODER, "pad_token": EOS}}),
    "learned": (
        "old",
        {
            "added_tokens.json": {"<cat-toy>": LAST + 1, "<Other>": LAST + 2},
            "tokenizer_config.json": {"additional_special_tokens": ["<cat-toy>"]},
        },
    ),
    "own_pad": ("old", {"tokenizer_config.json": {"pad_token": "[PAD]", "split_special_tokens": True}}),
}


def emoji_folder(base: Path, form: str, files: dict[str, object]) -> Path:
    """The emoji model's vocabulary in one form, with other special tokens."""
    names = {"old": ["vocab.json", "merges.txt"], "new": ["tokenizer.json"]}
    base.mkdir()
    for name in (name for part in form.split() for name in names[part]):
        shutil.copyfile(EMOJI / name, base / name)
    for name, content in files.items():
        (base / name).write_text(json.dumps(content), encoding="utf-8")
    return base


def assert_same_ids(folder: Path, corpus: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.CLIPTokenizer.from_pretrained(folder)
    ours = ClipTokenizer.from_folder(folder)
    want = reference(corpus, padding="max_length", max_length=77, truncation=True)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        got = ours(corpus)
    for text, mine, theirs in zip(corpus, got, want, strict=True):
        assert mine.tolist() == theirs, repr(text)
    assert (ours.bos, ours.eos, ours.pad) == (reference.bos_token_id, reference.eos_token_id, reference.pad_token_id)


@pytest.mark.parametrize("name", FOLDERS)
def test_same_ids_as_transformers(tmp_path: Path, name: str) -> None:
    assert_same_ids(emoji_folder(tmp_path / "tokenizer", *FOLDERS[name]), NASTY + random_strings(1000))


@pytest.mark.parametrize("pad", ["!", EOS])
def test_same_ids_with_a_large_vocabulary(tmp_path: Path, pad: str) -> None:
    assert_same_ids(train_large(tmp_path / "tokenizer", pad), NASTY + random_strings(1000))


def test_shape_and_padding(tmp_path: Path) -> None:
    for pad, index in (("!", 0), (EOS, None)):
        tokenizer = ClipTokenizer.from_folder(train_large(tmp_path / f"pad{index}", pad))
        ids = tokenizer(["the cat", ""])
        assert ids.shape == (2, 77)
        assert ids.dtype == np.int32
        assert ids[0, :4].tolist() == [tokenizer.bos, ids[0, 1], ids[0, 2], tokenizer.eos]
        assert set(ids[0, 4:]) == {tokenizer.pad}
        assert tokenizer.pad == (tokenizer.eos if index is None else index)


def test_truncation_names_what_was_cut() -> None:
    tokenizer = ClipTokenizer.from_folder(EMOJI)
    prompt = "apple " * 75 + "Banana and cherry"
    with pytest.warns(TruncationWarning, match="Banana and cherry") as told:
        ids = tokenizer([prompt])
    assert told[0].filename == __file__
    assert ids[0, -1] == tokenizer.eos


@pytest.mark.parametrize("prompt", [None, 3, b"apple", "lone \ud800 surrogate"])
def test_bad_prompt(prompt: object) -> None:
    with pytest.raises(InputError, match="prompt"):
        ClipTokenizer.from_folder(EMOJI)([prompt])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vocab.json", "{"),
        ("vocab.json", "[]"),
        ("vocab.json", '{"a": 0}'),
        ("merges.txt", "one two three\n"),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", json.dumps({"unk_token": " <|endoftext|>"})),  # BPE would fail at the first emoji
    ],
)
def test_damaged_files(tmp_path: Path, name: str, text: str) -> None:
    folder = train_large(tmp_path / "t", EOS)
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))) as caught:
        ClipTokenizer.from_folder(folder)
    assert "Download it again" in str(caught.value)


def test_damaged_new_form(tmp_path: Path) -> None:
    for text in ("{", "{}", '{"model": {"vocab": {"a": -1}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json.*Download"):
            ClipTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1, "c": 1}, "merges": []}}')
    with pytest.raises(CheckpointError, match="'b' and 'c' have the same id 1"):
        ClipTokenizer.from_folder(tmp_path)


def test_every_id_has_an_embedding(tmp_path: Path) -> None:
    """An id beyond the table would be drawn as the last one, without a word."""
    folder = write_small_checkpoint(tmp_path / "model")
    path = folder / "tokenizer" / "added_tokens.json"
    path.write_text(json.dumps({"<cat>": VOCABULARY}))
    with pytest.raises(CheckpointError, match=f"tokenizer has the id {VOCABULARY}, and text_encoder embeds 0.."):
        canvax.load(folder)


def test_one_string_is_not_a_list() -> None:
    with pytest.raises(InputError, match="list of strings"):
        ClipTokenizer.from_folder(EMOJI)("a cat")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"vocab\.json and merges\.txt not found"):
        ClipTokenizer.from_folder(tmp_path)
