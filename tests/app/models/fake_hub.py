"""A small HTTP server that speaks the Hugging Face hub's protocol as far as Fireside asks it, and misbehaves on demand.

huggingface_hub is led here by HF_ENDPOINT (`environment`), or inside one process by `led_here`.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

LARGE_BYTES = 1000  # files above are "LFS": known by their sha256, served by a redirect
_PIECE_BYTES = 1 << 16


@dataclass
class FakeHub:
    """
    files      repo -> name -> content
    commits    repo -> the commit that main means; a listing is of the files as they are now
    gated      repos whose files are refused with 401 unless the request brings `token`
    cards      repo -> what a search says of it: tags, downloads, config, safetensors, ...

    Faults:
    cut_after      bytes after which the connection is dropped, once for each entry, for large files
    failures       requests for files that are answered with `failure` before one is served
    corrupt        names that are served with one byte changed; a number says how often still
    ignores_range  the whole file comes, with 200, whatever was asked
    changes_etag   every answer has another ETag
    tells_no_hash  the listing knows no sha256 and no blob id, nor does the tree
    tells_in_tree  sizes and hashes are in the tree alone
    pause_s        between two pieces of 64 KB

    served     (name, first byte asked for) of every file request that was answered
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_a-token-of-the-tests"
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    failures: int = 0
    failure: int = 503
    corrupt: dict[str, int] = field(default_factory=dict)
    ignores_range: bool = False
    changes_etag: bool = False
    tells_no_hash: bool = False
    tells_in_tree: bool = False
    pause_s: float = 0.0
    served: list[tuple[str, int]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to take this for the hub."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1"}

    def served_from(self, name: str) -> list[int]:
        """First bytes asked for, one for each request of this file."""
        return [first for served, first in self.served if served == name]

    def listing(self, repo: str) -> dict[str, object]:
        siblings = [self._sibling(name, content) for name, content in self.files[repo].items()]
        card = self.cards.get(repo, {})
        return {"id": repo, "modelId": repo, "sha": self.commits[repo], "siblings": siblings, **card}

    def _sibling(self, name: str, content: bytes) -> dict[str, object]:
        found: dict[str, object] = {"rfilename": name}
        if self.tells_in_tree:
            return found
        found["size"] = len(content)
        if self.tells_no_hash:
            return found
        found["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if len(content) > LARGE_BYTES:
            sha256 = hashlib.sha256(content).hexdigest()
            found["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 135}
        return found

    def tree(self, repo: str) -> list[dict[str, object]]:
        items: list[dict[str, object]] = [{"type": "directory", "path": "onnx", "oid": "0" * 40, "size": 0}]
        for name, content in self.files[repo].items():
            item: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": ""}
            if not self.tells_no_hash:
                item["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                if len(content) > LARGE_BYTES:
                    item["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 135}
            items.append(item)
        return items

    def found(self, query: dict[str, list[str]]) -> list[dict[str, object]]:
        """What a search for these words and tags lists."""
        words, tags = " ".join(query.get("search", [])).casefold(), query.get("filter", [])
        hits = [
            {"id": repo, "modelId": repo, **card}
            for repo, card in self.cards.items()
            if words in repo.casefold() and set(tags) <= set(card.get("tags", ()))
        ]
        return hits[: int(query.get("limit", ["100"])[0])]


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def led_here(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, and those that it starts, take `hub` for the hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.hub.requests.append(self.path)
        parts = urlsplit(self.path)
        if parts.path == "/api/models":
            self._answer_json(self.hub.found(parse_qs(parts.query)))
        elif tree := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", parts.path):
            self._answer_json(self.hub.tree(tree[1]))
        elif api := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", parts.path):
            self._list(api[1], api[2])
        elif stored := re.fullmatch(r"(/cdn)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", parts.path):
            self._file(stored[2], stored[4], is_redirected=bool(stored[1]))
        else:
            self._refuse(404, "EntryNotFound")

    def _list(self, repo: str, revision: str | None) -> None:
        if repo not in self.hub.files:
            self._refuse(401, "RepoNotFound")
        elif revision not in (None, "main", self.hub.commits[repo]):
            self._refuse(404, "RevisionNotFound")
        else:
            self._answer_json(self.hub.listing(repo))

    def _file(self, repo: str, name: str, is_redirected: bool) -> None:
        content = self.hub.files[repo].get(name)
        if self.hub.failures:
            self.hub.failures -= 1
            self._refuse(self.hub.failure, "")
        elif repo in self.hub.gated and not is_redirected and not self._brings_token():
            self._refuse(401, "GatedRepo")
        elif content is None:
            self._refuse(404, "EntryNotFound")
        elif len(content) > LARGE_BYTES and not is_redirected:
            self._answer(302, b"", {"Location": f"{self.hub.url}/cdn{self.path}", **self._about(repo, content)})
        else:
            self._send_file(repo, name, content)

    def _brings_token(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {self.hub.token}"

    def _about(self, repo: str, content: bytes) -> dict[str, str]:
        etag = hashlib.sha256(content).hexdigest()
        about = {"X-Repo-Commit": self.hub.commits[repo], "X-Linked-Size": str(len(content)), "X-Linked-Etag": etag}
        return about | {"ETag": f'"{time.monotonic_ns() if self.hub.changes_etag else etag}"'}

    def _send_file(self, repo: str, name: str, content: bytes) -> None:
        first, last = self._range(len(content))
        self.hub.served.append((name, first))
        headers = {"Accept-Ranges": "bytes", **self._about(repo, content)}
        if self.hub.ignores_range:
            status, first, last = 200, 0, len(content)
        else:
            status = 206 if content else 200
            headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(content)}"
        body = self._spoilt(name, content[first:last])
        cut = self.hub.cut_after.pop(0) if len(content) > LARGE_BYTES and self.hub.cut_after else None
        self._answer(status, body, headers, cut)

    def _range(self, num_bytes: int) -> tuple[int, int]:
        first, _, last = (self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")
        return int(first), min(int(last) + 1 if last else num_bytes, num_bytes)

    def _spoilt(self, name: str, body: bytes) -> bytes:
        if not self.hub.corrupt.get(name) or not body:
            return body
        self.hub.corrupt[name] -= 1
        return body[:-1] + bytes([body[-1] ^ 1])

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer_json(self, found: object) -> None:
        self._answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self._write(body[:cut])
        except OSError:  # who asked is gone
            self.close_connection = True
        if cut is not None:
            self.close_connection = True

    def _write(self, body: bytes) -> None:
        if not self.hub.pause_s:
            self.wfile.write(body)
        else:
            for first in range(0, len(body), _PIECE_BYTES):
                self.wfile.write(body[first : first + _PIECE_BYTES])
                time.sleep(self.hub.pause_s)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass
