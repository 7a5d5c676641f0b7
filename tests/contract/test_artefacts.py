"""Models without code: a library's file in a version directory, over every transport."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import InvalidRequest, NotFound
from tests.support.client import Client, strings
from tests.support.server_process import ServerProcess, clean_server

ROWS = np.random.default_rng(7).random((150, 4), np.float32)
KINDS = np.digitize(ROWS.sum(axis=1), [1.7, 2.3])
TRUST = 'parameters { key: "trust_model_code" value { string_value: "true" } }\n'
TEXTS, FEELINGS = ["good", "bad", "fine", "vile"] * 3, ["up", "down"] * 6
MODELS: dict[str, Any] = {}  # that are served, by name


def folder(root: Path, name: str, config: str = "") -> Path:
    """The directory of version 1 of a model."""
    path = root / name / "1"
    path.mkdir(parents=True)
    if config:
        (root / name / "config.pbtxt").write_text(config)
    return path


def library(name: str) -> Any:
    """A library, imported by its first test: together they take seconds, in each process."""
    return pytest.importorskip(name, reason=f"{name} is not installed")


def write_sklearn(root: Path) -> None:
    skops, joblib = library("skops.io"), library("joblib")
    linear, text = library("sklearn.linear_model"), library("sklearn.feature_extraction.text")
    words = library("sklearn.pipeline").make_pipeline(
        text.TfidfVectorizer(), linear.LogisticRegression()
    )
    MODELS["skl"] = linear.LogisticRegression(max_iter=500).fit(ROWS, KINDS)
    MODELS["words"] = words.fit(TEXTS, FEELINGS)
    skops.dump(MODELS["skl"], folder(root, "skl") / "model.skops")
    joblib.dump(MODELS["words"], folder(root, "words", TRUST) / "model.joblib")
    joblib.dump(MODELS["skl"], folder(root, "untrusted") / "model.joblib")
    config = 'parameters { key: "trust_model_code" value { string_value: "yes" } }'
    joblib.dump(MODELS["skl"], folder(root, "mistrusted", config) / "model.joblib")


def write_boosted(root: Path) -> None:
    lgb, xgb = library("lightgbm"), library("xgboost")
    MODELS["xgb"] = xgb.XGBClassifier(n_estimators=3, n_jobs=1).fit(ROWS, KINDS)
    MODELS["xgb"].save_model(folder(root, "xgb") / "model.ubj")
    data = lgb.Dataset(ROWS, KINDS)
    options = {"verbose": -1, "num_threads": 1, "objective": "multiclass", "num_class": 3}
    MODELS["lgb"] = lgb.train(options, data, 3)
    config = (
        'max_batch_size: 8 output { name: "scores" }'
        ' parameters { key: "DISABLE_CUDNN" value { string_value: "1" } }'
    )
    MODELS["lgb"].save_model(folder(root, "lgb", config) / "model.txt")


def write_catboost(root: Path) -> None:
    cat = library("catboost")
    options = {"iterations": 3, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
    MODELS["cat"] = cat.CatBoostClassifier(**options).fit(ROWS, KINDS)
    MODELS["cat"].save_model(str(folder(root, "cat") / "model.cbm"))


# MLflow writes these itself, but slowly.
MLMODEL = """
flavors:
  python_function: {loader_module: mlflow.sklearn, model_path: model.skops, predict_fn: predict}
  sklearn: {pickled_model: model.skops, serialization_format: skops, sklearn_version: "1.9"}
signature:
  inputs: '[{"type": "double", "name": "a"}, {"type": "double", "name": "b"},
    {"type": "double", "name": "c"}, {"type": "double", "name": "d"}]'
"""


def write_mlflow(root: Path) -> None:
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed")
    for name, config in (("flow", TRUST), ("flow_untrusted", "")):
        path = folder(root, name, config) / "model"
        path.mkdir()
        (path / "MLmodel").write_text(MLMODEL)
        library("skops.io").dump(MODELS["skl"], path / "model.skops")


# Six libraries are imported; the quick tests serve the two of the README.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a model in each format, and some that it refuses."""
    root = tmp_path_factory.mktemp("artefacts")
    write_sklearn(root)
    write_boosted(root)
    (folder(root, "broken") / "model.ubj").write_bytes(b"nothing of the kind")
    (folder(root, "torch", TRUST) / "model.pt").write_bytes(b"nothing of the kind")
    write_catboost(root)
    write_mlflow(root)
    with clean_server(root, options=["--exit-on-error=false"]) as process:
        yield process


def reason(client: Client, model: str) -> str:
    (entry,) = [entry for entry in client.index().models if entry.name == model]
    return entry.reason


@pytest.mark.parametrize("model", ["skl", "xgb", "cat"])
def test_a_classifier(client: Client, model: str) -> None:
    rows = ROWS[::30]
    answer = client.infer(model, {"input-0": rows})
    expected = MODELS[model]
    assert answer["predict"].tolist() == expected.predict(rows).reshape(-1, 1).tolist()
    np.testing.assert_allclose(answer["predict_proba"], expected.predict_proba(rows), rtol=1e-5)
    only = client.infer(model, {"input-0": rows}, outputs=["predict"])
    assert only.outputs.keys() == {"predict"}


def test_completed_and_declared_signatures(client: Client) -> None:
    metadata = client.model_metadata("skl")
    assert metadata.platform == "sklearn"
    tensors = [*metadata.inputs, *metadata.outputs]
    assert [(t.name, t.datatype, list(t.shape)) for t in tensors] == [
        ("input-0", "FP32", [-1, 4]), ("predict", "INT64", [-1, 1]),
        ("predict_proba", "FP64", [-1, 3]),
    ]  # fmt: skip
    config = client.model_config("skl")
    assert (config.backend, config.default_model_filename) == ("sklearn", "model.skops")
    assert config.max_batch_size == 4096
    assert config.HasField("dynamic_batching")
    assert client.model_config("xgb").default_model_filename == "model.ubj"
    # A declared signature wins.
    answer = client.infer("lgb", {"input-0": ROWS[:8]})
    np.testing.assert_allclose(answer["scores"], MODELS["lgb"].predict(ROWS[:8]))
    with pytest.raises(InvalidRequest, match="batch-size must be <= 8"):
        client.infer("lgb", {"input-0": ROWS[:9]})


def test_texts_and_columns(client: Client) -> None:
    answer = client.infer("words", {"input-0": strings([b"good", b"bad"], [2, 1])})
    assert answer.datatypes == {"predict": "BYTES", "predict_proba": "FP64"}
    assert answer["predict"].tolist() == [[b"up"], [b"down"]]
    rows = ROWS[::30].astype(np.float64)
    found = client.infer("flow", {name: rows[:, [i]] for i, name in enumerate("abcd")})
    assert found["predict"][:, 0].tolist() == MODELS["skl"].predict(rows).tolist()


@pytest.mark.parametrize("model", ["untrusted", "flow_untrusted"])
def test_code_is_refused(client: Client, model: str) -> None:
    told = reason(client, model)
    assert "can run code of its author's when it is loaded" in told
    assert TRUST.strip() in told
    assert "--trust-model-code" in told
    with pytest.raises(NotFound):
        client.infer(model, {"input-0": ROWS[:1]})


def test_an_unreadable_file_and_an_unread_parameter(client: Client, server: ServerProcess) -> None:
    told = reason(client, "broken")
    assert told.startswith("ValueError: model.ubj cannot be loaded as an XGBoost model: ")
    assert "/" not in told
    server.await_logged("XGBoostError")
    server.await_logged("parameters['DISABLE_CUDNN'] has no effect on this server")
    assert "parameters['trust_model_code'] has no effect" not in server.log


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_a_missing_library(client: Client) -> None:
    told = reason(client, "torch")
    assert "needs the package torch" in told
    assert "requirements.txt beside the model" in told
