"""A store of objects, and a way to run the commands for models."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.cli.program import main
from tests.support.object_store import ObjectStore


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with ObjectStore() as store:
        yield store


@pytest.fixture(scope="module")
def site(objects: ObjectStore) -> ObjectStore:
    """The store as a web server of plain files."""
    return objects


@pytest.fixture
def models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `headrace models`, and returns what it has printed."""

    def run(*words: str, expected: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["models", *words, f"--store-cache={tmp_path / 'cache'}"])
        printed = capsys.readouterr()
        assert ended.value.code == expected, printed
        return printed.err if expected and not printed.out else printed.out

    return run
