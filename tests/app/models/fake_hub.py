"""A small HTTP server that speaks as much of the Hugging Face hub's protocol as a download needs, and can misbehave."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LARGE_BYTES = 1000  # files above are "LFS": known by their sha256, served by a redirect


@dataclass
class FakeHub:
    """
    files      repo -> name -> content
    commits    repo -> the commit that main means; a listing is of the files as they are now
    gated      repos whose files are refused with 401
    cut_after  bytes after which the connection is dropped, once for each entry, for large files
    failures   requests for files that are answered with 503 before one is served
    corrupt    names that are served with one byte changed
    served     (name, first byte asked for) of every file request that was answered
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut_after: list[int] = field(default_factory=list)
    failures: int = 0
    corrupt: set[str] = field(default_factory=set)
    served: list[tuple[str, int]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def listing(self, repo: str) -> dict[str, object]:
        def sibling(name: str, content: bytes) -> dict[str, object]:
            blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            found: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob_id}
            if len(content) > LARGE_BYTES:
                sha256 = hashlib.sha256(content).hexdigest()
                found["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 135}
            return found

        siblings = [sibling(name, content) for name, content in self.files[repo].items()]
        return {"id": repo, "modelId": repo, "sha": self.commits[repo], "siblings": siblings}


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.hub.requests.append(self.path)
        path = self.path.partition("?")[0]
        if api := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._list(api[1], api[2])
        elif stored := re.fullmatch(r"(/cdn)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(stored[2], stored[4], is_redirected=bool(stored[1]))
        else:
            self._refuse(404, "EntryNotFound")

    def _list(self, repo: str, revision: str | None) -> None:
        if repo not in self.hub.files:
            self._refuse(401, "RepoNotFound")
        elif revision not in (None, "main", self.hub.commits[repo]):
            self._refuse(404, "RevisionNotFound")
        else:
            self._answer(200, json.dumps(self.hub.listing(repo)).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, name: str, is_redirected: bool) -> None:
        content = self.hub.files[repo][name]
        if self.hub.failures:
            self.hub.failures -= 1
            self._refuse(503, "")
        elif repo in self.hub.gated:
            self._refuse(401, "GatedRepo")
        elif len(content) > LARGE_BYTES and not is_redirected:
            self._answer(302, b"", {"Location": f"{self.hub.url}/cdn{self.path}"})
        else:
            self._send_file(name, content)

    def _send_file(self, name: str, content: bytes) -> None:
        first = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.hub.served.append((name, first))
        body = content[first:]
        if name in self.hub.corrupt:
            body = body[:-1] + bytes([body[-1] ^ 1])
        headers = {"ETag": '"e"', "X-Repo-Commit": "c", "Content-Range": f"bytes {first}-{len(content)}/{len(content)}"}
        cut = self.hub.cut_after.pop(0) if len(content) > LARGE_BYTES and self.hub.cut_after else None
        self._answer(206, body, headers, cut)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass
