"""KServe's runtime on what KServe downloads: a model's own files, of several formats."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from headrace.core.datatypes import Datatype
from tests.deploy.chart import DEPLOY
from tests.models import onnx_graphs
from tests.support.remote import free_ports
from tests.support.started import until_answers

pytestmark = pytest.mark.slow

ROWS = np.random.default_rng(7).random((60, 4), np.float32)
KINDS = (ROWS.sum(axis=1) > 2).astype(int)
RUNTIME = yaml.safe_load((DEPLOY / "kserve" / "cluster-serving-runtime.yaml").read_text())
[CONTAINER] = RUNTIME["spec"]["containers"]

DECORATED = """
from headrace import Float32, N, model


@model(max_batch_size=64)
def total(rows: Float32[N, 4]) -> Float32[N]:
    return rows.sum(axis=1)
"""


@contextmanager
def served(model: Path, folder: Path, more: Mapping[str, str]) -> Iterator[str]:
    """The URL of a server that runs as the container of the InferenceService `example`, with
    `more` variables.
    """
    http, grpc, metrics = free_ports(3)
    replaced = {
        "/mnt/models": str(model), "{{.Name}}": "example", "8080": str(http), "9000": str(grpc),
    }  # fmt: skip
    found = re.compile("|".join(map(re.escape, replaced)))
    arguments = [found.sub(lambda match: replaced[match[0]], each) for each in CONTAINER["args"]]
    given = {each["name"]: each["value"] for each in CONTAINER["env"]}
    given |= {"HEADRACE_ENVIRONMENT_CACHE": str(folder / "cache"),
              "HEADRACE_SHUTDOWN_DELAY_SECS": "0", **more}  # fmt: skip
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


# --- what is at a storageUri, by format, and the answer to the first rows


def onnx(folder: Path) -> Any:
    onnx_graphs.write_model(folder.parent, "onnx", onnx_graphs.identity(Datatype.FP32, ["n", 4]))
    (folder.parent / "onnx" / "1" / "model.onnx").rename(folder / "model.onnx")
    return ROWS[:3]


def python(folder: Path) -> Any:
    (folder / "model.py").write_text(DECORATED)
    return ROWS[:3].sum(axis=1)


def sklearn(folder: Path) -> Any:
    dump = pytest.importorskip("skops.io").dump
    model = pytest.importorskip("sklearn.linear_model").LogisticRegression().fit(ROWS, KINDS)
    dump(model, folder / "model.skops")
    return model.predict(ROWS[:3])


def sklearn_joblib(folder: Path) -> Any:
    dump = pytest.importorskip("joblib").dump
    model = pytest.importorskip("sklearn.linear_model").Ridge().fit(ROWS, KINDS)
    dump(model, folder / "model.joblib")
    return model.predict(ROWS[:3])


def lightgbm(folder: Path) -> Any:
    library = pytest.importorskip("lightgbm")
    model = library.LGBMRegressor(n_estimators=3, min_child_samples=2, verbose=-1).fit(ROWS, KINDS)
    model.booster_.save_model(folder / "model.txt")
    return model.predict(ROWS[:3])


def xgboost(folder: Path, name: str = "model.ubj") -> Any:
    model = pytest.importorskip("xgboost").XGBRegressor(n_estimators=3).fit(ROWS, KINDS)
    model.save_model(folder / name)
    return model.predict(ROWS[:3])


def xgboost_json(folder: Path) -> Any:
    return xgboost(folder, "model.json")


def catboost(folder: Path) -> Any:
    library = pytest.importorskip("catboost")
    model = library.CatBoostRegressor(iterations=3, verbose=False, allow_writing_files=False)
    model.fit(ROWS, KINDS)
    model.save_model(folder / "model.cbm")
    return model.predict(ROWS[:3])


def mlflow(folder: Path) -> Any:
    library = pytest.importorskip("mlflow.sklearn")
    model = pytest.importorskip("sklearn.linear_model").Ridge().fit(ROWS, KINDS)
    known = pytest.importorskip("mlflow.models").infer_signature(ROWS, model.predict(ROWS))
    library.save_model(model, folder, signature=known, pip_requirements=["mlflow-skinny"])
    (folder / "requirements.txt").unlink()  # of an environment, which would come from an index
    return model.predict(ROWS[:3])


def pytorch(folder: Path) -> Any:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 1)
    torch.jit.save(torch.jit.trace(model, torch.from_numpy(ROWS)), folder / "model.pt")
    return model(torch.from_numpy(ROWS[:3])).detach().numpy()


TRUSTED = {"HEADRACE_TRUST_MODEL_CODE": "true"}
# By the format's name in the runtime; those of Java are tested in tests/hosts.
FORMATS: list[tuple[str, Callable[[Path], Any], Mapping[str, str]]] = [
    ("onnx", onnx, {}), ("python", python, {}), ("sklearn", sklearn, {}),
    ("sklearn", sklearn_joblib, TRUSTED), ("lightgbm", lightgbm, {}), ("xgboost", xgboost, {}),
    ("xgboost", xgboost_json, {}), ("catboost", catboost, {}), ("mlflow", mlflow, TRUSTED),
    ("pytorch", pytorch, TRUSTED),
]  # fmt: skip
JAVA = {"pmml", "mojo"}


def test_every_format_of_the_runtime_has_a_case() -> None:
    named = {each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]}
    assert named == {name for name, _, _ in FORMATS} | JAVA


@pytest.mark.filterwarnings("ignore")  # of MLflow and PyTorch, which give advice by them
@pytest.mark.parametrize(
    ("write", "more"),
    [pytest.param(*each, id=f"{name}-{number}") for number, (name, *each) in enumerate(FORMATS)],
)
def test_a_model_of_a_format(
    write: Callable[[Path], Any], more: Mapping[str, str], tmp_path: Path
) -> None:
    """Its predictions over versions 1 and 2 are those of its library.

    It lies as KServe's storage initializer leaves it: behind a link as of a volume, beside what
    the client of Hugging Face notes of its downloads.
    """
    (downloaded := tmp_path / "downloaded").mkdir()
    expected = np.ravel(write(downloaded))
    (notes := downloaded / ".cache" / "huggingface" / "download").mkdir(parents=True)
    (notes / "model.metadata").write_text("a1b2c3\n")
    (models := tmp_path / "models").symlink_to(downloaded)
    with served(models, tmp_path, more) as url:
        body = json.dumps({"instances": ROWS[:3].tolist()})
        answer = httpx.post(f"{url}/v1/models/example:predict", content=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found = answer.json()["predictions"]
        [given] = httpx.get(f"{url}/v2/models/example", timeout=60).json()["inputs"]
        tensor = {"name": given["name"], "datatype": given["datatype"], "shape": [3, 4],
                  "data": ROWS[:3].ravel().tolist()}  # fmt: skip
        body = json.dumps({"inputs": [tensor]})
        answer = httpx.post(f"{url}/v2/models/example/infer", content=body, timeout=60)
        assert answer.status_code == 200, answer.text
        outputs = {each["name"]: each["data"] for each in answer.json()["outputs"]}
    if isinstance(found[0], dict):  # a classifier has probabilities, too
        found = [row["predict"] for row in found]
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-5)
    [first, *_] = outputs.values()
    np.testing.assert_allclose(outputs.get("predict", first), expected, rtol=1e-5)


def test_a_repository_keeps_its_names(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    for name in ("first", "second"):
        onnx_graphs.write_model(models, name, onnx_graphs.identity(), "max_batch_size: 8")
    with served(models, tmp_path, {}) as url:
        assert httpx.get(f"{url}/v1/models").json() == {"models": ["first", "second"]}
