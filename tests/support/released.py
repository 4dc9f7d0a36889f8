"""Configs as models were released with them, from tests/data/released.json; see its README for where they are from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canvax.weights.single_file import CLIP

Fields = dict[str, Any]

_DATA = json.loads((Path(__file__).parent.parent / "data" / "released.json").read_text())


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any], without: Sequence[str]) -> Fields:
    """``base`` with ``changes``; ``without`` names fields to leave out, those of a dictionary inside with a slash."""
    fields = {name: value for name, value in base.items() if name not in without}
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(changes.get(name, {}), dict):
            inside = [path.removeprefix(f"{name}/") for path in without if path.startswith(f"{name}/")]
            fields[name] = _changed(value, changes.get(name, {}), inside)
    return fields | {name: value for name, value in changes.items() if not isinstance(fields.get(name), dict)}


def _read() -> dict[str, Fields]:
    configs: dict[str, Fields] = {}
    for name, entry in _DATA["configs"].items():
        base = configs[entry["like"]] if "like" in entry else {}
        configs[name] = _changed(base, entry["fields"], entry.get("without", ()))
    return configs


CONFIGS = _read()
"""The fields of each config, those of diffusers with ``_class_name``, those of transformers with ``architectures``."""

FOLDERS: list[dict[str, Any]] = _DATA["folders"]
"""Whole folders: ``source``, ``index`` (that is model_index.json) and ``parts``, which names configs of components."""

OTHERS: list[Any] = [json.loads(name) for name in _DATA["other pipelines"]]
"""Pipelines that model_index.json names in folders of other kinds of models."""

ARRAYS: dict[str, tuple[set[str], int]] = {
    config: (
        {name.replace("*", str(i)) for name, times in entry["names"].items() for i in range(times)},
        entry["bytes"],
    )
    for config, entry in _DATA["names of arrays"].items()
}
"""Of some configs, the names of the arrays in the released checkpoint, and its bytes."""

INFOTEXTS: list[str] = _DATA["infotexts"]
"""The last lines that A1111, Forge and Civitai write to images."""

ADAPTERS: dict[str, dict[str, Any]] = _DATA["adapters"]
"""What files of LoRA hold, by preset: ``modules`` of SDXL, ``sizes`` (inputs, outputs) and ``metadata`` of Krea 2."""


def modules_of(parts: Sequence[Sequence[Any]]) -> list[str]:
    """Return names of modules: beginnings and ends, or beginnings, how many numbers from 0, and ends."""
    names = []
    for firsts, *count, lasts in parts:
        middles = [f"_{i}_" for i in range(*count)] if count else [""]
        names += [first + middle + last for first in firsts for middle in middles for last in lasts]
    return names


def kind_of(fields: Mapping[str, Any]) -> str:
    """Return the class that a config is of."""
    return str(fields.get("_class_name") or (fields.get("architectures") or [""])[0])


def write_folder(folder: Path, released: Mapping[str, Any]) -> Path:
    """Write the small files of a released folder; vocabularies are the bundled ones of CLIP, or of a few words."""
    folder.mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(released["index"]))
    for part in released["index"]:
        if not part.startswith("tokenizer") or released["index"][part][0] is None:
            continue
        (folder / part).mkdir()
        if "T5" in released["index"][part][1]:  # its vocabulary is in the package
            (folder / part / "spiece.model").write_bytes(b"")
        elif "Qwen" in released["index"][part][1]:
            (folder / part / "tokenizer.json").write_text(json.dumps(_FEW_WORDS))
            (folder / part / "tokenizer_config.json").write_text('{"pad_token": "?"}')
        else:
            for name in ("vocab.json", "merges.txt"):
                (folder / part / name).symlink_to(CLIP / "tokenizer" / name)
    for part, name in released["parts"].items():
        (folder / part).mkdir(exist_ok=True)
        whole = {"scheduler": "scheduler_config.json", "feature_extractor": "preprocessor_config.json"}
        files = CONFIGS[name] if part.startswith("tokenizer") else {whole.get(part, "config.json"): CONFIGS[name]}
        for file, fields in files.items():
            (folder / part / file).write_text(json.dumps(fields))
    return folder


_FEW_WORDS = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}}
