"""XGBoost models, saved by boosters and by scikit-learn's wrappers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.loaders.served import Served, texts

RANDOM = np.random.default_rng(1)
NUMBERS = RANDOM.normal(size=(60, 4)).astype(np.float32)
THREE = np.arange(60) % 3
TWO = (NUMBERS[:, 0] > 0).astype(int)


@pytest.fixture(scope="module")
def frame(pd: Any) -> Any:
    columns = {
        "size": NUMBERS[:, 0].astype(float),
        "kind": pd.Categorical(np.array(["a", "b", "c"])[THREE]),
        "floor": pd.Categorical(THREE * 10),
    }
    return pd.DataFrame(columns)


def saved(folder: Path, model: Any, name: str = "model.json") -> Path:
    model.save_model(folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["model.json", "model.ubj"])
@pytest.mark.parametrize("labels", [TWO, THREE], ids=["two", "three"])
def test_a_classifier(tmp_path: Path, name: str, labels: Any, xgb: Any) -> None:
    model = xgb.XGBClassifier(n_jobs=1, n_estimators=4, max_depth=2).fit(NUMBERS, labels)
    served = Served("xgboost", saved(tmp_path, model, name))
    assert served.columns == []
    assert served.config["max_batch_size"] == 4096
    assert served.signature() == {
        "input-0": ("FP32", [4]), "predict": ("INT64", [1]),
        "predict_proba": ("FP32", [len(set(labels.tolist()))]),
    }  # fmt: skip
    answer = served.ask({"input-0": NUMBERS[:9]})
    assert answer["predict"][:, 0].tolist() == model.predict(NUMBERS[:9]).tolist()
    np.testing.assert_allclose(answer["predict_proba"], model.predict_proba(NUMBERS[:9]), 1e-6)


def test_several_labels_a_row(tmp_path: Path, xgb: Any) -> None:
    labels = np.stack([TWO, 1 - TWO, THREE > 1], axis=1)
    model = xgb.XGBClassifier(n_jobs=1, n_estimators=4, max_depth=2).fit(NUMBERS, labels)
    served = Served("xgboost", saved(tmp_path, model))
    answer = served.ask({"input-0": NUMBERS[:9]})
    np.testing.assert_array_equal(answer["predict"], model.predict(NUMBERS[:9]))
    np.testing.assert_allclose(answer["predict_proba"], model.predict_proba(NUMBERS[:9]), 1e-6)


def test_the_best_iteration_is_used(tmp_path: Path, xgb: Any) -> None:
    noise = RANDOM.normal(size=60)
    model = xgb.XGBRegressor(n_jobs=1, n_estimators=40, early_stopping_rounds=2, learning_rate=0.9)
    model.fit(NUMBERS[:40], noise[:40], eval_set=[(NUMBERS[40:], noise[40:])], verbose=False)
    assert model.best_iteration + 1 < model.get_booster().num_boosted_rounds()
    served = Served("xgboost", saved(tmp_path, model))
    assert served.signature() == {"input-0": ("FP32", [4]), "predict": ("FP32", [1])}
    answer = served.ask({"input-0": NUMBERS[:9]})["predict"][:, 0]
    np.testing.assert_allclose(answer, model.predict(NUMBERS[:9]), rtol=1e-6)


@pytest.mark.parametrize("objective", ["multi:softprob", "multi:softmax"])
def test_predictions_of_a_bare_booster(tmp_path: Path, objective: str, xgb: Any) -> None:
    matrix = xgb.DMatrix(NUMBERS, THREE)
    booster = xgb.train({"nthread": 1, "objective": objective, "num_class": 3}, matrix, 3)
    served = Served("xgboost", saved(tmp_path, booster))
    answer = served.ask({"input-0": NUMBERS[:9]})
    assert answer.keys() == {"predict"}
    expected = booster.predict(xgb.DMatrix(NUMBERS[:9]))
    np.testing.assert_allclose(answer["predict"].squeeze(), expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*gblinear.* is deprecated:UserWarning")  # by XGBoost 3.4
def test_a_linear_booster(tmp_path: Path, xgb: Any) -> None:
    booster = xgb.train({"nthread": 1, "booster": "gblinear"}, xgb.DMatrix(NUMBERS, TWO), 3)
    served = Served("xgboost", saved(tmp_path, booster))
    answer = served.ask({"input-0": NUMBERS[:9]})["predict"][:, 0]
    np.testing.assert_allclose(answer, booster.predict(xgb.DMatrix(NUMBERS[:9])), rtol=1e-6)


def test_columns_by_name(tmp_path: Path, xgb: Any, frame: Any) -> None:
    two = frame[["size"]].assign(height=NUMBERS[:, 1].astype(float))
    model = xgb.XGBRegressor(n_jobs=1, n_estimators=4).fit(two, TWO)
    path = saved(tmp_path, model)
    assert Served("xgboost", path).signature()["input-0"] == ("FP32", [2])
    inputs = [{"name": "height"}, {"name": "size", "data_type": "TYPE_FP32", "dims": [1]}]
    served = Served("xgboost", path, {"input": inputs})
    assert served.columns == ["size", "height"]
    assert served.signature()["height"] == ("FP64", [1])
    row = {name: two[[name]][:9].to_numpy() for name in ("height", "size")}
    np.testing.assert_allclose(served.ask(row)["predict"][:, 0], model.predict(two[:9]), rtol=1e-6)


def test_categories_by_name(tmp_path: Path, xgb: Any, frame: Any) -> None:
    model = xgb.XGBRegressor(n_jobs=1, n_estimators=4, enable_categorical=True).fit(frame, THREE)
    if not hasattr(model.get_booster(), "get_categories"):
        pytest.skip("this XGBoost does not keep categories")
    served = Served("xgboost", saved(tmp_path, model, "model.ubj"))
    assert served.signature() == {
        "size": ("FP64", [1]), "kind": ("STRING", [1]), "floor": ("INT64", [1]),
        "predict": ("FP32", [1]),
    }  # fmt: skip
    row = {
        "size": frame[["size"]][:6].to_numpy(),
        "kind": texts(*frame["kind"][:6]),
        "floor": frame["floor"][:6].to_numpy().astype(np.int64)[:, None],
    }
    answer = served.ask(row)["predict"][:, 0]
    np.testing.assert_allclose(answer, model.predict(frame[:6]), rtol=1e-6)
    answer = served.ask(row | {"kind": texts("b", "c", "?", "b", "b", "b")})
    assert answer["error"] == "input 'kind' has a category that is not known: '?'"
