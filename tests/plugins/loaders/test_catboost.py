"""CatBoost models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.loaders.served import Served, texts

NUMBERS = np.random.default_rng(1).normal(size=(60, 3)).astype(np.float32)
THREE = np.arange(60) % 3
WORDS = np.array(["p", "q", "r"])
QUIET = {"thread_count": 1, "iterations": 4, "depth": 2, "verbose": 0, "allow_writing_files": False}


def saved(folder: Path, model: Any) -> Path:
    model.save_model(str(folder / "model.cbm"))
    return folder / "model.cbm"


def test_a_regressor(tmp_path: Path, cat: Any) -> None:
    model = cat.CatBoostRegressor(**QUIET).fit(NUMBERS, NUMBERS[:, 0])
    served = Served("catboost", saved(tmp_path, model))
    assert served.signature() == {"input-0": ("FP32", [3]), "predict": ("FP64", [1])}
    answer = served.ask({"input-0": NUMBERS[:9]})
    np.testing.assert_allclose(answer["predict"][:, 0], model.predict(NUMBERS[:9]))


@pytest.mark.parametrize(
    ("labels", "datatype"),
    [(THREE, "INT64"), (WORDS[THREE], "STRING"), (THREE > 1, "BOOL")],
    ids=["numbers", "words", "truth"],
)
def test_a_classifier(tmp_path: Path, labels: Any, datatype: str, cat: Any) -> None:
    model = cat.CatBoostClassifier(**QUIET).fit(NUMBERS, labels)
    served = Served("catboost", saved(tmp_path, model))
    assert served.signature() == {
        "input-0": ("FP32", [3]), "predict": (datatype, [1]),
        "predict_proba": ("FP64", [len(model.classes_)]),
    }  # fmt: skip
    answer = served.ask({"input-0": NUMBERS[:9]})
    assert answer["predict"].ravel().tolist() == model.predict(NUMBERS[:9]).ravel().tolist()
    np.testing.assert_allclose(answer["predict_proba"], model.predict_proba(NUMBERS[:9]))


def test_categories_have_an_input_for_each_column(tmp_path: Path, cat: Any, pd: Any) -> None:
    frame = pd.DataFrame({"size": NUMBERS[:, 0], "kind": WORDS[THREE], "floor": THREE})
    model = cat.CatBoostClassifier(**QUIET).fit(frame, THREE, cat_features=["kind", "floor"])
    path = saved(tmp_path, model)
    served = Served("catboost", path)
    assert served.columns == ["size", "kind", "floor"]
    assert served.signature() == {
        "size": ("FP64", [1]), "kind": ("STRING", [1]), "floor": ("STRING", [1]),
        "predict": ("INT64", [1]), "predict_proba": ("FP64", [3]),
    }  # fmt: skip
    row = {
        "size": frame[["size"]][:6].to_numpy().astype(np.float64),
        "kind": texts(*frame["kind"][:6]),
        "floor": texts(*frame["floor"][:6].astype(str)),
    }
    expected = model.predict_proba(frame[:6])
    np.testing.assert_allclose(served.ask(row)["predict_proba"], expected)
    floor = {"name": "floor", "data_type": "TYPE_INT64"}
    numbered = Served("catboost", path, {"input": [{"name": "size"}, {"name": "kind"}, floor]})
    row["floor"] = frame[["floor"]][:6].to_numpy()
    np.testing.assert_allclose(numbered.ask(row)["predict_proba"], expected)
