"""Object stores: `s3://BUCKET/PREFIX`, `gs://…`, `az://…`, and Triton's forms of these addresses.

One listing of everything under the prefix tells all models and their states: names, sizes and tags
of objects. The library is obstore: its requests release the GIL, are tried again by itself, and
need no event loop.

Credentials are those of the vendors' own tools: environment variables, files, and the identity of
the machine or pod. What the library does not read by itself is read here: profiles of AWS.
"""

import base64
import configparser
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.remote import (
    LONGEST_TEXT,
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    first_line,
    needed,
    unreached,
)
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.model_files import MANIFEST, parse_manifest
from headrace.repository.store import Store, StoreOptions

_HOST = re.compile(r"(https?://)?([^/:]+:\d+)/(.+)")  # Triton's s3://https://HOST:PORT/BUCKET/…
_FRESH_SECS = 60.0  # after a change, in which more may follow
_CODE = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
# What AWS' libraries look for, one of which the library of object stores finds, too.
_FOUND_BY_ITSELF = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
# Short, since parts are tried again, and stores are asked again, by what uses them.
TIMEOUTS = {"connect_timeout": "3s", "timeout": "120s"}
RETRIES: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}


class ObjectPlace(NamedTuple):
    """Parts of an address: kind of store, endpoint or account, bucket or container, prefix."""

    kind: str
    host: str
    bucket: str
    prefix: str


def read_address(address: str) -> ObjectPlace:
    """The parts of an address; raises `LoadFailed`.

    The host is an endpoint for `s3`, an account for `as`, "" for that of the environment.
    """
    scheme, _, rest = address.partition("://")
    host = ""
    if scheme == "s3" and (found := _HOST.fullmatch(rest)):
        host, rest = (found[1] or "http://") + found[2], found[3]
    elif scheme == "as":
        host, _, rest = rest.partition("/")
        host = host.partition(".")[0]  # ACCOUNT.blob.core.windows.net
    bucket, _, prefix = rest.partition("/")
    if not bucket or (scheme == "as" and not host):
        form = "as://ACCOUNT/CONTAINER/PREFIX" if scheme == "as" else f"{scheme}://BUCKET/PREFIX"
        form += ", or s3://https://HOST:PORT/BUCKET/PREFIX" if scheme == "s3" else ""
        raise LoadFailed(f"{address}: expected {form}")
    return ObjectPlace("az" if scheme == "as" else scheme, host, bucket, prefix.strip("/"))


def aws_profile(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of the profile in use in AWS' files, under their names; empty without any.

    Raises `LoadFailed` for a named profile that they do not have.
    """
    home = environment.get("HOME", "")
    files = [
        Path(environment.get("AWS_CONFIG_FILE") or f"{home}/.aws/config"),
        Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/.aws/credentials"),
    ]
    name = environment.get("AWS_PROFILE", "")
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise LoadFailed(f"{file}: it is no file of profiles") from error
        for section in (f"profile {name}", name) if name else ("default",):
            if parser.has_section(section):
                found |= parser[section]
    if name and not found:
        raise LoadFailed(
            f"AWS_PROFILE: there is no profile {name} in {' or '.join(map(str, files))}"
        )
    return found


def s3_options(host: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of the library for S3; raises `LoadFailed`."""
    profile = aws_profile(environment)
    given: dict[str, Any] = {}
    named = (environment.get(n, "") for n in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    endpoint = host or next(filter(None, named), "") or profile.get("endpoint_url", "")
    if endpoint:
        given["endpoint"] = endpoint
    if endpoint.startswith("http://"):
        given["client_options"] = {"allow_http": True}
    if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environment.keys():
        given["region"] = profile.get("region", "us-east-1")
    if any(environment.get(name) for name in _FOUND_BY_ITSELF):
        return given
    if {"aws_access_key_id", "aws_secret_access_key"} <= profile.keys():
        names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
                 "aws_session_token": "session_token"}  # fmt: skip
        given |= {own: profile[name] for name, own in names.items() if name in profile}
    elif any(name.startswith(("sso_", "role_arn", "credential_process")) for name in profile):
        with needed("profiles of AWS that log in by SSO, a role or a process", "boto3"):
            from obstore.auth.boto3 import Boto3CredentialProvider
        given["credential_provider"] = Boto3CredentialProvider()
    return given


def azure_options(account: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of the library for Azure, also by the variables that Triton reads."""
    names = {"account_name": "AZURE_STORAGE_ACCOUNT", "account_key": "AZURE_STORAGE_KEY"}
    given: dict[str, Any] = {
        own: environment[name] for own, name in names.items() if environment.get(name)
    }
    if account:
        given["account_name"] = account
    if environment.get("AZURE_STORAGE_ENDPOINT", "").startswith("http://"):
        given["client_options"] = {"allow_http": True}
    return given


def gcs_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of the library for Google's store: those of an emulator, if one is named."""
    host = environment.get("STORAGE_EMULATOR_HOST", "")
    if not host:
        return {}
    url = host if "://" in host else f"http://{host}"
    nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account = json.dumps({"gcs_base_url": url, "disable_oauth": True, **nobody})
    given: dict[str, Any] = {"service_account_key": account, "credential_provider": _anybody}
    return given | ({"client_options": {"allow_http": True}} if url.startswith("http://") else {})


def _anybody() -> dict[str, Any]:
    """A token for emulators, some of which fail at the empty one that the library sends."""
    return {"token": "anybody", "expires_at": None}


def library() -> Any:
    """The module obstore; raises `LoadFailed`."""
    with needed("object stores", "obstore: headrace[objects]"):
        import obstore.store
    return obstore


def _opened(place: ObjectPlace) -> Any:
    """The store of the library; raises `LoadFailed`."""
    found = library().store
    stores = {"s3": found.S3Store, "gs": found.GCSStore, "az": found.AzureStore}
    if place.kind == "s3":
        given = s3_options(place.host, os.environ)
    elif place.kind == "az":
        given = azure_options(place.host, os.environ)
    else:
        given = gcs_options(os.environ)
    client = TIMEOUTS | given.pop("client_options", {})
    return stores[place.kind](
        place.bucket, prefix=place.prefix or None, client_options=client, retry_config=RETRIES,
        **given,
    )  # fmt: skip


def opened_site(address: str, last: bool = True) -> tuple[str, Any]:
    """An address without secrets, and the library's store at it, or without its `last` part.

    Connects to nothing; raises `LoadFailed`.
    """
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    shown = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
    if not host or parts.query or parts.fragment:
        raise LoadFailed(f"{shown}: expected https://HOST/PATH/, without a query")
    client: dict[str, Any] = dict(TIMEOUTS)
    if parts.scheme == "http":
        client["allow_http"] = True
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        basic = f"Basic {base64.b64encode(secret).decode()}"
        client["default_headers"] = {"authorization": basic}
    with library_errors(shown):
        url = shown if last else shown.rpartition("/")[0]
        stores = library().store
        return shown, stores.HTTPStore.from_url(url, client_options=client, retry_config=RETRIES)


class ObjectRemote(Remote):
    """Models in a bucket, below a prefix, or the one model that the prefix itself is."""

    def __init__(self, address: str) -> None:
        """Connects to nothing; raises `LoadFailed`."""
        self.address = address
        place = read_address(address)
        self._own_name = (place.prefix or place.bucket).rpartition("/")[2]
        self._library = library()
        with library_errors(self.address):
            self._store = _opened(place)
        self._alone = False  # the prefix is a model itself

    def models(self) -> Mapping[str, ModelState]:
        """Implements `Remote.models`."""
        found: dict[str, dict[str, RemoteFile]] = {}
        for path, file, _ in self._objects(""):
            name, _, below = path.partition("/")
            found.setdefault(name if below else "", {})[below or path] = file
        own = found.pop("", {})
        self._alone = bool({"config.pbtxt", MANIFEST} & own.keys()) or any(
            name.isdecimal() for name in found
        )
        if self._alone:
            for name, files in found.items():
                own |= {f"{name}/{path}": file for path, file in files.items()}
            found = {self._own_name: own}
        listed = {
            name: _without_marks(files) for name, files in found.items() if not name.startswith(".")
        }
        return {name: ModelState.of(files) for name, files in listed.items()}

    def contents(self, name: str) -> RemoteContents:
        """Implements `Remote.contents`."""
        files: dict[str, RemoteFile] = {}
        last = 0.0
        for path, file, changed in self._objects(self._key(name, "")):
            files[path] = file
            last = max(last, changed)
        if not files:
            raise self.not_there(name)
        fresh = abs(datetime.now(UTC).timestamp() - last) < _FRESH_SECS
        return self.contents_of(name, _without_marks(files), fresh=fresh)

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Implements `Remote.read`."""
        key = self._key(name, path)
        with library_errors(self.address):
            given = {"range": (start, stop), "if_match": file.tag}
            return bytes(self._library.get(self._store, key, options=given).bytes())

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Implements `Remote.publish`: the manifest is last, then what is left goes."""
        with library_errors(self.address):
            before = {path: file for path, file, _ in self._objects(self._key(name, ""))}
            known: Mapping[str, str] = {}
            if (file := before.get(MANIFEST)) is not None:
                with suppress(LoadFailed):  # for one without a form: it is replaced
                    known = parse_manifest(self.read(name, MANIFEST, file, 0, file.size))
            wanted = parse_manifest(manifest)
            for path, digest in wanted.items():
                if path not in before or known.get(path) != digest:
                    self._library.put(self._store, self._key(name, path), directory / path)
            self._library.put(self._store, self._key(name, MANIFEST), manifest)
            left = [self._key(name, path) for path in before.keys() - wanted.keys() - {MANIFEST}]
            if left:
                self._library.delete(self._store, left)

    def _key(self, name: str, path: str) -> str:
        if self._alone and name == self._own_name:
            return path
        return f"{name}/{path}"

    def _objects(self, prefix: str) -> Iterator[tuple[str, RemoteFile, float]]:
        """Path below the prefix, file and time of change of each object."""
        with library_errors(self.address):
            batches: Sequence[Any] = list(self._library.list(self._store, prefix or None))
        for batch in batches:
            for found in batch:
                tag = found["e_tag"] or str(found["last_modified"])
                path = found["path"].removeprefix(prefix)
                if path and found["path"].startswith(prefix):
                    file = RemoteFile(found["size"], tag)
                    yield path, file, found["last_modified"].timestamp()


def _without_marks(files: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
    """The files without what is named like a directory of others, some tools' mark for that."""
    folders = {path.rpartition("/")[0] for path in files}
    return {path: file for path, file in files.items() if path not in folders}


@contextmanager
def library_errors(address: str) -> Iterator[None]:
    """Raise errors of the library as `LoadFailed`, as `Unreached` unless of one object."""
    errors = library().exceptions
    try:
        yield
    except LoadFailed:
        raise
    except errors.PreconditionError as error:
        raise LoadFailed(f"{address}: a file has changed while it was fetched") from error
    except FileNotFoundError as error:
        raise LoadFailed(f"{address}: {reason_of(error)}") from error
    except (OSError, ValueError, errors.BaseError) as error:
        raise unreached(address, reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """The text of an error of the library without queries, which may have signatures."""
    text = str(error).partition("\n\nDebug source")[0]
    if found := _CODE.search(text):
        return f"{found[1]}: {found[2]}"[:LONGEST_TEXT]
    return first_line(error)


def object_store(address: str, options: StoreOptions) -> Store:
    """The store with such an address; raises `LoadFailed`."""
    return RemoteStore(ObjectRemote(address), options)
