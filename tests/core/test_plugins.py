"""Plugins: declared ones are found; broken ones are named and left out."""

import logging
from pathlib import Path

import pytest

from headrace.core import plugins
from headrace.core.errors import LoadFailed


def install(root: Path, package: str, group: str, **entries: str) -> None:
    """Write metadata of a package with entry points of one group."""
    metadata = root / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the import path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_our_own_plugins_can_be_loaded() -> None:
    own = [plugin for plugin in plugins.all_plugins() if plugin.package == "headrace"]
    assert {plugin.group for plugin in own} == {*plugins.OWN, "parts"}
    assert all(callable(plugin.load()) for plugin in own)


def test_plugins_of_packages_come_after_our_own(path: Path) -> None:
    install(path, "others", plugins.BACKENDS, upper="collections:OrderedDict")
    found = plugins.installed(plugins.BACKENDS)
    assert list(found) == [*plugins.OWN[plugins.BACKENDS], "upper"]
    plugin = found["upper"]
    assert (plugin.kind, plugin.package) == ("backend", "others 1.0")
    assert plugins.load(plugins.BACKENDS, lambda target: target)["upper"] is plugin.load()


@pytest.mark.parametrize(("target", "problem"), [
    ("no_such_module:Plugin", "No module named 'no_such_module'"),
    ("collections:no_such_name", "has no attribute 'no_such_name'"), ("exits:Plugin", "by now"),
])  # fmt: skip
def test_broken_plugins_are_named_and_left_out(
    path: Path, target: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path / "exits.py").write_text("raise SystemExit('by now')")
    install(path, "broken", plugins.STAGES, bad=target, good="collections:Counter")
    assert set(plugins.load(plugins.STAGES, lambda loaded: loaded)) - {
        *plugins.OWN[plugins.STAGES]
    } == {"good"}
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(
        f"plugin left out: stage 'bad' ({target}) of broken 1.0: "
    )
    assert problem in record.getMessage()
    assert record.exc_info is not None


def test_a_duplicate_name_is_reported(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(path, "others", plugins.BACKENDS, python="others:Python")
    assert plugins.installed(plugins.BACKENDS)["python"].package == "headrace"
    assert "its name in headrace.backends is taken by" in caplog.text


def test_a_part_that_was_left_out_is_named() -> None:
    assert callable(plugins.part("nvml"))
    with pytest.raises(LoadFailed, match="without its part 'wings'"):
        plugins.part("wings")
    assert plugins.part("wings", len) is len
