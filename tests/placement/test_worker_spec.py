"""What a worker process is started with."""

import os
import re
from pathlib import Path

import pytest

from headrace.placement.worker.python_options import WorkerSpec

PAGE = (Path(__file__).parents[2] / "docs" / "python-models.md").read_text()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's environment variables."""
    for name in tuple(os.environ):
        monkeypatch.delenv(name)
    for name in (
        "SHOP_REGION",
        "SHOP_KEY",
        "shop_region",
        "HEADRACE_GRPC_SERVER_KEY",
        "AWS_SECRET",
    ):
        monkeypatch.setenv(name, "here")


def seen(*variables: str) -> set[str]:
    """The server's variables that a worker sees, by name."""
    found = WorkerSpec("m", "1", "m_0", variables=variables).environment()
    return {name for name, value in found.items() if value == "here"}


def test_a_worker_sees_no_secrets() -> None:
    assert seen() == set()


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        (["SHOP_REGION"], {"SHOP_REGION"}),
        (["SHOP_*"], {"SHOP_REGION", "SHOP_KEY"}),
        (["SHOP_[A-M]*", "NOT_THERE"], {"SHOP_KEY"}),
        (["*"], {"SHOP_REGION", "SHOP_KEY", "shop_region", "AWS_SECRET"}),
        (["HEADRACE_GRPC_SERVER_KEY"], set()),
    ],
)
def test_a_worker_sees_what_it_is_to_see(variables: list[str], names: set[str]) -> None:
    assert seen(*variables) == names


def test_the_documented_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    [listed] = re.findall(r"Of the server\'s environment .*?: (.*?)\. ", PAGE, re.DOTALL)
    names = {name.replace("*", "X") for name in re.findall("`(.*?)`", listed)}
    assert len(names) > 15
    for name in names:
        monkeypatch.setenv(name, "here")
    assert seen() == names
