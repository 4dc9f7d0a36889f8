"""The model hub: one commit of a repository, file by file, with a clear message for whatever goes wrong.

``huggingface_hub`` is imported when first needed. It does the transport and keeps the cache, and obeys HF_ENDPOINT,
HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_HUB_DISABLE_PROGRESS_BARS.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from canvax.errors import CheckpointError, HubError, warn
from canvax.files import written
from canvax.weights.layout import INDEX, why_no_index


@dataclass(frozen=True)
class Repo:
    """A repository on the Hub, and how to reach it."""

    id: str
    revision: str
    token: str | bool | None
    cache_dir: str | Path | None
    progress: bool
    root: str = INDEX
    """A file that every copy has, and lies at the top."""

    def current(self, cached: bool) -> tuple[str, Collection[str] | None]:
        """The commit, from the cache alone if ``cached``, or if the Hub may not be asked at all."""
        return self.cached_commit() if cached or offline() else self.commit()

    def commit(self) -> tuple[str, Collection[str] | None]:
        """The commit sha of the revision, and the names of its files (None: unreachable, but cached)."""
        from huggingface_hub import HfApi
        from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

        try:
            hub = HfApi(token=self.token)
            info = hub.model_info(self.id, revision=self.revision, timeout=HF_HUB_ETAG_TIMEOUT)
        except Exception as error:
            explained = explain(error, self)
            if not isinstance(explained, Unreachable):
                raise explained from error
            try:
                sha, _ = self.cached_commit()
            except HubError:
                raise HubError(str(explained)) from error
            warn(f"{explained} Going on with the commit in the cache, {sha}.")
            return sha, None
        if not info.sha:
            raise HubError(f"{self.id}: the Hub named no commit for revision {self.revision!r}.")
        return info.sha, {sibling.rfilename for sibling in info.siblings or ()}

    def cached_commit(self) -> tuple[str, None]:
        """The commit of the revision that the cache holds."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.id, self.root, cache_dir=self.cache_dir, revision=self.revision)
        if not isinstance(path, str):
            raise HubError(
                f"{self.id} (revision {self.revision!r}): is not in the cache, and the Hub may not be asked "
                "(local_files_only or HF_HUB_OFFLINE). Load it once while online, or pass a folder."
            )
        return Path(path).parent.name, None

    def snapshot(self, sha: str) -> Path:
        """The folder in the cache that holds a commit."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.id, self.root, cache_dir=self.cache_dir, revision=sha)
        if not isinstance(path, str):
            raise HubError(f"{self.id}: {self.root} of commit {sha} has vanished from the cache. Load it again.")
        return Path(path).parent

    def remember(self, sha: str) -> None:
        """Note in the cache which commit the revision is, for later use offline; a read-only cache is left as it is."""
        ref = self.snapshot(sha).parent.parent / "refs" / self.revision
        if self.revision == sha or (ref.is_file() and ref.read_text() == sha):
            return
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            with written(ref) as temporary:
                temporary.write_text(sha)

    def fetch(self, name: str, sha: str, names: Collection[str]) -> Path:
        """One file of a commit, from the cache or the Hub."""
        from huggingface_hub import hf_hub_download

        if name not in names:
            if name == INDEX:
                raise CheckpointError(f"{self.id}: {why_no_index(names)}")
            raise CheckpointError(f"{self.id}: has no file {name} at commit {sha}. The repository is incomplete.")
        try:
            with _bars(self.progress):
                return Path(hf_hub_download(self.id, name, revision=sha, token=self.token, cache_dir=self.cache_dir))
        except Exception as error:
            raise HubError(str(explain(error, self, name))) from error


class Unreachable(HubError):
    """The Hub did not answer at all."""


def explain(error: Exception, repo: Repo, file: str | None = None) -> HubError:
    """A message with a cure for what the Hub library raised; other exceptions are raised again."""
    from huggingface_hub import errors

    what = f"{repo.id} (revision {repo.revision!r}{f', file {file}' if file else ''})"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return HubError(
            f"{what}: is gated. Accept its terms on its page on the Hub, then pass token=... or set HF_TOKEN."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{what}: there is no such revision. Leave revision out for the main branch.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(
            f"{what}: there is no such repository, or it is private. Check the spelling; for a private one "
            "pass token=... or set HF_TOKEN."
        )
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return explain(error.__cause__, repo, file)  # the library tried its cache after this
    if isinstance(error, errors.EntryNotFoundError):
        return HubError(f"{what}: the file is not there.")
    if status in (401, 403):
        return HubError(
            f"{what}: the Hub refuses access (HTTP {status}). Pass a token with read access, or set HF_TOKEN."
        )
    if status == 429:
        return HubError(
            f"{what}: the Hub asks to slow down (HTTP 429). Wait a little, or pass token=... for a higher limit."
        )
    if status is not None:
        kind = Unreachable if status >= 500 else HubError
        return kind(f"{what}: the Hub answered HTTP {status}. Try again later.")
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{what}: is not a valid Hub id. Use 'owner/name'.")
    module = type(error).__module__
    if isinstance(error, ConnectionError | TimeoutError) or module.startswith(("httpx", "httpcore", "requests")):
        return Unreachable(
            f"{what}: the Hub cannot be reached ({type(error).__name__}). Check the network and HF_ENDPOINT."
        )
    if isinstance(error, OSError):
        return HubError(f"{what}: could not be stored in the cache ({error}). Check the space and rights of cache_dir.")
    raise error


@contextmanager
def _bars(show: bool) -> Iterator[None]:
    """Silence the download bars, unless they are wanted or off already."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if show or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE
