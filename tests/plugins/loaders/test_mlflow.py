"""MLflow models, by their signatures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.loaders.served import Served, texts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # MLflow gives advice by warnings
]

NUMBERS = np.random.default_rng(1).normal(size=(40, 2))
LABELS = (NUMBERS[:, 0] > 0).astype(np.int64)
# Otherwise it starts processes to find out.
QUICK: dict[str, Any] = {"pip_requirements": ["mlflow-skinny"]}

OWN = """
import mlflow
import pandas as pd


class Own(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        upper = model_input["word"].str.upper()
        count = model_input["count"] * 2 if "count" in model_input else upper.str.len()
        return pd.DataFrame({"upper": upper, "twice": count.astype("int64")})


mlflow.models.set_model(Own())
"""


def flow(module: str) -> Any:
    """A part of MLflow, which is slow to import."""
    return pytest.importorskip(f"mlflow.{module}", reason="mlflow is not installed")


def signature(inputs: Any, outputs: Any) -> Any:
    schema = flow("types").Schema
    return flow("models").ModelSignature(schema(inputs), schema(outputs) if outputs else None)


def column(kind: str, name: str, required: bool = True) -> Any:
    return flow("types").ColSpec(kind, name, required=required)


def tensor(dtype: str, shape: tuple[int, ...]) -> Any:
    return flow("types").TensorSpec(np.dtype(dtype), shape)


def saved(folder: Path, model: Any, inputs: Any, outputs: Any) -> Path:
    known = signature(inputs, outputs)
    flow("sklearn").save_model(model, folder / "model", signature=known, **QUICK)
    return folder / "model" / "MLmodel"


def test_columns(tmp_path: Path, sk: Any, pd: Any) -> None:
    frame = pd.DataFrame(NUMBERS, columns=["a", "b"])
    model = sk.LogisticRegression().fit(frame, LABELS)
    inputs = [column("double", "a"), column("double", "b")]
    path = saved(tmp_path, model, inputs, [tensor("int64", (-1,))])
    served = Served("mlflow", path, trusted=True)
    assert served.signature() == {
        "a": ("FP64", [1]), "b": ("FP64", [1]), "predict": ("INT64", [1])
    }  # fmt: skip
    row = {name: frame[[name]][:5].to_numpy() for name in "ab"}
    answers = served.ask_all([row, row])
    assert answers[1]["predict"][:, 0].tolist() == model.predict(frame[:5]).tolist()


def test_a_tensor(tmp_path: Path, sk: Any) -> None:
    model = sk.LinearRegression().fit(NUMBERS, LABELS)
    spec = tensor("float64", (-1, 2))
    served = Served("mlflow", saved(tmp_path, model, [spec], None), trusted=True)
    assert served.signature() == {"input-0": ("FP64", [2]), "predict": ("FP64", [1])}
    answer = served.ask({"input-0": NUMBERS[:5]})
    np.testing.assert_allclose(answer["predict"][:, 0], model.predict(NUMBERS[:5]))


def test_a_function_that_gives_columns(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    known = signature(
        [column("string", "word"), column("long", "count", required=False)],
        [column("string", "upper"), column("long", "twice")],
    )
    flow("pyfunc").save_model(
        tmp_path / "model", python_model=tmp_path / "own.py", signature=known, **QUICK
    )
    served = Served("mlflow", tmp_path / "model" / "MLmodel", trusted=True)
    assert served.signature() == {
        "word": ("STRING", [1]), "count": ("INT64", [1]),
        "upper": ("STRING", [1]), "twice": ("INT64", [1]),
    }  # fmt: skip
    assert served.config["input"][1]["optional"]
    answer = served.ask({"word": texts("abc", "ä"), "count": np.array([[3], [4]])})
    assert answer["upper"].tolist() == [["ABC"], ["Ä"]]
    assert answer["twice"].tolist() == [[6], [8]]
    assert served.ask({"word": texts("abc")}, "twice")["twice"].tolist() == [[3]]


def test_without_a_signature_it_has_to_be_declared(tmp_path: Path, sk: Any) -> None:
    model = sk.LinearRegression().fit(NUMBERS, LABELS)
    flow("sklearn").save_model(model, tmp_path / "model", **QUICK)
    path = tmp_path / "model" / "MLmodel"
    with pytest.raises(ValueError, match="does not say what it takes: declare input and output"):
        Served("mlflow", path, trusted=True)
    given = {
        "input": [{"name": "x", "data_type": "TYPE_FP64", "dims": [2]}],
        "output": [{"name": "y", "data_type": "TYPE_FP64", "dims": [1]}],
    }
    answer = Served("mlflow", path, given, trusted=True).ask({"x": NUMBERS[:3]})
    assert answer["y"].shape == (3, 1)


def test_mlflow_models_need_trust(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="not trusted"):
        Served("mlflow", tmp_path / "MLmodel")


def test_an_invalid_folder(tmp_path: Path) -> None:
    flow("pyfunc")
    (tmp_path / "MLmodel").write_text("flavors: {}")
    with pytest.raises(ValueError, match="cannot be loaded as an MLflow model: "):
        Served("mlflow", tmp_path / "MLmodel", trusted=True)
