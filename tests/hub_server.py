"""A Hub on loopback, enough of it for the real huggingface_hub client to download from and upload to.

    with HubServer({"owner/name": folder, "datasets/owner/rows": rows}) as hub:      # hub.url, hub.requests
        ...

A repository has one content, the same on each of its branches; its commit is a name for what its folder
holds. Uploads go into its folder; new repositories are made in `uploads`. `point_client_at` makes the client
of this process use it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from tests.waiting import PATIENCE


class HubServer:
    """Serves folders as repositories; every request's "METHOD path" is kept in `requests`, what was asked for
    new repositories in `created`, the path of each upload in `commits`, and how many bytes of each file were
    fetched in `served`. `fault(request, path)` may answer a GET or HEAD itself; then it is true.
    """

    def __init__(
        self, repos: dict[str, Path], branches: tuple[str, ...] = ("main",), uploads: Path | None = None
    ):
        self.repos, self.branches, self.uploads = repos, list(branches), uploads
        self.requests: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.served: dict[str, int] = {}
        self.commits: list[str] = []
        self.fault: Callable[[BaseHTTPRequestHandler, str], bool] | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server._answer(self)

            do_HEAD = do_GET

            def do_POST(self):
                server._take(self)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repo: str) -> dict[str, Path]:
        """What a repository holds, by path."""
        folder = self.repos[repo]
        return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}

    def commit(self, repo: str) -> str:
        """A name for what the folder holds now."""
        content = [(n, p.stat().st_size, p.stat().st_mtime_ns) for n, p in self.files(repo).items()]
        return hashlib.sha1(repr(content).encode()).hexdigest()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = self._path(request)
        if self.fault is not None and self.fault(request, path):
            return
        if path.startswith("/api/"):
            self._api(request, path)
            return
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if not self._known(request, repo, revision):
            return
        headers = {"X-Repo-Commit": self.commit(repo)}
        file = self.repos[repo] / name
        if not file.is_file():
            self._send(request, 404, b"", headers | {"X-Error-Code": "EntryNotFound"})
            return
        data = file.read_bytes()
        headers |= {"ETag": f'"{etag(name, data)}"'}
        status, asked = 200, re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range") or "")
        if asked:
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            headers |= {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            status, data = 206, data[first : last + 1]
        if request.command == "GET":
            self.served[f"{repo}/{name}"] = self.served.get(f"{repo}/{name}", 0) + len(data)
        self._send(request, status, data, headers)

    def _path(self, request: BaseHTTPRequestHandler) -> str:
        path = urllib.parse.unquote(request.path.partition("?")[0])
        self.requests.append(f"{request.command} {path}")
        return path

    def _api(self, request: BaseHTTPRequestHandler, path: str) -> None:
        repo, kind, revision = self._asked(path)
        if kind not in ("", "revision", "tree"):
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        elif self._known(request, repo, revision.partition("/")[0] or "main"):
            names = [{"rfilename": name, "size": f.stat().st_size} for name, f in self.files(repo).items()]
            info = {"id": repo.removeprefix("datasets/"), "sha": self.commit(repo), "siblings": names}
            below = revision.partition("/")[2]
            if below and not (self.repos[repo] / below).is_dir():
                self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            if kind == "tree":
                recursive = urllib.parse.urlparse(request.path).query.lower().find("recursive=true") >= 0
                self._json(request, self._tree(repo, below, recursive), repo)
            else:
                self._json(request, info, repo)

    def _asked(self, path: str) -> tuple[str, str, str]:
        """(repository, what of it, revision and path) of an address such as
        /api/datasets/owner/name/tree/main."""
        kind, owner, name, *rest = [*path.removeprefix("/api/").split("/"), "", ""]
        repo = f"{owner}/{name}" if kind == "models" else f"{kind}/{owner}/{name}"
        what, *where = [part for part in rest if part] or [""]
        return repo, what, "/".join(where)

    def _tree(self, repo: str, below: str, recursive: bool) -> list[dict[str, Any]]:
        """The files and folders below a path; without `recursive` those right below it."""
        top, start = self.repos[repo], below + "/" if below else ""
        found = []
        for path in sorted(top.rglob("*")):
            name = path.relative_to(top).as_posix()
            if name.startswith(start) and (recursive or "/" not in name[len(start) :]):
                kind = "directory" if path.is_dir() else "file"
                oid = hashlib.sha1(name.encode()).hexdigest()
                found.append({"type": kind, "path": name, "size": path.stat().st_size, "oid": oid})
        return found

    # ------------------------------------------------------------------------------------------ uploads
    def _take(self, request: BaseHTTPRequestHandler) -> None:
        path = self._path(request)
        lines = request.rfile.read(int(request.headers.get("Content-Length") or 0)).splitlines()
        if path == "/api/validate-yaml":
            self._json(request, {"errors": [], "warnings": []})
            return
        if path == "/api/repos/create":
            self._create(request, json.loads(lines[0]))
            return
        repo, kind, revision = self._asked(path)
        if kind == "branch" and repo in self.repos:
            self.branches.append(revision)
            self._json(request, {})
        elif not self._known(request, repo, revision.partition("/")[0]):
            return
        elif kind == "paths-info":
            asked = json.loads(lines[0])["paths"]
            self._json(
                request, [entry for entry in self._tree(repo, "", True) if entry["path"] in asked], repo
            )
        elif kind == "preupload":
            names = [file["path"] for file in json.loads(lines[0])["files"]]
            held = self.files(repo)
            oids = {name: git_oid(held[name].read_bytes()) for name in names if name in held}
            modes = [
                {"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": oids.get(name)}
                for name in names
            ]
            self._json(request, {"files": modes})
        elif kind == "commit":
            for line in map(json.loads, lines):
                if line["key"] == "file":
                    file = self.repos[repo] / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
                elif line["key"] == "deletedFile":
                    (self.repos[repo] / line["value"]["path"]).unlink()
            self.commits.append(path)
            sha = self.commit(repo)
            self._json(request, {"commitOid": sha, "commitUrl": f"{self.url}/{repo}/commit/{sha}"})
        else:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})

    def _create(self, request: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        self.created.append(asked)
        if self.uploads is None:
            self._json(request, {"error": "You don't have the rights to create a model here"}, status=403)
        elif repo in self.repos:
            self._json(request, {"error": "It exists", "url": f"{self.url}/{repo}"}, status=409)
        else:
            self.repos[repo] = self.uploads / repo
            self.repos[repo].mkdir(parents=True)
            self._json(request, {"url": f"{self.url}/{repo}"})

    def _json(
        self, request: BaseHTTPRequestHandler, answer: Any, repo: str | None = None, status: int = 200
    ) -> None:
        headers = {"Content-Type": "application/json"}
        if repo is not None:
            headers["X-Repo-Commit"] = self.commit(repo)
        self._send(request, status, json.dumps(answer).encode(), headers)

    def _known(self, request: BaseHTTPRequestHandler, repo: str, revision: str) -> bool:
        if repo not in self.repos:
            self._send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
            return False
        if revision not in (*self.branches, self.commit(repo)):
            self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            return False
        return True

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)


def etag(name: str, data: bytes) -> str:
    """The Hub's name for a content: git's for a text, for a large file its SHA-256."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return git_oid(data)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def point_client_at(monkeypatch, url: str, cache: Path, offline: bool = False) -> None:
    """What HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE do when they are set before the client is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    for kind in ("ETAG", "DOWNLOAD"):
        monkeypatch.setattr(constants, f"HF_HUB_{kind}_TIMEOUT", PATIENCE)
    # A server that is down is tried again for 23 seconds a file: not here.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
