"""Environment variables of builds, and settings of pip under uv's names."""

import os
from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.environments.surroundings import build_surroundings

GIVEN = {
    "PATH": "/bin", "LC_ALL": "C", "HTTPS_PROXY": "http://p", "PIP_TOKEN": "t",
    "UV_DEFAULT_INDEX": "https://y/", "UV_SYSTEM_PYTHON": "1", "AWS_SECRET": "s",
    "PYTHONPATH": "/x", "PIP_CONFIG_FILE": os.devnull,
}  # fmt: skip
FILE = """
[global]
index-url = https://u:p@host/simple
extra-index-url =
    https://a/
    https://b/
find-links = /global
[install]
find-links = /one /two
"""


def test_settings_of_uv_are_passed_and_secrets_are_not() -> None:
    assert build_surroundings(GIVEN) == {
        "PATH": "/bin", "LC_ALL": "C", "HTTPS_PROXY": "http://p", "PIP_TOKEN": "t",
        "UV_DEFAULT_INDEX": "https://y/", "PIP_CONFIG_FILE": os.devnull,
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }  # fmt: skip
    # Offline nothing names other sources.
    assert build_surroundings(GIVEN, offline=True) == {
        "PATH": "/bin", "LC_ALL": "C", "HTTPS_PROXY": "http://p",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "index"),
    [
        ({}, "https://u:p@host/simple"), ({"PIP_INDEX_URL": "https://pip/"}, "https://pip/"),
        ({"PIP_INDEX_URL": "https://pip/", "UV_DEFAULT_INDEX": "https://uv/"}, "https://uv/"),
    ],
)  # fmt: skip
def test_settings_of_pip_are_translated(more: dict[str, str], index: str, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(FILE)
    found = build_surroundings({"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")} | more)
    assert found["UV_DEFAULT_INDEX"] == index
    assert found["UV_INDEX"] == "https://a/ https://b/"
    assert found["UV_FIND_LINKS"] == "/one,/two"


def test_all_indexes_count_unless_uv_is_told_otherwise() -> None:
    strategy = {"UV_INDEX_STRATEGY": "first-index"}
    assert build_surroundings(GIVEN | strategy)["UV_INDEX_STRATEGY"] == "first-index"


def test_the_users_file_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip" / "pip.conf").write_text("[global]\ncert = /certificates\n")
    (tmp_path / "pip.conf").write_text("[global]\nno-index = 1\n")
    found = build_surroundings({"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")})
    assert (found["SSL_CERT_FILE"], found["UV_OFFLINE"]) == ("/certificates", "1")
    (tmp_path / ".pip" / "pip.conf").write_text("no section")
    with pytest.raises(LoadFailed, match=r"pip's settings cannot be read: (.|\n)*no section"):
        build_surroundings({})
    assert "SSL_CERT_FILE" not in build_surroundings({"PIP_CONFIG_FILE": os.devnull})
