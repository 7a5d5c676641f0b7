"""A model's upstreams in its configuration."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.placement.upstream.options import (
    RemoteOptions,
    idle_parameters,
    version_without_directory,
)


def options(root: Path, version: int = 0, **parameters: str) -> RemoteOptions:
    return RemoteOptions.of({"endpoints": "grpc://127.0.0.1", **parameters}, "m", version, root)


def test_endpoints_and_addresses_are_unique(tmp_path: Path) -> None:
    found = options(tmp_path)
    assert (found.model, found.version, found.max_in_flight) == ("m", "", 0)
    assert [(e.address, e.port) for e in found.resolve()] == [("127.0.0.1", 8001)]
    named = "grpc://127.0.0.1:1, grpcs://[::1]:2,grpc://127.0.0.1:1,"
    addresses = options(tmp_path, endpoints=named).resolve()
    assert [(e.address, e.name, e.secure) for e in addresses] == [
        ("127.0.0.1", "grpc://127.0.0.1:1", False),
        ("::1", "grpcs://[::1]:2", True),
    ]


def test_a_name_without_addresses_is_skipped_if_others_resolve(tmp_path: Path) -> None:
    nowhere = "grpc://nowhere.invalid:1"
    assert len(options(tmp_path, endpoints=f"{nowhere},grpc://127.0.0.1:1").resolve()) == 1
    with pytest.raises(LoadFailed, match=r"nowhere\.invalid"):
        options(tmp_path, endpoints=nowhere).resolve()
    urls = "http://a..b,http://127.0.0.1"
    [endpoint] = RemoteOptions.of({"endpoints": urls}, "m", 0, tmp_path).resolve()
    assert endpoint.address == "127.0.0.1"
    with pytest.raises(LoadFailed, match="label"):
        RemoteOptions.of({"endpoints": f"http://{'a' * 70}.b"}, "m", 0, tmp_path).resolve()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("endpoints", "", "name at least one server"),
        ("endpoints", "gpu:8001", "expected grpc://HOST:PORT"),
        ("endpoints", "ftp://gpu", "expected grpc://HOST:PORT"),
        ("endpoints", "grpc://gpu/path", "expected grpc://HOST:PORT"),
        ("endpoints", "http://gpu/v2?x=1", "credentials belong into files"),
        ("endpoints", "http://gp u", "a host that is none"),
        ("endpoints", "grpc://gpu:99999", "is not a URL"),
        ("endpoints", "grpc://me:secret@gpu", "credentials belong into files"),
        ("remote_version", "newest", "expected a whole number"),
        ("remote_version", "0", "expected a whole number"),
        ("max_in_flight", "-1", "expected a whole number"),
        ("max_in_flight", "0", "from 1 to 1024"),
        ("max_in_flight", "0000000012345", "from 1 to 1024"),
        ("remote_version", str(1 << 63), "expected a whole number"),
        ("timeout_secs", "soon", "expected seconds"),
        ("timeout_secs", "nan", "expected seconds"),
        ("forward_headers", "x-tenant,grpc-timeout", "'grpc-timeout' is about a connection"),
        ("forward_headers", "x tenant", "'x tenant' is not the name of a header"),
        ("forward_priority", "yes", "expected true or false, got 'yes'"),
        ("tls_root_cert", "none.pem", "none.pem cannot be read"),
        ("tls_key", "a\0b", "cannot be read: embedded null byte"),
        ("host", "a b", "expected the name of a host"),
        ("host", "a/b", "expected the name of a host"),
        ("host", "a:b", "expected the name of a host"),
        ("host", "a@b", "expected the name of a host"),
        ("protocol", "v3", "expected v2, tfserving, torchserve, got 'v3'"),
        ("signature_name", "s", r"is for parameters\['protocol'\] tfserving"),
        ("remote_label", "s", "is for .* tfserving or torchserve"),
        ("request_body", "raw", "is for .* torchserve"),
        ("http_tensors", "text", "expected auto, binary or json, got 'text'"),
        ("compression", "zip", "expected none, gzip or deflate, got 'zip'"),
    ],
)
def test_refusals(tmp_path: Path, name: str, value: str, text: str) -> None:
    with pytest.raises(InvalidOption, match=text) as refused:
        options(tmp_path, 0, **{name: value})
    assert refused.value.path == f"parameters['{name}']"


def test_endpoints_over_http(tmp_path: Path) -> None:
    named = "http://127.0.0.1, https://127.0.0.1/a b/, http://127.0.0.1:80, https://[::1]:8443"
    found = options(tmp_path, endpoints=named).resolve()
    assert [(e.port, e.authority, e.path, e.secure) for e in found] == [
        (8000, "127.0.0.1:8000", "", False), (443, "127.0.0.1", "/a%20b", True),
        (80, "127.0.0.1", "", False), (8443, "[::1]:8443", "", True),
    ]  # fmt: skip
    # A host of another name.
    (named_otherwise,) = options(
        tmp_path, endpoints="https://127.0.0.1", host="iris.models:81"
    ).resolve()
    assert (named_otherwise.address, named_otherwise.port, named_otherwise.host) == (
        "127.0.0.1", 443, "iris.models",
    )  # fmt: skip
    assert named_otherwise.authority == "iris.models:81"


def test_other_protocols_have_ports_of_their_own(tmp_path: Path) -> None:
    both = options(tmp_path, endpoints="grpc://127.0.0.1,http://127.0.0.1", protocol="tfserving")
    assert [e.port for e in both.resolve()] == [8500, 8501]
    only = {"endpoints": "http://127.0.0.1", "protocol": "torchserve"}
    (one,) = options(tmp_path, 0, **only).resolve()
    assert one.port == 8080
    with pytest.raises(InvalidOption, match=r"request_body.*expected array, object, raw"):
        options(tmp_path, 0, request_body="xml", **only)
    with pytest.raises(InvalidOption, match="cannot be combined with remote_version"):
        options(tmp_path, 0, remote_label="1.0", remote_version="1", **only)
    with pytest.raises(InvalidOption, match="asked over http or https only"):
        options(tmp_path, 0, protocol="torchserve")
    with pytest.raises(InvalidOption, match=r"remote_load.*tfserving has nothing like it"):
        options(tmp_path, protocol="tfserving", remote_load="true")


def test_files_are_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("Bearer abc\n")
    (tmp_path / "key").write_text("x")
    found = options(tmp_path, authorization_file="token").credentials
    assert found.authorization == "Bearer abc"
    with pytest.raises(InvalidOption, match="go together"):
        options(tmp_path, tls_key="key")


def test_a_version_directory_is_the_remote_version(tmp_path: Path) -> None:
    assert options(tmp_path, 3).version == "3"
    with pytest.raises(InvalidOption, match="cannot be combined with version directories"):
        options(tmp_path, 3, remote_version="4")
    # Versions may be times, as TensorFlow Serving's mostly are.
    assert options(tmp_path, remote_version="20240229120000").version == "20240229120000"
    assert version_without_directory({"remote_version": "20240229120000"}) == 20240229120000


@given(st.text())
def test_every_remote_version_has_a_number(text: str) -> None:
    assert version_without_directory({"remote_version": text}) >= 1


@given(st.text())
def test_any_text_is_endpoints_or_refused(text: str) -> None:
    try:
        found = options(Path("/"), endpoints=text)
    except InvalidOption:
        return
    assert found.urls
    for url in found.urls:
        assert f"{url.authority}{url.path}".isascii()
        assert url.path.isprintable()
        assert " " not in url.path


def test_memory_is_shared_with_servers_on_this_machine(tmp_path: Path) -> None:
    assert not options(tmp_path).shared_memory
    found = options(tmp_path, shared_memory="true", endpoints="grpc://127.9.9.9,grpcs://[::1]:1")
    assert found.shared_memory
    assert len(found.resolve()) == 2
    elsewhere = options(tmp_path, shared_memory="true", endpoints="grpc://192.0.2.1:8001")
    with pytest.raises(InvalidOption, match=r"192\.0\.2\.1: expected one of this machine"):
        elsewhere.resolve()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"endpoints": "http://127.0.0.1"}, "asked over gRPC, not http://127.0.0.1"),
        ({"protocol": "tfserving"}, "is of the protocol v2, not tfserving"),
        ({"shared_memory": "system"}, "expected true or false"),
    ],
)
def test_endpoints_without_shared_memory(tmp_path: Path, given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidOption, match=text) as error:
        options(tmp_path, 0, **{"shared_memory": "true", **given})
    assert error.value.path == "parameters['shared_memory']"


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ({"endpoints": "grpc://a", "tls_root_cert": "x"}, ["tls_root_cert"]),
        ({"endpoints": "grpc://a,https://b", "tls_root_cert": "x"}, []),
        ({"endpoints": "grpc://a", "fail_over": "grpcs://b", "tls_cert": "x", "tls_key": "y"}, []),
        ({"endpoints": "grpc://a", "http_tensors": "json"}, ["http_tensors"]),
        ({"endpoints": "https://a", "http_tensors": "json"}, []),
    ],
)
def test_parameters_without_effect(given: dict[str, str], idle: list[str]) -> None:
    assert [name for name, _ in idle_parameters(given)] == idle
