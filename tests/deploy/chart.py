"""The Helm chart rendered by the real Helm, and schemas of what it renders."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"
KUBERNETES_VERSIONS = ("1.31", "1.37")
_SCHEMAS = Path(__file__).parent / "schemas"

Manifest = dict[str, Any]


def tool(name: str) -> str:
    """The path of `helm` or `kubectl`; skips the test without it."""
    own = ROOT / "build" / "deploy" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; scripts/deploy_tools fetches it")
    return found


def render(values: Manifest, release: str = "headrace") -> list[Manifest]:
    """The manifests of a release with these values beside the chart's own."""
    text = _rendered(json.dumps(values), release)
    # libyaml's loader: the one in Python takes as long as Helm.
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


@cache
def _rendered(values: str, release: str) -> str:
    done = subprocess.run(
        [tool("helm"), "template", release, str(CHART), "--values", "-"],
        input=values, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


def of_kind(manifests: Sequence[Manifest], kind: str, name: str = "") -> Manifest:
    """The only manifest of a kind, or the one of this name."""
    [found] = [
        each for each in manifests
        if each["kind"] == kind and name in ("", each["metadata"]["name"])
    ]  # fmt: skip
    return found


@cache
def _schema(kind: str) -> Any:
    document = json.loads((_SCHEMAS / f"{kind}.json").read_text())
    return jsonschema.Draft202012Validator(document)


def validate(manifest: Manifest, versions: Sequence[str] = KUBERNETES_VERSIONS) -> None:
    """Compare with the schema of its kind, in which unknown members are errors.

    Manifests that are equal to a valid one are not compared again.
    """
    _validate(json.dumps(manifest), tuple(versions))


@cache
def _validate(written: str, versions: Sequence[str]) -> None:
    manifest = json.loads(written)
    if (_SCHEMAS / f"{manifest['kind']}.json").exists():
        _schema(manifest["kind"]).validate(manifest)
        return
    for version in versions:
        kubernetes_validate.validate(manifest, version, strict=True)
