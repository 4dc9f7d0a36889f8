"""The model hub: downloads the files of one commit of a repository, with clear messages for all failures.

``huggingface_hub`` is imported at first use. It does the transport, keeps the cache, and obeys HF_ENDPOINT, HF_HOME,
HF_TOKEN, HF_HUB_OFFLINE and HF_HUB_DISABLE_PROGRESS_BARS. The answers may come from a mirror, or over plain HTTP from
an attacker, so names and hashes are checked before the library makes paths of them.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tqdm.auto import tqdm

from canvax.errors import CheckpointError, HubError, warn
from canvax.files import read_json, written
from canvax.weights.entries import check_head, open_weight_file
from canvax.weights.files import open_weights
from canvax.weights.location import Location

Answer = TypeVar("Answer")
LONGEST_ANSWER = 60.0
"""Time limit in seconds for the list of a model's files, even if bytes keep coming."""

_SHA = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[\w\-]{1,128}", re.ASCII)
"""A hash, which the library uses as a file name in its cache."""


@dataclass(frozen=True)
class Commit:
    """One commit of a repository.

    Attributes:
        location: the repository and the download settings.
        sha: the commit.
        names: names of its files; None offline, when only cached files are available.
        root: a top-level file that every cached copy has.
    """

    location: Location
    sha: str
    names: Collection[str] | None
    root: str

    @property
    def folder(self) -> Path:
        """Folder of the commit in the cache."""
        path = self._cached(self.root)
        if path is None:
            raise HubError(f"{self.location.text}: {self.root} of commit {self.sha} has vanished from the cache.")
        return path.parents[len(PurePosixPath(self.root).parts) - 1]

    def fetch(self, names: Collection[str], *, progress: bool = False) -> Path:
        """Download files that are not in the cache yet; return the commit's folder in the cache.

        Damaged files are removed from the cache, so that the next attempt downloads them again.

        Raises:
            HubError: the Hub cannot be reached, or its answer is not trustworthy.
            CheckpointError: the repository lacks a file, or a file is damaged.
        """
        if self.names is None:
            return self.folder
        for name in names:
            if name not in self.names:
                raise CheckpointError(
                    f"{self.location.text}: has no file {name} at commit {self.sha}. The repository is incomplete."
                )
        if new := [name for name in names if self._cached(name) is None]:
            for name in new:
                self._check_answer(name)
            self._download(new, progress and self.location.progress)
            for name in new:
                self._check_file(name)
        return self.folder

    def remember(self) -> None:
        """Record the revision's commit in the cache for later offline use; a read-only cache is left unchanged."""
        revision = self.location.revision or "main"
        ref = self.folder.parent.parent / "refs" / revision
        if revision == self.sha or (ref.is_file() and ref.read_text() == self.sha):
            return
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            with written(ref) as temporary:
                temporary.write_text(self.sha)

    def _cached(self, name: str) -> Path | None:
        """Return the cached path of a file; None if it is not cached."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.location.text, name, cache_dir=self.location.cache_dir, revision=self.sha)
        return Path(path) if isinstance(path, str) else None

    def _check_answer(self, name: str) -> None:
        """Ask for a file's hash and check it, since the library makes a path of it."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

        try:
            url = hf_hub_url(self.location.text, name, revision=self.sha)
            answer = get_hf_file_metadata(url, token=self.location.token, timeout=HF_HUB_ETAG_TIMEOUT)
        except Exception as error:
            raise HubError(str(explain(error, self.location, name))) from error
        if not _ETAG.fullmatch(answer.etag or "") or answer.commit_hash != self.sha:
            raise HubError(
                f"{self.location.text}: the Hub answers for file {name} with the hash {str(answer.etag)[:80]!r} of the "
                f"commit {str(answer.commit_hash)[:80]!r}, not with those of a Hub. Check HF_ENDPOINT."
            )

    def _download(self, names: Collection[str], progress: bool) -> None:
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(
                self.location.text,
                revision=self.sha,
                cache_dir=self.location.cache_dir,
                token=self.location.token,
                allow_patterns=[escape(name) for name in names],
                tqdm_class=None if progress else _NoBar,
            )
        except Exception as error:
            raise HubError(str(explain(error, self.location))) from error

    def _check_file(self, name: str) -> None:
        """Check a downloaded file."""
        path = self._cached(name)
        if path is None:
            raise HubError(f"{self.location.text}: file {name} was not downloaded. Check HF_ENDPOINT, and try again.")
        blob = Path(os.path.normpath(path.parent / os.readlink(path))) if path.is_symlink() else path
        if blob != path and not (blob.parent.name == "blobs" and _ETAG.fullmatch(blob.name)):
            # Two answers differ. The file may have existed before, so it is not removed.
            raise HubError(
                f"{self.location.text}: the Hub had file {name} written to {blob}, outside of the cache. Look at that "
                "file, and do not use this HF_ENDPOINT."
            )
        try:
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix in (".safetensors", ".msgpack"):
                open_weights(path)
            else:
                with open_weight_file(path) as file:
                    check_head(path, file.read(64))
        except CheckpointError as error:
            path.unlink(missing_ok=True)
            blob.unlink(missing_ok=True)
            raise CheckpointError(f"{error} It was removed from the cache; try again.") from None


def find_commit(location: Location, *roots: str) -> Commit:
    """Return the current commit of a Hub id and revision; offline, the cached one.

    Every cached copy has one of the files ``roots``.

    Raises:
        HubError: the Hub cannot be reached and the cache is empty, it refuses, or it does not have the model.
    """
    _check_environment(location)
    from huggingface_hub import HfApi, constants

    if location.local_files_only or constants.HF_HUB_OFFLINE:
        return _cached_commit(location, roots)
    try:
        hub = HfApi(token=location.token)
        revision, piece = location.revision or "main", constants.HF_HUB_ETAG_TIMEOUT
        info = within(LONGEST_ANSWER, lambda: hub.model_info(location.text, revision=revision, timeout=piece))
        sha, names = info.sha, [sibling.rfilename for sibling in info.siblings or ()]
    except Exception as error:
        explained = explain(error, location)
        if not isinstance(explained, Unreachable):
            raise explained from error
        try:
            commit = _cached_commit(location, roots)
        except HubError:
            raise HubError(str(explained)) from error
        warn(f"{explained} Going on with the commit in the cache, {commit.sha}.")
        return commit
    if not isinstance(sha, str) or not _SHA.fullmatch(sha):
        raise HubError(f"{location.text}: the Hub answers with the commit {str(sha)[:80]!r}, not with that of a Hub.")
    for name in names:
        if not _is_inside(name):
            raise HubError(f"{location.text}: holds a file named {str(name)[:80]!r}, which is no name inside a folder.")
    return Commit(location, sha, frozenset(names), next((root for root in roots if root in names), roots[0]))


def _check_environment(location: Location) -> None:
    """Refuse environment variables with which the Hub library would fail on import."""
    wrong = [
        name
        for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")
        if not os.environ.get(name, "10").strip().isdecimal()
    ]
    try:
        _ = urlsplit(os.environ.get("HF_ENDPOINT", "")).port
    except ValueError:
        wrong.append("HF_ENDPOINT")
    for name in wrong:
        kind = "an address" if name == "HF_ENDPOINT" else "a number of seconds"
        raise HubError(f"{location.text}: {name}={os.environ[name][:80]!r} is not {kind}; correct or unset it.")


def _cached_commit(location: Location, roots: Sequence[str]) -> Commit:
    """Return the cached commit of the revision."""
    from huggingface_hub import try_to_load_from_cache

    revision = location.revision or "main"
    for root in roots:
        path = try_to_load_from_cache(location.text, root, cache_dir=location.cache_dir, revision=revision)
        if isinstance(path, str):
            return Commit(location, Path(path).parents[len(PurePosixPath(root).parts) - 1].name, None, root)
    raise HubError(
        f"{location.text} (revision {revision!r}): is not in the cache, and the Hub may not be asked "
        "(local_files_only or HF_HUB_OFFLINE). Load it once while online, or pass a folder."
    )


def _is_inside(name: Any) -> bool:
    """Return whether a file's name stays inside its folder, on any system."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name:
        return False
    return not PurePosixPath(name).is_absolute() and not PureWindowsPath(name).drive and ".." not in name.split("/")


class _NoBar(tqdm):
    """A progress bar that shows nothing; the library's global switch would affect other threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Return the result of ``ask``, unless it takes longer; socket timeouts only limit each piece of an answer.

    Raises:
        TimeoutError: it took longer.
        Exception: raised by ``ask``.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


class Unreachable(HubError):
    """The Hub did not answer."""


def explain(error: Exception, location: Location, file: str | None = None) -> HubError:
    """Return the message with a cure for an exception of the Hub library; raise other exceptions again."""
    from huggingface_hub import errors

    where = f"{location.text} (revision {location.revision or 'main'!r}{f', file {file}' if file else ''})"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"{where}: is gated. Accept its terms on its page on the Hub, then pass token=... or set HF_TOKEN."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{where}: there is no such revision. Leave revision out for the main branch.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"{where}: there is no such repository, or it is private. Check the spelling; for a private one "
            "pass token=... or set HF_TOKEN."
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return explain(error.__cause__, location, file)  # the library tried its cache afterwards
    if isinstance(error, errors.EntryNotFoundError):
        return HubError(f"{where}: the file is not there.")
    if status in (401, 403):
        return HubError(
            f"{where}: the Hub refuses access (HTTP {status}). Pass a token with read access, or set HF_TOKEN."
        )
    if status == 429:
        return HubError(
            f"{where}: the Hub asks to slow down (HTTP 429). Wait a little, or pass token=... for a higher limit."
        )
    if status is not None and status >= 400:
        kind = Unreachable if status >= 500 else HubError
        cure = "Try again later." if status >= 500 else "Check the name of the model, and HF_ENDPOINT."
        return kind(f"{where}: the Hub answered HTTP {status}. {cure}")
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{where}: is not a valid Hub id. Use 'owner/name'.")
    module = type(error).__module__
    if isinstance(error, ConnectionError | TimeoutError) or module.startswith(("httpx", "httpcore", "requests")):
        return Unreachable(
            f"{where}: no folder of that name is here, and the Hub cannot be reached ({type(error).__name__}). "
            "Check the spelling, the network and HF_ENDPOINT."
        )
    if isinstance(error, OSError):
        return HubError(
            f"{where}: could not be stored in the cache ({error}). Check the space and rights of cache_dir."
        )
    if isinstance(error, ValueError | LookupError | TypeError | AttributeError | AssertionError | RecursionError):
        return HubError(
            f"{where}: the answer is not that of a Hub ({type(error).__name__}). Log in to the network if it has a "
            "login page, and check HF_ENDPOINT."
        )
    raise error
