"""Reads files of prompts, row by row: JSON lines, CSV, Parquet, or one prompt per line."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from canvax.call import Call, FromFiles
from canvax.errors import InputError, check_utf8, did_you_mean, plain
from canvax.familiar import CALL, answer, renamed
from canvax.files import named_path, once, open_regular
from canvax.pipelines.options import Options
from canvax.settings import check_once, declared, offered, plain_value

OPTIONS = tuple(offered(Options, "file"))
ARGUMENTS = (*offered(Call, "file"), *declared(FromFiles))
NAMES = (*ARGUMENTS, *OPTIONS)
"""The settings of a row besides its ``id``; names of other programs, such as ``steps``, are accepted as well."""

_TEXTS = {"id"}
_TEXTS |= {
    name for record in (Call, FromFiles, Options) for name, setting in declared(record).items() if setting.is_text
}
KINDS = (".txt", ".jsonl", ".ndjson", ".csv", ".parquet")
_NO_PROMPT = re.compile(r'--[a-z]|\[\s*(?:[{"]|$)|Negative prompt:|Steps: \d+, ')
_LONGEST = 1 << 24
"""Largest number of characters of a line or a cell."""


@dataclass(frozen=True)
class Row:
    """A requested image.

    Attributes:
        id: the name of the row, unique in the file.
        values: the fields of the row, as read.
        fault: reason why the row cannot be read; None if it can.
    """

    id: str
    values: Mapping[str, Any]
    fault: str | None = None


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of a file, in order. The id of a row without one is the number of its line or row, from 1.

    Lines of text that start with # are ignored.

    Raises:
        InputError: the file cannot be read, or its columns are not known.
    """
    path = named_path("file", path)
    kind = path.suffix.lower()
    if re.match(r"[a-z0-9+.-]{2,}:/", str(path), re.IGNORECASE):
        raise InputError(f"{path}: no address is read; download the file")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; give a file of prompts ({', '.join(KINDS)})")
    if not path.exists():
        cure = "" if kind else f"; for one image: canvax generate {shlex.quote(str(path))}"
        raise InputError(f"{path}: there is no such file{cure}")
    if kind not in KINDS:
        raise InputError(f"{path}: the ending {kind!r} is not one of {', '.join(KINDS)}; rename or convert it")
    try:
        pairs = _parquet_rows(path) if kind == ".parquet" else _text_rows(path, kind)
        yield from (row_of(number, values) for number, values in pairs)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text; save it as UTF-8") from None


def check_names(names: Collection[str], carried: Sequence[str] = (), defaults: Collection[str] = ()) -> None:
    """Refuse names that are not settings.

    Args:
        names: names of a file's columns, or of a row's fields.
        carried: further allowed names, which are not settings.
        defaults: settings that rows may omit.

    Raises:
        InputError: names the first, and a similar setting.
    """
    known = {"id", *NAMES, *carried}
    for name in names:
        meant = CALL[name].becomes or name if name in CALL and name not in known else name
        if meant == "num_images_per_prompt":
            raise InputError(f"{name}: a row is one image; write a row for each")
        if meant in known:
            continue
        if name == "options":
            raise InputError('options: write its fields next to the prompt, {"prompt": "a cat", "clip_skip": 1}')
        if "prompt" not in {*names, *defaults} and not did_you_mean(name, [*NAMES, *CALL]):
            strange = " or ".join(repr(column[:40]) for column in names if column not in known | CALL.keys())
            raise InputError(f"there is no prompt: its column is called 'prompt'; is it in {strange or repr(name)}?")
        problem = answer(name, CALL, ["id", *NAMES], "a known column")
        raise InputError(f"{problem}; leave it out, or --carry it into the list of what was made")


def settings_of(row: Row, defaults: Mapping[str, Any], carried: Sequence[str] = (), seed: int = 0) -> dict[str, Any]:
    """Return the settings of a row by canvax's names: its values, then ``defaults``, and a seed.

    The seed of a row without one follows from ``seed`` and the row's id, so that it differs between rows and is the
    same in every run.

    Raises:
        InputError: the row could not be read, has an unknown name, or a setting under two names.
    """
    if row.fault is not None:
        raise InputError(row.fault)
    values = {name: value for name, value in row.values.items() if name != "id" and name not in carried}
    values = {name: cleaned for name, value in values.items() if (cleaned := _clean(name, value)) is not None}
    check_names(values, defaults=defaults)
    known = {name: value for name, value in values.items() if name in NAMES}
    renamed(known, {name: value for name, value in values.items() if name not in NAMES}, CALL)
    settings = {**defaults, **known}
    if settings.get("seed") in (None, -1):
        settings["seed"] = seed_of(row.id, seed)
    return settings


def seed_of(name: str, seed: int = 0) -> int:
    """Return the seed of a row without one, from its id: 48 bits, which any JSON reader represents exactly."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode("utf-8", "backslashreplace")).digest()[:6], "big")


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that identify the settings of a row."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_of(number: int, values: Mapping[str, Any] | InputError, *, named: bool = False) -> Row:
    """Return a row from values that were read; ``number`` is its id, unless rows must be ``named``."""
    if isinstance(values, InputError):
        return Row(f"{number:06d}", {}, str(values))
    numbered = f"{number:06d}"
    try:
        name = _clean("id", values.get("id"))
    except InputError as error:
        return Row(numbered, values, str(error))
    if name is None:
        return Row(numbered, values, "there is no id; give each row its own, in a column 'id'" if named else None)
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        return Row(numbered, values, f"id={name!r:.80} is neither text nor a whole number")
    return Row(str(name), values)


def _text_rows(path: Path, kind: str) -> Iterator[tuple[int, Mapping[str, Any] | InputError]]:
    with open_regular(path) as raw, TextIOWrapper(BufferedReader(raw), "utf-8-sig", newline="") as file:
        if kind == ".csv":
            before = csv.field_size_limit(_LONGEST)  # a limit of the whole process
            try:
                yield from enumerate(_csv_rows(path, file), 1)
            finally:
                csv.field_size_limit(before)
            return
        for number, line in text_lines(file, path):
            if number == 1 and kind != ".txt" and line.startswith("["):
                raise InputError(f"{path}: is a list; write an object a line, without [ and ] around them")
            if not (kind == ".txt" and line.startswith("#")):
                yield number, _prompt(line) if kind == ".txt" else json_object(line)


def text_lines(file: TextIOWrapper, name: str | Path) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines of a text file with their numbers, without surrounding white space.

    Raises:
        InputError: a line is too long, or has null bytes.
    """
    number = 0
    while line := file.readline(_LONGEST):
        number += 1
        if len(line) == _LONGEST:
            raise InputError(f"{name}: line {number} is longer than {_LONGEST} characters; is it such a file?")
        if "\0" in line:  # UTF-16 without a byte order mark, or not text
            raise InputError(f"{name}: line {number} has bytes of 0, so that it is not UTF-8 text; save it as UTF-8")
        if line := line.strip():
            yield number, line


def _prompt(line: str) -> Mapping[str, Any] | InputError:
    try:
        check_prompt_line("", line)
    except InputError as error:
        return error
    if line.startswith("{") and isinstance(json_object(line), dict):
        return InputError(f"{line:.40} is a JSON object, not a prompt; name the file with the ending .jsonl")
    return {"prompt": line}


def check_prompt_line(where: str, line: str) -> None:
    """Refuse lines that are settings in files of other programs, since they would be read as prompts.

    Raises:
        InputError: the line holds flags, settings of A1111, a JSON list or a web page; the message begins with
            ``where``.
    """
    if line[:5].lower() in ("<!doc", "<html"):
        raise InputError(
            f"{where}{line:.40} begins a web page, which is no list of prompts; save its text, a prompt a line"
        )
    if _NO_PROMPT.match(line):
        cure = 'write settings as a JSON object a line: {"prompt": "a cat", "negative_prompt": "ugly", "steps": 30}'
        raise InputError(f"{where}{line:.40} is not a prompt; {cure}")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def json_object(line: str) -> Mapping[str, Any] | InputError:
    """Return the JSON object in a line, or an error with the reason why there is none."""
    try:
        value = json.loads(line, object_pairs_hook=once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return InputError(f"is not JSON ({error}); write one object a line")
    return value if isinstance(value, dict) else InputError(f"{line:.40} is not a JSON object; write one a line")


def _csv_rows(path: Path, file: TextIOWrapper) -> Iterator[Mapping[str, Any] | InputError]:
    reader = csv.DictReader(file, restkey="", strict=True)
    try:
        if not reader.fieldnames or "" in reader.fieldnames:
            raise InputError(f"{path}: its first line must name the columns, such as id,prompt,seed")
        if len(reader.fieldnames) == 1 and (sign := re.search(r"[;|\t]", only := reader.fieldnames[0])):
            raise InputError(f"{path}: its first line is {only!r:.80}; part columns with commas, not with {sign[0]!r}")
        if not {"id", *NAMES, *CALL}.intersection(reader.fieldnames):
            first = ",".join(reader.fieldnames)
            raise InputError(f"{path}: its first line, {first!r:.80}, must name the columns, such as id,prompt,seed")
        check_once(f"{path}: its first line", reader.fieldnames)
        for values in reader:
            if "" in values:
                yield InputError(f"has more cells than the {len(reader.fieldnames)} columns; quote cells with commas")
            else:
                yield {name: _cell(name, text) for name, text in values.items() if text}
    except csv.Error as error:
        if "unexpected end" in str(error):
            raise InputError(f"{path}: a quotation mark after line {reader.line_num} is never closed") from None
        raise InputError(f"{path}: line {reader.line_num} is not CSV ({error})") from None


def _cell(name: str, text: str) -> Any:
    meant = CALL[name].becomes or name if name in CALL else name
    return text if meant in _TEXTS or meant not in NAMES else plain_value(text)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    parquet = pyarrow(f"{path}: reading Parquet", "parquet")
    with open_regular(path) as raw:
        try:
            file, number = parquet.ParquetFile(raw), 0
            for batch in file.iter_batches(1024):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
        except (ValueError, NotImplementedError) as error:  # ArrowInvalid is a ValueError
            raise InputError(f"{path}: is not a Parquet file that can be read ({error})") from None


def pyarrow(what: str, module: str = "") -> Any:
    """Import pyarrow or a module of it.

    Raises:
        InputError: pyarrow is not installed; ``what`` needs it.
    """
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}" if module else "pyarrow")
    except ImportError:
        raise InputError(f'{what} needs pyarrow; install it from canvax\'s folder: pip install ".[batch]"') from None


def _clean(name: str, value: Any) -> Any:
    """Return a plain Python value; None for an empty cell.

    Tables store integer columns with gaps as floats, and gaps as NaN.
    """
    value = plain(value, name)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        if value != value:
            return None
        if value.is_integer() and abs(value) <= 2**53:
            return int(value)
    return check_utf8(name, value) if isinstance(value, str) else value
