"""What a configuration says about the servers of a model."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.execution.remote.options import RemoteOptions, version_without_directory


def options(root: Path, version: int = 0, **parameters: str) -> RemoteOptions:
    return RemoteOptions.of({"endpoints": "grpc://127.0.0.1", **parameters}, "m", version, root)


def test_defaults(tmp_path: Path) -> None:
    found = options(tmp_path)
    assert (found.model, found.version, found.max_in_flight) == ("m", "", 0)
    assert [e.target for e in found.resolve()] == ["ipv4:127.0.0.1:8001"]


def test_all_endpoints_and_addresses_are_known_once(tmp_path: Path) -> None:
    named = "grpc://127.0.0.1:1, grpcs://[::1]:2,grpc://127.0.0.1:1,"
    found = options(tmp_path, endpoints=named).resolve()
    assert [(e.target, e.name, e.secure) for e in found] == [
        ("ipv4:127.0.0.1:1", "grpc://127.0.0.1:1", False),
        ("ipv6:[::1]:2", "grpcs://[::1]:2", True),
    ]


def test_a_name_without_addresses_is_left_out_while_others_have_some(tmp_path: Path) -> None:
    nowhere = "grpc://nowhere.invalid:1"
    assert len(options(tmp_path, endpoints=f"{nowhere},grpc://127.0.0.1:1").resolve()) == 1
    with pytest.raises(LoadFailed, match=r"nowhere\.invalid"):
        options(tmp_path, endpoints=nowhere).resolve()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("endpoints", "", "name at least one server"),
        (
            "endpoints",
            "http://gpu:8000",
            "over gRPC only; name their gRPC port, such as grpc://gpu",
        ),
        ("endpoints", "gpu:8001", "expected grpc://HOST:PORT"),
        ("endpoints", "grpc://gpu:99999", "is not a URL"),
        ("endpoints", "grpc://me:secret@gpu", "credentials belong into files"),
        ("remote_version", "newest", "expected a whole number"),
        ("remote_version", "0", "expected a whole number"),
        ("forward", "transparent", "is not offered by this server"),
        ("forward", "both", "expected 'batched', got 'both'"),
        ("max_in_flight", "-1", "expected a whole number"),
        ("timeout_secs", "soon", "expected seconds"),
        ("timeout_secs", "nan", "expected seconds"),
        ("tls_root_cert", "none.pem", "none.pem cannot be read"),
    ],
)
def test_refusals(tmp_path: Path, name: str, value: str, text: str) -> None:
    with pytest.raises(InvalidOption, match=text) as refused:
        options(tmp_path, 0, **{name: value})
    assert refused.value.path == f"parameters['{name}']"


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


@given(st.text())
def test_there_is_a_version_in_any_case(text: str) -> None:
    assert version_without_directory({"remote_version": text}) >= 1


@given(st.text())
def test_any_text_is_endpoints_or_refused(text: str) -> None:
    try:
        found = options(Path("/"), endpoints=text)
    except InvalidOption:
        return
    assert found.urls
