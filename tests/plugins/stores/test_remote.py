"""Places with models: the state of a model, hosts, and packages that are missing."""

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.remote import RemoteFile, needed, root_url, state_of
from headrace.repository.model_files import MANIFEST, new_manifest


def test_a_missing_package_is_named() -> None:
    with (
        pytest.raises(LoadFailed, match=r"^models of the Hub need the package hub: headrace\[h\]$"),
        needed("models of the Hub", "hub: headrace[h]"),
    ):
        raise ModuleNotFoundError("No module named 'hub'")


@pytest.mark.parametrize(
    ("scheme", "host", "url"),
    [
        ("", "example.com", "https://example.com"),
        ("", "localhost:5000", "http://localhost:5000"),
        ("", "127.0.0.1", "http://127.0.0.1"),
        ("", "[::1]:80", "http://[::1]:80"),
        ("", "localhost.example.com", "https://localhost.example.com"),
        ("http://", "example.com", "http://example.com"),
        ("https://", "localhost", "https://localhost"),
    ],
)
def test_hosts_but_this_machine_are_asked_over_tls(scheme: str, host: str, url: str) -> None:
    assert root_url(scheme, host) == url


def test_the_state_of_a_model() -> None:
    files = {"a": RemoteFile(1, "x"), "b": RemoteFile(2, "y")}
    assert state_of(files) == state_of(dict(reversed(files.items())))
    assert state_of(files) != state_of(files | {"b": RemoteFile(2, "z")})
    listed = files | {MANIFEST: RemoteFile(9, "m")}
    assert state_of(listed) == state_of(listed | {"c": RemoteFile(3, "w")})
    assert new_manifest({}) == b'{\n  "files": {}\n}\n'
