"""Reading files that strangers made, and writing files whole or not at all."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from canvax.errors import CheckpointError, InputError
from canvax.files import check_writable, open_regular, read_bytes, read_json, temporary_folder, written


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """In a moment, where an ordinary ``open`` of a pipe waits for ever."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", 7) == b"content"
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / "absent", Path("a\0b"), Path("a" * 5000)):
        with pytest.raises(OSError, match=r"(?s)."):
            open_regular(path)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_bytes(path, 7)


def test_sizes_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    assert read_bytes(path, 8) == b"12345678"
    with pytest.raises(CheckpointError, match="larger than 7 bytes"):
        read_bytes(path, 7)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # nothing on disk, a terabyte to read
    with pytest.raises(CheckpointError, match="larger than 50000000 bytes"):
        read_json(path)


@pytest.mark.parametrize("text", [b"[" * 60_000, b'{"a":' * 60_000, b"{", b"\xff", b'{"a": ' + b"9" * 10_000 + b"}"])
def test_bad_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_json(tmp_path / "a.json")


def test_two_threads_write_the_same_file(tmp_path: Path) -> None:
    """Each into a file of its own; the last one to end wins, and neither sees the other's bytes."""
    path, both = tmp_path / "file", threading.Barrier(2, timeout=10)

    def write(letter: str) -> None:
        with written(path) as temporary, temporary.open("w") as file:
            both.wait()
            for _ in range(1000):
                file.write(letter)
                file.flush()
            both.wait()

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("a" * 1000, "b" * 1000)
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the final name, nor one with the temporary name, even if that could be guessed."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "open-to-all"
    folder.mkdir()
    (folder / "file").symlink_to(precious)
    with written(folder / "file") as temporary:
        temporary.write_text("new")
    assert (folder / "file").read_text() == "new"
    assert not (folder / "file").is_symlink()
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (folder / ".canvax-guessed.partial").symlink_to(precious)
    with pytest.raises(FileExistsError), written(folder / "file") as temporary:
        temporary.write_text("stolen")
    with pytest.raises(FileExistsError), temporary_folder(folder):
        pass
    assert precious.read_text() == "mine"


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(manager: AbstractContextManager[Path], part: str) -> None:
        with manager as temporary:
            (temporary / part).write_text("half")
            raise RuntimeError

    (tmp_path / "file").write_text("old")
    for manager, part in ((written(tmp_path / "file"), ""), (temporary_folder(tmp_path), "part")):
        with pytest.raises(RuntimeError):
            fail(manager, part)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_umask_that_forbids_what_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder can be made and nothing in it, nor can it be looked into: that is told, and it is taken away."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", forbidden)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    with pytest.raises(InputError, match="cannot be written to"):
        check_writable("output", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_others_may_read_what_is_written(tmp_path: Path) -> None:
    """As any file of the user's, by the umask."""
    (tmp_path / "plain").touch()
    with written(tmp_path / ("n" * 255)) as temporary:  # the longest name there is
        pass
    with temporary_folder(tmp_path) as folder:
        os.replace(folder, tmp_path / "folder")
    (tmp_path / "plain folder").mkdir()
    assert (tmp_path / ("n" * 255)).stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "folder").stat().st_mode == (tmp_path / "plain folder").stat().st_mode
    assert not temporary.exists()
