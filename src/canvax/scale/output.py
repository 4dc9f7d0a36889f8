"""The folder of a batch job holds its images, as files or in shards, and a list of its rows, ``manifest.jsonl``.

A file is written under a temporary name and renamed; then a line is appended to the list. A killed process leaves at
most a file without its line, which is written again, and the beginning of a line, which is removed.
Images of shards wait as files until a shard is full.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from canvax.errors import CanvaxError, CheckpointError, InputError
from canvax.files import named_path, read_json, remove_leftovers, written
from canvax.images.metadata import read_metadata
from canvax.scale.rows import pyarrow

Into = Literal["files", "tar", "parquet"]
RUN, WAITING = "batch.json", "waiting"
_LISTS = "manifest*.jsonl"
_FIRST_COUNTS = ("most", "canvax", "defaults")
"""Entries of ``run`` that may change when a job is resumed: its batches keep the first values. Rows that a changed
default affects are refused separately.
"""
_LONGEST_LINE = 1 << 20
_NAME = re.compile(r"[\w-][\w.-]{0,119}", re.ASCII)


class Output:
    """The folder of a batch job.

    Args:
        folder: created if missing; otherwise it must be empty or contain the same job.
        run: settings that determine the images besides the rows, such as the model; they identify the job.
        into: one file for each image, or shards: tar files as webdataset reads them, or Parquet.
        shard_size: number of images of a shard.
        process: index of this process among those that write to the folder.
        processes: number of these processes.

    Attributes:
        run: settings of the job's first run.
        known: last line in the list of each finished or failed row, by id.

    Raises:
        InputError: the folder has other contents or another job, or another process writes to it.
    """

    def __init__(
        self,
        folder: str | Path,
        run: Mapping[str, Any],
        *,
        into: Into = "files",
        shard_size: int = 1000,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.folder = named_path("output", folder)
        self.into: Into = into
        self._shard_size = shard_size
        self._process, self._processes = process, processes
        self._lock = threading.Lock()
        if into == "parquet":
            pyarrow("--into parquet")
        self.run: dict[str, Any] = {}
        made = self._begin()
        # Settings bind only after a row succeeded; the first attempt may have had a misspelt model.
        self._goes_on = any(True for _ in _lines(self.folder, _LISTS))
        self.agree({**run, "into": into})
        # The names of lists and shards contain the process, so that no process overwrites a shard of another one,
        # even if they were started with different numbers of processes.
        self._suffix = f"-{process:04d}" if process else ""
        name = f"manifest{self._suffix}.jsonl"
        # Two processes with the same list would both do all the work, so the second is refused.
        begun = (self.folder / name).exists()
        self._list = _locked(self.folder / name)
        self._made = made and processes == 1
        self._own = [self.folder / name] * (not begun) + [self.folder / RUN] * self._made
        self.known = listed(self.folder)
        self._shard = self._next_shard()
        self._waiting: dict[str, dict[str, Any]] = {}
        if into != "files":
            (self.folder / WAITING).mkdir(exist_ok=True)
            remove_leftovers(self.folder / WAITING)
            lines = _lines(self.folder, name)
            self._waiting = {line["id"]: line for line in lines if line == self.known[line["id"]] and _waits(line)}
            self._pack(self._shard_size)

    def add(
        self, line: Mapping[str, Any], data: bytes | None = None, kind: str = "png", *, hashed: bool = False
    ) -> None:
        """Add the result of a row: ``line`` has its ``id`` and ``status``; ``data`` is the file of its image.

        With ``hashed`` the file is not named by the id: on macOS and Windows names must differ in more than case.

        Raises:
            CanvaxError: the folder cannot be written to.
        """
        line = dict(line)
        try:
            if data is not None:
                line["file"] = f"{file_name(line['id'], hashed=hashed)}.{kind}"
                line["sha256"] = hashlib.sha256(data).hexdigest()
                if self.into != "files":
                    line["file"] = f"{WAITING}/{line['file']}"
                with written(self.folder / line["file"]) as draft:
                    draft.write_bytes(data)
            with self._lock:
                self._append([line])
                if _waits(line):
                    self._waiting[line["id"]] = line
                    self._pack(self._shard_size)
        except OSError as error:
            raise CanvaxError(f"--output {self.folder}: cannot be written ({error.strerror or error})") from error

    def gone(self) -> int:
        """Return the number of finished rows whose images are missing; 0 for shards and for several processes."""
        if self.into != "files" or self._processes > 1:
            return 0
        existing = set(os.listdir(self.folder))
        return sum(line.get("status") == "done" and line.get("file") not in existing for line in self.known.values())

    def close(self, *, done: bool) -> None:
        """Release the folder for other processes; if all rows are ``done``, put the last images into a shard."""
        if done and self._waiting:
            self._pack(1)
        if done and self.into != "files":
            self._finish_others()
            with suppress(OSError):
                (self.folder / WAITING).rmdir()
        self._list.close()
        if self._own and not self.known:  # nothing was done, so nothing is kept
            with suppress(OSError):
                for path in self._own:
                    path.unlink(missing_ok=True)
                if self._made:
                    (self.folder / WAITING).rmdir() if self.into != "files" else None
                    self.folder.rmdir()

    def agree(self, run: Mapping[str, Any]) -> None:
        """Check that the job was started with the entries of ``run``, and add new ones.

        Raises:
            InputError: the job was started with another value.
        """
        path = self.folder / RUN
        run_settings = as_written(run)
        try:
            earlier = self.run or (read_json(path) if self._goes_on and path.exists() else {})
            for name in run_settings.keys() & earlier.keys():
                if name not in _FIRST_COUNTS and earlier[name] != run_settings[name]:
                    raise InputError(
                        "output",
                        f"was begun with {name}={earlier[name]!r}, not {run_settings[name]!r}",
                        cure="go on with that, or choose another folder",
                        value=self.folder,
                    )
            self.run = {**run_settings, **earlier}
            if self._process == 0 and self.run != earlier:
                with written(path) as draft:
                    draft.write_text(json.dumps(self.run, indent=1), encoding="utf-8")
        except CheckpointError:
            raise InputError(
                f"{path}: is damaged, so that nothing is known of how the job was begun; choose another folder"
            ) from None
        except OSError as error:
            raise InputError("output", f"cannot be written to ({error.strerror or error})", value=self.folder) from None

    def _begin(self) -> bool:
        """Make the folder, or check that it is that of a batch job; return whether it was made."""
        try:
            made = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
            known = (self.folder / RUN).exists() or self._process > 0  # the first process writes it
            known = known or any(self.folder.glob("manifest-*.jsonl"))  # other processes may have started
            if not known and any(not entry.name.startswith(".") for entry in self.folder.iterdir()):
                raise InputError(
                    "output", "is not empty, and of no batch job", cure="choose another folder", value=self.folder
                )
        except (FileExistsError, NotADirectoryError):
            raise InputError(
                "output", "is a file, or lies under one", cure="choose another folder", value=self.folder
            ) from None
        except OSError as error:
            raise InputError("output", f"cannot be written to ({error.strerror or error})", value=self.folder) from None
        return made

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
        self._list.write(text.encode())  # one write at the file's end
        self.known.update({line["id"]: dict(line) for line in lines})

    def _pack(self, least: int) -> None:
        """Make shards of the waiting images while there are at least ``least``."""
        while len(self._waiting) >= least and self._waiting:
            lines = [*self._waiting.values()][: self._shard_size]
            name = f"{self._shard:05d}"
            path = self.folder / f"{name}{self._suffix}.{self.into}"
            samples = [(line, (self.folder / line["file"]).read_bytes()) for line in lines]
            records = [read_metadata(self.folder / line["file"]) for line in lines]
            write = _write_tar if self.into == "tar" else _write_parquet
            packed = [
                {**line, "file": path.name, "key": f"{name}{i:04d}{self._suffix}"} for i, line in enumerate(lines)
            ]
            named = [(line["key"], Path(waiting["file"]).suffix, data) for line, (waiting, data) in
                     zip(packed, samples, strict=True)]  # fmt: skip
            with written(path) as draft:
                write(draft, named, records)
            self._append(packed)
            self._shard += 1
            for line in lines:
                (self.folder / line["file"]).unlink(missing_ok=True)
                del self._waiting[line["id"]]

    def _next_shard(self) -> int:
        """Return the number after the last shard of this process in the list; an unlisted shard is made again."""
        names = {line["file"].partition(".")[0].partition("-") for line in self.known.values() if "key" in line}
        return max((int(number) for number, *rest in names if "".join(rest) == self._suffix), default=-1) + 1

    def _finish_others(self) -> None:
        """Pack the waiting images of processes that only an earlier run had."""
        for path in self.folder.glob("manifest-*.jsonl"):
            number = path.stem.partition("-")[2]
            if number.isdecimal() and int(number) >= self._processes:
                numbers = {"process": int(number), "processes": int(number) + 1}
                with suppress(InputError):  # that process is running after all
                    Output(self.folder, {}, into=self.into, shard_size=self._shard_size, **numbers).close(done=True)


def as_written(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``run`` as JSON reads it back."""
    return json.loads(json.dumps(dict(run), default=str))


def listed(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return the last line of each row in the lists of all processes that write to a folder, by id."""
    return {line["id"]: line for line in _lines(named_path("output", folder), _LISTS)}


def _lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield all lines of the lists, also those that later lines replace, but not lines that a kill cut off."""
    for path in sorted(folder.glob(name)):
        if not path.is_file():
            raise InputError(
                "output", f"holds {path.name}, which is not a regular file", cure="choose another folder", value=folder
            )
        try:
            file = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise InputError(
                "output", f"holds {path.name}, which cannot be read ({error.strerror or error})", value=folder
            ) from None
        with file:
            for text in file:
                with suppress(ValueError):
                    line = json.loads(text.decode(errors="replace"))
                    if isinstance(line, dict) and isinstance(line.get("id"), str):
                        yield line


def file_name(name: str, *, hashed: bool = False) -> str:
    """Return the file name of an id: the id itself if every file system takes it, else a hash of it."""
    return name if _NAME.fullmatch(name) and not hashed else hashlib.sha256(name.encode()).hexdigest()[:32]


def _waits(line: Mapping[str, Any]) -> bool:
    return str(line.get("file", "")).startswith(f"{WAITING}/")


def _locked(path: Path) -> Any:
    """Open a list for appending by this process only, and remove an incomplete last line."""
    try:
        file = open(path, "ab+", buffering=0)  # noqa: SIM115
    except OSError as error:
        why = f"{path.name} cannot be written to ({error.strerror or error})"
        raise InputError(
            "output",
            f"cannot be used: {why}",
            cure="see to its permissions, or choose another folder",
            value=path.parent,
        ) from None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except OSError:
        file.close()
        raise InputError("output", "is written to by another process", cure="wait for it", value=path.parent) from None
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _LONGEST_LINE))
    tail = file.read()
    if not tail.endswith(b"\n") and tail:
        file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
    return file


Sample = tuple[str, str, bytes]
"""Key, suffix with its point, and file of an image."""


def _write_tar(path: Path, samples: Sequence[Sample], records: Sequence[Mapping[str, Any]]) -> None:
    """Write a shard as webdataset reads it: KEY.png, KEY.txt with the prompt, KEY.json; always the same bytes."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for (key, ending, data), record in zip(samples, records, strict=True):
            metadata = json.dumps(record, ensure_ascii=False).encode()
            for name, content in ((ending, data), (".txt", record["prompt"].encode()), (".json", metadata)):
                info = tarfile.TarInfo(key + name)
                info.size, info.mode = len(content), 0o644
                tar.addfile(info, BytesIO(content))


_COLUMNS = {
    **dict.fromkeys(("prompt", "negative_prompt", "sampler", "model"), "string"),
    **dict.fromkeys(("height", "width", "num_inference_steps"), "int32"),
    **{"seed": "uint64", "guidance_scale": "float64"},
}


def _write_parquet(path: Path, samples: Sequence[Sample], records: Sequence[Mapping[str, Any]]) -> None:
    """Write a shard with a column ``image`` of bytes and path, which Hugging Face's datasets read as images."""
    pa, parquet = pyarrow("--into parquet"), pyarrow("--into parquet", "parquet")
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"id": pa.array([record["id"] for record in records], pa.string())}
    columns["image"] = pa.array([{"bytes": data, "path": key + end} for key, end, data in samples], image)
    for name, kind in _COLUMNS.items():
        columns[name] = pa.array([record[name] for record in records], pa.type_for_alias(kind))
    columns["metadata"] = pa.array([json.dumps(record, ensure_ascii=False) for record in records], pa.string())
    features = {name: {"dtype": str(column.type), "_type": "Value"} for name, column in columns.items()}
    schema = {"info": {"features": {**features, "image": {"_type": "Image"}}}}
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(schema)})
    parquet.write_table(table, path, row_group_size=100)
