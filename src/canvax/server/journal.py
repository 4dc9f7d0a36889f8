"""The journal of a server: accepted jobs and finished images in an SQLite file, so that a kill loses none of them."""

from __future__ import annotations

import base64
import io
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image

from canvax.errors import CanvaxError, InputError
from canvax.server.jobs import Job, JobRequest, Picture, PromptImage, Status

log = logging.getLogger("canvax.server")

APPLICATION, VERSION = 0x63_76_78_6A, 1
"""Marks of the file: "cvxj", and the version of its tables."""

TIDY = 64
"""Jobs that are forgotten before their space is given back: it means moving pages of the file."""

_REPEAT = 60.0
"""Seconds after which the log says again that nothing can be written."""

_IMAGES = ("image", "mask")
_PNG = "image/png"
"""Only key of the JSON object that replaces an image among other values."""

_TABLES = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, created REAL NOT NULL, model TEXT NOT NULL,
    status TEXT NOT NULL, ask BLOB NOT NULL, pictures BLOB NOT NULL, image BLOB, mask BLOB, code TEXT, message TEXT
);
CREATE TABLE images (
    job TEXT NOT NULL REFERENCES jobs(id) ON DELETE CASCADE, number INTEGER NOT NULL, width INTEGER NOT NULL,
    height INTEGER NOT NULL, data BLOB NOT NULL, metadata BLOB NOT NULL, PRIMARY KEY (job, number)
);
"""
_SETTINGS = (
    "locking_mode = EXCLUSIVE",  # until it is closed: two servers would answer for the same jobs
    "journal_mode = WAL",
    "journal_size_limit = 16777216",
    "synchronous = NORMAL",
    "foreign_keys = ON",
    "secure_delete = ON",  # what is forgotten is erased
)
_LATER_TABLES = """
CREATE TABLE IF NOT EXISTS probe (data BLOB);
CREATE TABLE IF NOT EXISTS attempts (
    job TEXT PRIMARY KEY REFERENCES jobs(id) ON DELETE CASCADE, count INTEGER NOT NULL
);
"""
"""Tables that a journal of an earlier version may lack, and that earlier versions ignore."""
_VACUUM = "PRAGMA incremental_vacuum"


class Journal:
    """An open journal. Its methods may be called from any thread.

    Attributes:
        broken: why something could not be written; None again as soon as as much can be written.

    Raises:
        InputError: the file is something else, of another version of canvax, or another server's.
    """

    def __init__(self, path: Path) -> None:
        self.broken: str | None = None
        self._failed = 0  # bytes of the largest write that did not succeed
        self._logged = -math.inf
        self._path, self._lock, self._forgotten, self._made = path, threading.Lock(), 0, False
        self._closed = False
        try:
            # SQLite would let others of this machine read it. A file that is there is not opened here: closing it again
            # would give up the lock of a journal that this process has open.
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                self._made = True
            self._base = sqlite3.connect(path, timeout=0, check_same_thread=False, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"--journal {path}: cannot be opened ({reason}); name another file") from None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def accepted(self, job: Job) -> None:
        """Write a new job; it is on the disk when this returns. Encoding its images may take a second.

        Raises:
            CanvaxError: it cannot be written.
        """
        job_request = {name: getattr(job.request, name) for name in _names(JobRequest) - {*_IMAGES, "awaited"}}
        pictures = [[picture.seed, picture.width, picture.height, picture.steps] for picture in job.pictures]
        packed = (_packed(getattr(job.request, name)) for name in _IMAGES)
        values = self._encoded(job_request), self._encoded(pictures), *packed
        row = (job.id, job.created, job.model, str(job.status), *values)
        self._write("INSERT INTO jobs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL)", row, waits=True)

    def finished(self, job: Job, index: int) -> None:
        """Write an image that is done, unless its job was forgotten meanwhile."""
        picture, statement = job.pictures[index], "INSERT OR REPLACE INTO images SELECT ?, ?, ?, ?, ?, ?"
        with self._tolerant():
            metadata = self._encoded(dict(picture.metadata))
            row = (job.id, index, picture.width, picture.height, picture.data, metadata)
            self._write(f"{statement} WHERE EXISTS (SELECT 1 FROM jobs WHERE id = ?)", (*row, job.id))
            self._write("UPDATE attempts SET count = min(count, 1) WHERE job = ?", (job.id,))

    def begun(self, job: Job) -> None:
        """Count an attempt: a job begins in this process."""
        count = "INSERT INTO attempts SELECT id, 1 FROM jobs WHERE id = ? ON CONFLICT DO UPDATE SET count = count + 1"
        with self._tolerant():
            self._write(count, (job.id,))

    def stopped(self, *jobs: Job) -> None:
        """Take back this process's attempt of jobs that are not at work any more."""
        with self._tolerant():
            for job in jobs:
                self._write("UPDATE attempts SET count = count - 1 WHERE job = ?", (job.id,))

    def over(self, job: Job) -> None:
        """Write how a job ended."""
        row = (str(job.status), *(job.error or (None, None)), job.id)
        with self._tolerant():
            self._write("UPDATE jobs SET status = ?, code = ?, message = ? WHERE id = ?", row)

    def forget(self, *jobs: Job) -> None:
        """Remove jobs and their images, from the write-ahead log too."""
        before, self._forgotten = self._forgotten, self._forgotten + len(jobs)
        with self._tolerant():
            for job in jobs:
                self._write("DELETE FROM jobs WHERE id = ?", (job.id,))
            if self._forgotten // TIDY > before // TIDY:
                self._write(_VACUUM, ())
            self._write("PRAGMA wal_checkpoint(TRUNCATE)", ())

    def check(self) -> None:
        """Try to write once more where that failed, as much as failed; ``broken`` says how it went."""
        if self.broken:
            with self._tolerant():
                self._write("INSERT INTO probe VALUES (?)", (bytes(self._failed),), waits=True)
                self._write("DELETE FROM probe", ())

    def recover(self, cancel: Callable[[Job], None]) -> Iterator[Job]:
        """Yield the jobs of the file, oldest first, each read when it is needed; ``cancel`` as for ``Job``.

        A job that this version cannot carry out has its ``error`` already. After the journal is closed no more jobs
        come.

        Raises:
            InputError: the file is damaged.
        """
        last = -1
        try:
            while True:
                with self._lock:
                    if self._closed:
                        return
                    statement = "SELECT * FROM jobs WHERE number > ? ORDER BY number LIMIT 1"
                    if (row := self._base.execute(statement, (last,)).fetchone()) is None:
                        return
                    last, job = row[0], self._job(row, cancel)
                yield job
        except (sqlite3.Error, msgspec.DecodeError, TypeError, ValueError, LookupError, OSError, SyntaxError) as error:
            cure = "move it away to begin anew, or put back a copy"
            raise InputError(f"--journal {self._path}: is damaged ({error}); {cure}") from None

    def close(self) -> None:
        """Close the file. What comes later is not written. One that was made here for no job at all goes."""
        with self._lock:
            with suppress(sqlite3.Error, OSError):
                # While it is still locked: a server that starts at this moment must not get a file that goes.
                if self._made and not self._base.execute("SELECT count(*) FROM jobs").fetchone()[0]:
                    # Its write-ahead log first: SQLite leaves the log of a file that is gone.
                    for path in (self._path.with_name(f"{self._path.name}-wal"), self._path):
                        path.unlink(missing_ok=True)
            self._closed = True
            self._base.close()

    def _begin(self) -> None:
        """See whose file it is, take it, and make its tables if it is new."""
        base, path = self._base, self._path
        try:
            versions = [base.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            empty = base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
            if not empty and versions[0] != APPLICATION:
                raise InputError(f"--journal {path}: is a database of another program; name another file")
            if not empty and versions[1] != VERSION:
                raise InputError(f"--journal {path}: is of another version of canvax; name another file")
            once = ["auto_vacuum = INCREMENTAL"] if empty else []  # before anything is written
            for setting in (*once, *_SETTINGS):
                base.execute(f"PRAGMA {setting}").fetchall()
            marks = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"
            tables = _TABLES + _LATER_TABLES if empty else _LATER_TABLES
            base.executescript(f"BEGIN IMMEDIATE; {tables} {marks} COMMIT;")  # it is locked from here
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                raise InputError(f"--journal {path}: another server has it; give each server another file") from None
            raise InputError(f"--journal {path}: cannot be written ({error}); name another file") from None
        except sqlite3.DatabaseError as error:
            raise InputError(f"--journal {path}: is not a journal of canvax ({error}); name another file") from None

    def _job(self, row: Sequence[Any], cancel: Callable[[Job], None]) -> Job:
        _, name, created, model, status, job_request, pictures, image, mask, code, message = row
        values = msgspec.json.decode(job_request)
        values |= {name: _decoded(values.get(name)) for name in ("control", "image_prompt", "references")}
        values["references"] = tuple(values["references"] or ())
        prompts, gone = values["image_prompt"] or [], sorted(values.keys() - _names(JobRequest))
        gone += [name for prompt in prompts for name in sorted(prompt.keys() - _names(PromptImage))]
        if gone:  # for its client and its key alone
            values = {"prompt": "", **{name: values[name] for name in _names(JobRequest) & values.keys()}}
            values["image_prompt"] = None
        elif values["image_prompt"] is not None:
            values["image_prompt"] = [PromptImage(**prompt) for prompt in prompts]
        job_request = JobRequest(**values, image=_unpacked(image), mask=_unpacked(mask))
        images = [Picture(i, *numbers) for i, numbers in enumerate(msgspec.json.decode(pictures))]
        job = Job(job_request, model, images, cancel=cancel, name=name, created=created)
        done = self._base.execute("SELECT number, width, height, data, metadata FROM images WHERE job = ?", (name,))
        for number, width, height, data, metadata in done:
            picture = images[number]
            picture.width, picture.height, picture.data = width, height, data
            picture.metadata, picture.status, picture.step = msgspec.json.decode(metadata), Status.DONE, picture.steps
        job.status = Status(status)
        if not job.status.over and all(picture.data is not None for picture in images):  # killed after its last image
            job.status = Status.DONE
        if job.status.over:
            job.error = (code, message) if code else None
            for picture in images:
                picture.status = picture.status if picture.status.over else job.status
        elif gone:
            job.error = "server_error", f"another version of canvax accepted it, with {gone[0]!r:.80}; ask again"
        count = self._base.execute("SELECT count FROM attempts WHERE job = ?", (name,)).fetchone()
        job.attempts = count[0] if count and not job.status.over else 0
        return job

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Log errors of writes whose loss only costs work after a kill: no job fails."""
        try:
            yield
        except CanvaxError as error:
            self.log(error)

    def log(self, error: CanvaxError) -> None:
        """Log an error of a write: one each minute while nothing can be written."""
        if (now := time.monotonic()) - self._logged >= _REPEAT:
            self._logged = now
            log.error("%s", error)

    def _write(self, statement: str, row: Sequence[Any], *, waits: bool = False) -> None:
        """Write a row. ``waits``: wait for the disk, so that a power cut does not undo the write; a kill never does."""
        size = sum(len(value) for value in row if isinstance(value, bytes))
        try:
            with self._lock:
                if waits:
                    self._base.execute("PRAGMA synchronous = FULL")
                try:
                    if statement == _VACUUM:  # ``execute`` would free one page and stop
                        self._base.executescript(statement)
                        rows = 0
                    else:
                        rows = self._base.execute(statement, row).rowcount
                finally:
                    if waits:
                        self._base.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as error:
            self.broken, self._failed = f"journal {self._path}: cannot be written ({error})", max(self._failed, size)
            raise CanvaxError(self.broken) from None
        if rows > 0 and size >= self._failed:  # a statement that writes no row needs no room
            self.broken, self._failed, self._logged = None, 0, -math.inf

    def _encoded(self, value: Any) -> bytes:
        try:
            return msgspec.json.encode(value, enc_hook=_plain)
        except (ValueError, OverflowError, RecursionError) as error:  # not its words: they may be somebody's prompt
            raise CanvaxError(f"journal {self._path}: cannot be written ({type(error).__name__})") from None


def _names(record: type[Any]) -> set[str]:
    """Return the names of a record's fields."""
    return {field.name for field in fields(record)}


def _plain(value: Any) -> Any:
    """Return a JSON value for an image among other values, and text for other types."""
    return {_PNG: _packed(value)} if isinstance(value, Image.Image) else str(value)


def _decoded(value: Any) -> Any:
    """Return values with their images decoded."""
    if isinstance(value, list):
        return [_decoded(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if _PNG in value:
        return _unpacked(base64.b64decode(value[_PNG]))
    return {name: _decoded(entry) for name, entry in value.items()}


def _packed(image: Image.Image | None) -> bytes | None:
    """Return an image as a file without loss."""
    if image is None:
        return None
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def _unpacked(data: bytes | None) -> Image.Image | None:
    """Return an image of ``_packed``, decoded, since several threads read it."""
    if data is None:
        return None
    with Image.open(io.BytesIO(data)) as file:
        return file.copy()
