"""A model hub on 127.0.0.1: as much of the Hub's HTTP interface as ``huggingface_hub`` uses to fetch files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """One model: commits by sha, branches by name, who may read it, and what a proxy makes of it.

    Attributes:
        info: sent in place of its description.
        etags: for each file, sent in place of its hash: the first time it is asked for, the second, ...
        contents: for each file, sent in place of its content.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False
    info: bytes | None = None
    etags: dict[str, list[str]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        """Add a commit and point a branch at it; returns the sha."""
        text = f"{branch} {len(self.commits)} {sorted(files)}"
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        """The sha of a branch or commit."""
        return revision if revision in self.commits else self.branches.get(revision)


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class HubImitation:
    """Serves repositories until the ``with`` block ends, and records every request."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.after_info: Callable[[], object] | None = None
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def put(self, name: str, files: dict[str, bytes], **more: Any) -> str:
        """A new repository of one commit; returns its sha."""
        self.repositories[name] = Repository(**more)
        return self.repositories[name].commit("main", files)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        small = [path.partition("/resolve/") for method, path in self.requests if method == "GET"]
        large = [path.removeprefix("/storage/").split("/", 3)[3] for _, path in self.requests if "/storage/" in path]
        return sorted([*large, *(rest.split("/", 1)[1] for _, found, rest in small if found)])

    def revisions_used(self) -> set[str]:
        """The revisions by which files were asked for."""
        return {path.split("/resolve/")[1].split("/", 1)[0] for _, path in self.requests if "/resolve/" in path}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubImitation
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if path.startswith("/api/models/") and "/tree/" in path:
            name, _, revision = path.removeprefix("/api/models/").partition("/tree/")
            self._tree(name, revision)
        elif path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self._info(name, revision or "main")
        elif "/resolve/" in path:
            name, _, rest = path.lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._file(name, revision, file)
        elif path.startswith("/storage/"):
            owner, model, sha, file = path.removeprefix("/storage/").split("/", 3)
            self._send(200, self._content(f"{owner}/{model}", sha, file))
        else:
            self._send(404, b"{}")

    def _repository(self, name: str, *, content: bool) -> Repository | None:
        """The repository, or None after an error has been sent."""
        repository = self.hub.repositories.get(name)
        allowed = repository and self.headers.get("Authorization") == f"Bearer {repository.token}"
        if repository is None or (repository.token and not repository.gated and not allowed):
            self._send(401 if repository else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repository.gated and content and not allowed:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            return repository
        return None

    def _info(self, name: str, revision: str) -> None:
        repository = self._repository(name, content=False)
        if repository is None:
            return
        sha = repository.resolve(revision)
        if sha is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": file} for file in sorted(repository.commits[sha])]
        info = {"id": name, "modelId": name, "sha": sha, "private": False, "siblings": siblings, "tags": []}
        body = json.dumps(info).encode() if repository.info is None else repository.info
        self._send(200, body, {"Content-Type": "application/json"})
        if self.hub.after_info:
            self.hub.after_info()

    def _tree(self, name: str, sha: str) -> None:
        repository = self._repository(name, content=False)
        if repository is None:
            return
        files = [
            {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for file, data in sorted(repository.commits[sha].items())
        ]
        self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})

    def _content(self, name: str, sha: str, file: str) -> bytes:
        repository = self.hub.repositories[name]
        return repository.contents.get(file, repository.commits[sha][file])

    def _file(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name, content=True)
        if repository is None:
            return
        sha = repository.resolve(revision)
        files = repository.commits.get(sha or "")
        if files is None or file not in files:
            code = "RevisionNotFound" if files is None else "EntryNotFound"
            self._send(404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": sha or ""})
            return
        data = self._content(name, sha or "", file)
        planned = repository.etags.get(file)
        etag = planned.pop(0) if planned else hashlib.sha256(files[file]).hexdigest()
        headers = {"X-Repo-Commit": sha or "", "ETag": f'"{etag}"'}
        if file.endswith((".safetensors", ".msgpack", ".bin")):  # what the Hub keeps in large-file storage, elsewhere
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            location = f"{self.hub.url.replace('127.0.0.1', 'localhost')}/storage/{name}/{sha}/{file}"
            self._send(302, b"", {**headers, "Location": location})
        else:
            self._send(200, data, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
