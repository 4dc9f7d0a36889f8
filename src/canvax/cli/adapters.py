"""Adapters on the command line: ``--lora``, ``--lora-dir``, ``--embedding``; their lines in ``canvax info``."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canvax.cli.terminal import byte_size, complain
from canvax.errors import CanvaxError, HintWarning, InputError, warn
from canvax.files import named_path
from canvax.weights.data_folder import embedding_files, embedding_name, lora_folder

if TYPE_CHECKING:
    from canvax.call import Call
    from canvax.pipelines.pipeline import Pipeline
    from canvax.weights.location import Location


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """Add the flags of adapters."""
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--lora", action="append", default=[], metavar="FILE[:WEIGHT]",
        help="LoRA or relative: a file, folder or Hub id; may be repeated",
    )  # fmt: skip
    group.add_argument("--lora-dir", metavar="FOLDER", help="folder of the files for <lora:name:0.8> in prompts")
    group.add_argument(
        "--embedding", action="append", default=[], metavar="FILE",
        help="textual inversion; its word is the name in the file, or the file's",
    )  # fmt: skip


def check_adapters(arguments: argparse.Namespace) -> None:
    """Refuse flags of adapters that cannot be used, before a model is opened.

    Raises:
        InputError, CheckpointError: a flag cannot be used.
    """
    from canvax.weights.open import EMBEDDING_FILES, LORA_FILES, check_adapter

    for text in arguments.lora:
        name, weight = split_weight(text)
        file, _, number = text.rpartition(":")
        if not name or not math.isfinite(weight) or (name == text and file and os.path.isfile(file)):
            raise InputError(
                "lora", f"ends in {number!r:.40}, which is not a weight", cure="write FILE:0.8", value=text
            )
        if sum(split_weight(other)[0] == name for other in arguments.lora) > 1:
            raise InputError(
                "lora", "is given twice", cure="give it once, with the weight that it is to have", value=name[:200]
            )
        check_adapter(_location(name, arguments, "lora"), LORA_FILES)
    for text in arguments.embedding:
        check_adapter(_location(text, arguments, "embedding"), EMBEDDING_FILES)
    if arguments.lora_dir is not None and not named_path("lora_dir", arguments.lora_dir).is_dir():
        raise InputError("lora_dir", "is not a folder", value=arguments.lora_dir[:200])


def split_weight(text: str) -> tuple[str, float]:
    """Split ``FILE:0.8`` into a name and a weight, by default 1."""
    name, colon, number = text.rpartition(":")
    try:
        return (name, float(number)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0


def load_adapters(pipe: Pipeline, arguments: argparse.Namespace) -> None:
    """Load the adapters that the flags name."""
    hub = {name: getattr(arguments, name) for name in ("cache_dir", "local_files_only")}
    for text in arguments.lora:
        source, weight = split_weight(text)
        name = stem = Path(source).name.removesuffix(".safetensors")
        count = 2
        while name in pipe.adapters:
            name, count = f"{stem}-{count}", count + 1
        loaded = pipe.adapters.load(name, source, weight, token=arguments.token, **hub)
        if loaded.suggested and not arguments.quiet:
            complain(f"{name}: was made for {_flags(loaded.suggested)}")
        if loaded.trigger_words and not arguments.quiet:
            complain(f"{name}: was trained with the words {', '.join(loaded.trigger_words[:5])}")
    for source in arguments.embedding:
        words = pipe.adapters.load_embedding(source, hub_token=arguments.token, **hub)
        if not arguments.quiet:
            complain(f"{Path(source).name}: write {' or '.join(words)} in a prompt")
    if (image := getattr(arguments, "from_image", None)) and arguments.lora:
        from canvax.images.metadata import read_metadata
        from canvax.pipelines.again import not_loaded

        for name in not_loaded(read_metadata(image), pipe.adapters):
            complain(f"--lora: no file is {name}, with which {image} was generated", label="warning: ")
    if (folder := arguments.lora_dir or lora_folder()) is not None:
        pipe.adapters.folder = folder


def load_named(pipe: Pipeline, calls: Sequence[Call], arguments: argparse.Namespace) -> None:
    """Load the textual inversions of the folder of models that prompts name; print those that do not fit."""
    from canvax.pipelines.texts import texts_of
    from canvax.tokenizers.clip import words_in
    from canvax.weights.embeddings import read_word
    from canvax.weights.lora import token_widths

    files = embedding_files()
    names = files.keys() - {word.lower() for word in pipe.adapters.words}
    texts = dict.fromkeys(text for call in calls for text in texts_of(call.prompt, call.negative_prompt, call.options))
    for name in dict.fromkeys(word for text in texts for word, *_ in words_in(text, names)):
        try:
            read_word(files[name], name, token_widths(pipe.model.networks.text.specs))
            pipe.adapters.load_embedding(files[name], embedding_name(name, files[name]))
        except CanvaxError as fault:
            warn(HintWarning("prompt", f"has {name!r}, which is read as text: {fault}"))
        else:
            if not arguments.quiet:
                complain(f"{name}: a textual inversion, {files[name]}")


def info_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of ``canvax info`` about an adapter."""
    parts = [f"{count} of {name}" for name, count in report["parts"].items()]
    ranks = report["ranks"]
    width = report["text_width"]
    family = report["family"] or (f"text of width {width}" if width else "not clear from its names")
    words = [f"{word} ({count} vector{'s' if count > 1 else ''})" for word, count in report["embeddings"].items()]
    facts = {
        "changes": "; ".join(parts),
        "ranks": ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""),
        "words": ", ".join(words),
        "for": family,
        "trained with": ", ".join(report["trigger_words"]),
        "use with": _flags(report["suggested"]),
        "arrays": f"{report['arrays']} in {', '.join(report['stored'])}, {byte_size(report['bytes'])}",
        **report["metadata"],
    }
    width = max(map(len, facts))
    kind = "an adapter" if report["parts"] else "a textual inversion"
    shown = [f"{name:<{width}}  {' '.join(value.split())}" for name, value in facts.items() if value]
    return [f"{report['adapter']}: {kind}", "", *shown]


def _flags(suggested: Mapping[str, Any]) -> str:
    names = {"num_inference_steps": "steps", "sampler_settings": "set"}
    each = [(name, one) for name, value in suggested.items() for one in (value if isinstance(value, list) else [value])]
    return " ".join(f"--{names.get(name, name.replace('_', '-'))} {value}" for name, value in each)


def _location(name: str, arguments: argparse.Namespace, argument: str) -> Location:
    from canvax.weights.location import Location

    return Location(name, cache_dir=arguments.cache_dir, local_files_only=arguments.local_files_only, argument=argument)
