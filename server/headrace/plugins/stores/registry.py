"""The distribution protocol of OCI registries: tags, manifests and blobs of one repository.

Every request is a plain one of the standard library: the protocol is a handful of them, and
digests tell whether an answer is right. A registry that wants to know who asks answers 401 with a
challenge, which is met once for each request: by the user's password, or by a token for it.

Credentials are those of `docker login`, `podman login` and `oras login`: their files, and the
programs that these name. They are sent to the registry and to the token server that it names, over
TLS unless the registry itself is without, and never to where a request is redirected.
"""

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urljoin, urlsplit
from urllib.request import Request, urlopen

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.remote import LONGEST_TEXT, Unreached, unreached
from headrace.repository.model_files import digest_of

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_ACCEPTED = (
    MANIFEST_TYPE, "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)  # fmt: skip
_MOST_BYTES = 16 << 20  # of an answer that is no blob
_TIMEOUT_SECS, _PUSH_SECS = 10.0, 120.0  # without a byte
_HELPER_SECS = 30.0
_DOCKER_HUB = "registry-1.docker.io"
_HUB_KEY = "https://index.docker.io/v1/"  # of Docker's files


class RegistryAnswer(NamedTuple):
    """The status, headers and body of an answer."""

    status: int
    headers: Message
    body: bytes


class RegistryLogin(NamedTuple):
    """A user's name and password; the password is an identity token if there is no name."""

    user: str
    secret: str

    @property
    def basic(self) -> str:
        """The value of the header `Authorization`."""
        text = f"{self.user}:{self.secret}".encode()
        return f"Basic {base64.b64encode(text).decode()}"


def find_credentials(host: str, environment: Mapping[str, str]) -> RegistryLogin | None:
    """The credentials for a registry in the files of Docker and Podman; raises `LoadFailed`."""
    keys = (_HUB_KEY,) if host == _DOCKER_HUB else (host, f"https://{host}", f"https://{host}/v2/")
    for file in _files(environment):
        try:
            told = json.loads(file.read_bytes())
            named = {**told.get("credHelpers", {}), **told.get("auths", {})}
            helpers = [
                told["credHelpers"][key] for key in keys if key in told.get("credHelpers", {})
            ]
            entries = [told["auths"][key] for key in keys if key in told.get("auths", {})]
        except OSError:
            continue
        except (ValueError, TypeError, AttributeError) as error:
            raise LoadFailed(f"{file}: it is no file of registries' credentials") from error
        if not helpers and told.get("credsStore") and any(key in named for key in keys):
            helpers = [told["credsStore"]]
        if helpers:
            return _helped(helpers[0], next(key for key in keys if key in named))
        for entry in entries:
            if entry.get("identitytoken"):
                return RegistryLogin("", entry["identitytoken"])
            try:
                text = base64.b64decode(entry["auth"], validate=True).decode()
            except (ValueError, TypeError, KeyError) as error:
                raise LoadFailed(f"{file}: expected credentials in base64 for {host}") from error
            user, _, secret = text.partition(":")
            return RegistryLogin(user, secret)
    return None


def _files(environment: Mapping[str, str]) -> Iterator[Path]:
    if own := environment.get("REGISTRY_AUTH_FILE"):
        yield Path(own)
    docker = environment.get("DOCKER_CONFIG") or f"{environment.get('HOME', '')}/.docker"
    yield Path(docker, "config.json")
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        yield Path(runtime, "containers", "auth.json")


def _helped(helper: str, key: str) -> RegistryLogin:
    """The credentials that a program tells, as Docker asks for them; raises `LoadFailed`."""
    program = f"docker-credential-{helper}"
    try:
        ran = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_SECS,
            check=True,
        )  # fmt: skip
        found = json.loads(ran.stdout)
        user, secret = str(found["Username"]), str(found["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError) as error:
        why = type(error).__name__  # its output may have secrets
        raise LoadFailed(f"{program} has told no credentials for {key}: {why}") from error
    return RegistryLogin("" if user == "<token>" else user, secret)


class Registry:
    """One repository of a registry. Methods are called on any threads, and raise `LoadFailed`."""

    def __init__(self, url: str, repository: str, address: str) -> None:
        """`url` is the registry's, without a path; `address` is for messages."""
        self._url, self._repository, self._address = url, repository, address
        self._authorization = ""

    def tags(self) -> list[str]:
        """The names of all tags."""
        found: list[str] = []
        path = "tags/list?n=1000"
        while path:
            answer = self._ask("GET", path, missing=True)
            if answer.status == 404:
                raise unreached(self._address, "there is no such repository")
            try:
                found += json.loads(answer.body)["tags"] or []
            except (ValueError, TypeError, KeyError):
                raise Unreached(f"{self._address}: its list of tags has no form") from None
            more = re.match(r'<([^>]+)>;\s*rel="?next', answer.headers.get("Link", ""))
            path = urljoin(self._at(path), more[1]) if more else ""
        return found

    def digest(self, reference: str) -> str:
        """The digest of the manifest with a tag or digest; "" if the registry does not tell."""
        headers = {"Accept": ", ".join(_ACCEPTED)}
        answer = self._ask("HEAD", f"manifests/{reference}", headers)
        return answer.headers.get("Docker-Content-Digest", "")

    def manifest(self, reference: str) -> tuple[str, bytes]:
        """The manifest with a tag or digest, and its digest."""
        headers = {"Accept": ", ".join(_ACCEPTED)}
        answer = self._ask("GET", f"manifests/{reference}", headers)
        digest = digest_of(answer.body)
        told = answer.headers.get("Docker-Content-Digest", digest)
        if digest != (reference if reference.startswith("sha256:") else told):
            raise LoadFailed(f"{self._address}: the manifest {reference} has another digest")
        return digest, answer.body

    def read(self, digest: str, start: int, stop: int) -> bytes:
        """Bytes of a blob."""
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        answer = self._ask("GET", f"blobs/{digest}", headers, most=stop - start)
        if answer.status != 206 and start:
            raise LoadFailed(f"{self._address}: the registry does not answer with parts of blobs")
        return answer.body

    def push(self, digest: str, size: int, content: IO[bytes]) -> None:
        """Write a blob, unless it is there."""
        if self._ask("HEAD", f"blobs/{digest}", missing=True).status == 200:
            return
        begun = self._ask("POST", "blobs/uploads/", {"Content-Length": "0"})
        place = urljoin(self._at("blobs/uploads/"), begun.headers.get("Location", ""))
        place += f"{'&' if urlsplit(place).query else '?'}digest={quote(digest)}"
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        self._ask("PUT", place, headers, content)

    def tag(self, reference: str, manifest: bytes) -> None:
        """Give a manifest a tag, in one step."""
        self._ask("PUT", f"manifests/{reference}", {"Content-Type": MANIFEST_TYPE}, manifest)

    # --- requests

    def _at(self, path: str) -> str:
        """The URL of a path of the repository, or of a URL."""
        return path if "://" in path else f"{self._url}/v2/{self._repository}/{path}"

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None,
        body: bytes | IO[bytes] | None = None, missing: bool = False, most: int = _MOST_BYTES,
    ) -> RegistryAnswer:  # fmt: skip
        """The answer to a request, of at most `most` bytes; 404 is an answer if it is `missing`."""
        answer = self._sent(method, self._at(path), headers or {}, body, most)
        if answer.status == 401:
            self._authorization = self._meet(answer.headers.get("WWW-Authenticate", ""))
            if body is not None and not isinstance(body, bytes):
                body.seek(0)
            answer = self._sent(method, self._at(path), headers or {}, body, most)
        if answer.status < 300 or (missing and answer.status == 404):
            return answer
        if answer.status == 404:
            raise LoadFailed(f"{self._address}: {path} is not there")
        raise unreached(self._address, _reason_of(answer))

    def _sent(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None,
        most: int,
    ) -> RegistryAnswer:  # fmt: skip
        if urlsplit(url).scheme not in ("http", "https"):
            raise LoadFailed(
                f"{self._address}: the registry names the place {url.partition('?')[0]}"
            )
        request = Request(url, data=body, headers=dict(headers), method=method)
        if self._authorization and urlsplit(url).netloc == urlsplit(self._url).netloc:
            request.add_unredirected_header("Authorization", self._authorization)
        return self._exchanged(request, most)

    def _exchanged(self, request: Request, most: int = _MOST_BYTES) -> RegistryAnswer:
        head = request.get_method() == "HEAD"  # without a body, also where it is redirected
        try:
            with urlopen(request, timeout=_PUSH_SECS if request.data else _TIMEOUT_SECS) as found:
                return RegistryAnswer(
                    found.status, found.headers, b"" if head else found.read(most)
                )
        except HTTPError as error:
            with error:
                content = b"" if head else error.read(_MOST_BYTES)
                return RegistryAnswer(error.code, error.headers, content)
        except (OSError, HTTPException) as error:
            raise unreached(self._address, getattr(error, "reason", error)) from error

    def _meet(self, challenge: str) -> str:
        """The value of `Authorization` that a challenge wants; raises `LoadFailed`."""
        known = find_credentials(urlsplit(self._url).netloc, os.environ)
        kind, _, rest = challenge.partition(" ")
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if kind.lower() == "bearer" and "realm" in wanted:
            return f"Bearer {self._token(wanted, known)}"
        if kind.lower() == "basic" and known is not None:
            return known.basic
        why = "and there are none" if known is None else f"by {challenge[:LONGEST_TEXT]!r}"
        raise unreached(self._address, f"it wants credentials, {why}")

    def _token(self, wanted: Mapping[str, str], known: RegistryLogin | None) -> str:
        realm = urlsplit(wanted["realm"])
        if realm.scheme != "https" and self._url.startswith("https:"):
            raise unreached(self._address, "its token server has no TLS")
        asked = {name: wanted[name] for name in ("service", "scope") if name in wanted}
        request = Request(f"{realm.geturl()}?{urlencode(asked)}")
        if known is not None and known.user:
            request.add_unredirected_header("Authorization", known.basic)
        elif known is not None:
            more = {"grant_type": "refresh_token", "refresh_token": known.secret,
                    "client_id": "headrace"}  # fmt: skip
            request = Request(realm.geturl(), data=urlencode(asked | more).encode())
        answer = self._exchanged(request)
        try:
            found: Any = json.loads(answer.body)
            return str(found.get("token") or found["access_token"])
        except (ValueError, KeyError, AttributeError):
            why = f"its token server answers {answer.status}"
            raise unreached(self._address, why) from None


def _reason_of(answer: RegistryAnswer) -> str:
    """The reason that a registry gives for an error."""
    try:
        first = json.loads(answer.body)["errors"][0]
        return f"{first['code']}: {first['message']}"[:LONGEST_TEXT]
    except (ValueError, TypeError, KeyError, IndexError):
        return f"it answers {answer.status}"
