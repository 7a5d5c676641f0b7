"""A server of the endpoints of the Hugging Face Hub that its library uses to list and read files.

The Hub itself is no package: paths, fields and headers are those of its documentation.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.stub_server import StubRequest, StubResponse, StubServer

TOKEN = "hf_a-token-that-nobody-may-see"
_LARGE = 1000  # bytes from which a file is one of LFS
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class HubServer(StubServer):
    """Repositories by name and revision; those in `private` want the token.

    Large files are read by a redirect to another host name. `asked` are paths with the tokens and
    ranges of requests so far.
    """

    def __init__(self) -> None:
        super().__init__(self._respond)
        self.private: set[str] = set()
        self.asked: list[tuple[str, str, str]] = []
        self._commits: dict[tuple[str, str], Mapping[str, bytes]] = {}
        self._revisions: dict[tuple[str, str], str] = {}

    def commit(self, name: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Make these the files of a revision; returns the commit."""
        text = json.dumps([(path, _sha(files[path])) for path in sorted(files)])
        commit = hashlib.sha1(f"{name} {text}".encode()).hexdigest()
        self._commits[name, commit] = dict(files)
        self._revisions[name, revision] = self._revisions[name, commit] = commit
        return commit

    def _respond(self, request: StubRequest) -> StubResponse:
        path, headers = unquote(urlsplit(request.path).path), request.headers
        token, where = headers.get("Authorization", ""), headers.get("Range", "")
        self.asked.append((path, token, where))
        parts = path.strip("/").split("/")
        if parts[0] == "lfs":
            content = self._commits["/".join(parts[1:3]), parts[3]]["/".join(parts[4:])]
            return _part(content, where)
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if name in self.private and token != f"Bearer {TOKEN}":
            return 401, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}'
        if parts[:2] == ["api", "models"]:
            revision = parts[5] if len(parts) > 5 else "main"
            if (commit := self._revisions.get((name, revision))) is None:
                return 404, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}'
            files = self._commits[name, commit]
            told = {"id": name, "sha": commit, "siblings": [_told(p, files[p]) for p in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()
        commit, own = self._revisions[name, parts[3]], "/".join(parts[4:])
        content = self._commits[name, commit][own]
        if len(content) >= _LARGE:
            other = self.url.replace("127.0.0.1", "localhost")
            return 302, {"Location": f"{other}/lfs/{name}/{commit}/{own}?sig=secret"}, b""
        return _part(content, where)


def _part(content: bytes, where: str) -> StubResponse:
    found = _RANGE.fullmatch(where)
    if found is None:
        return 200, {}, content
    start, stop = int(found[1]), int(found[2]) + 1
    told = f"bytes {start}-{stop - 1}/{len(content)}"
    return 206, {"Content-Range": told}, content[start:stop]


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _told(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
    found: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
    if len(content) >= _LARGE:
        lfs = {"sha256": _sha(content), "size": len(content), "pointerSize": 130}
        found["lfs"] = lfs
    return found
