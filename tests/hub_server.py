"""A Hub on loopback, enough of it for the real huggingface_hub client to download from.

    with HubServer({"owner/name": folder}) as hub:      # hub.url, hub.requests
        ...

A repository has the branch `main` and one commit; `point_client_at` makes the client of this process use it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from huggingface_hub import constants


class HubServer:
    """Serves folders as repositories; every request's "METHOD path" is kept in `requests`."""

    def __init__(self, repos: dict[str, Path], branches: tuple[str, ...] = ("main",)):
        self.repos, self.branches, self.requests = repos, branches, []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                server._answer(self)

            do_HEAD = do_GET

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

    def commit(self, repo: str) -> str:
        """A name for what the folder holds now."""
        content = [
            (p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(self.repos[repo].iterdir())
        ]
        return hashlib.sha1(repr(content).encode()).hexdigest()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = urllib.parse.unquote(request.path.partition("?")[0])
        self.requests.append(f"{request.command} {path}")
        if path.startswith("/api/models/"):
            self._api(request, path.removeprefix("/api/models/"))
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
        self._send(request, 200, data, headers | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _api(self, request: BaseHTTPRequestHandler, path: str) -> None:
        for kind in ("/revision/", "/tree/"):
            if kind not in path:
                continue
            repo, _, revision = path.partition(kind)
            if not self._known(request, repo, revision):
                return
            files = sorted(p for p in self.repos[repo].iterdir() if p.is_file())
            if kind == "/revision/":
                names = [{"rfilename": p.name} for p in files]
                answer: object = {"id": repo, "sha": self.commit(repo), "siblings": names}
            else:
                answer = [
                    {
                        "type": "file",
                        "path": p.name,
                        "size": p.stat().st_size,
                        "oid": hashlib.sha1(p.read_bytes()).hexdigest(),
                    }
                    for p in files
                ]
            headers = {"Content-Type": "application/json", "X-Repo-Commit": self.commit(repo)}
            self._send(request, 200, json.dumps(answer).encode(), headers)
            return
        self._send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})

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
        if request.command == "GET":
            request.wfile.write(data)


def point_client_at(monkeypatch, url: str, cache: Path, offline: bool = False) -> None:
    """What HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE do when they are set before the client is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    # A server that is down is tried again for 23 seconds a file: not here.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
