"""KServe's runtime on what KServe downloads: a model's own files, of several formats."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from tests.deploy.chart import DEPLOY
from tests.models import onnx_graphs
from tests.support.remote import free_ports
from tests.support.started import until_answers

pytestmark = pytest.mark.slow

ROWS = np.random.default_rng(7).random((60, 4), np.float32)
KINDS = (ROWS.sum(axis=1) > 2).astype(int)
RUNTIME = yaml.safe_load((DEPLOY / "kserve" / "cluster-serving-runtime.yaml").read_text())
[CONTAINER] = RUNTIME["spec"]["containers"]


@contextmanager
def served(model: Path, folder: Path) -> Iterator[str]:
    """The URL of a server that runs as the container of the InferenceService `example`."""
    http, grpc, metrics = free_ports(3)
    replaced = {
        "/mnt/models": str(model), "{{.Name}}": "example", "8080": str(http), "9000": str(grpc),
    }  # fmt: skip
    found = re.compile("|".join(map(re.escape, replaced)))
    arguments = [found.sub(lambda match: replaced[match[0]], each) for each in CONTAINER["args"]]
    given = {each["name"]: each["value"] for each in CONTAINER["env"]}
    given |= {"HEADRACE_ENVIRONMENT_CACHE": str(folder / "cache"),
              "HEADRACE_SHUTDOWN_DELAY_SECS": "0"}  # fmt: skip
    log = (folder / "log").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "headrace", *arguments, f"--metrics-port={metrics}"],
        env=os.environ | given,
        stdout=log, stderr=log,
    )  # fmt: skip
    url = f"http://127.0.0.1:{http}"
    probe = CONTAINER["readinessProbe"]["httpGet"]["path"]
    try:
        until_answers(url + probe, server, folder / "log", 120)
        yield url
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        log.close()


def sklearn(folder: Path) -> Any:
    dump = pytest.importorskip("skops.io").dump
    model = pytest.importorskip("sklearn.linear_model").LogisticRegression().fit(ROWS, KINDS)
    dump(model, folder / "model.skops")
    return model.predict(ROWS[:3]).tolist()


def lightgbm(folder: Path) -> Any:
    library = pytest.importorskip("lightgbm")
    model = library.LGBMRegressor(n_estimators=3, min_child_samples=2, verbose=-1).fit(ROWS, KINDS)
    model.booster_.save_model(folder / "model.txt")
    return model.predict(ROWS[:3]).tolist()


def xgboost(folder: Path) -> Any:
    model = pytest.importorskip("xgboost").XGBRegressor(n_estimators=3).fit(ROWS, KINDS)
    model.save_model(folder / "model.ubj")
    return model.predict(ROWS[:3]).tolist()


@pytest.mark.parametrize("write", [sklearn, lightgbm, xgboost])
def test_a_model_of_a_format(write: Callable[[Path], Any], tmp_path: Path) -> None:
    """Its predictions over version 1 are those of its library."""
    (model := tmp_path / "model").mkdir()
    expected = write(model)
    with served(model, tmp_path) as url:
        body = json.dumps({"instances": ROWS[:3].tolist()})
        answer = httpx.post(f"{url}/v1/models/example:predict", content=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found = answer.json()["predictions"]
    if isinstance(found[0], dict):  # a classifier has probabilities, too
        found = [row["predict"] for row in found]
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-5)


def test_a_repository_keeps_its_names(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    for name in ("first", "second"):
        onnx_graphs.write_model(models, name, onnx_graphs.identity(), "max_batch_size: 8")
    with served(models, tmp_path) as url:
        assert httpx.get(f"{url}/v1/models").json() == {"models": ["first", "second"]}
