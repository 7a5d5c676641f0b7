"""LightGBM models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.loaders.conftest import imported
from tests.plugins.loaders.served import Served, texts

RANDOM = np.random.default_rng(1)
NUMBERS = RANDOM.normal(size=(120, 3))
THREE = np.arange(120) % 3
SMALL = {
    "num_threads": 1, "verbose": -1, "min_data_in_leaf": 2, "min_data_per_group": 2,
    "cat_smooth": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def frame(pd: Any) -> Any:
    columns = {
        "kind": pd.Categorical(np.array(["ä", "b", "c"])[THREE]),
        "size": NUMBERS[:, 0],
        "floor": pd.Categorical(THREE * 10),
    }
    return pd.DataFrame(columns)


def saved(folder: Path, data: Any, labels: Any, **parameters: Any) -> tuple[Path, Any]:
    lgb = imported("lightgbm")
    booster = lgb.train(SMALL | parameters, lgb.Dataset(data, labels), 4)
    booster.save_model(folder / "model.txt")
    return folder / "model.txt", booster


def test_a_matrix(tmp_path: Path) -> None:
    path, booster = saved(tmp_path, NUMBERS, THREE, objective="multiclass", num_class=3)
    served = Served("lightgbm", path)
    assert served.columns == []
    assert served.signature() == {"input-0": ("FP32", [3]), "predict": ("FP64", [3])}
    rows = NUMBERS[:9].astype(np.float32)
    answers = served.ask_all([{"input-0": rows[:4]}, {"input-0": rows[4:]}])
    np.testing.assert_allclose(
        np.concatenate([answer["predict"] for answer in answers]), booster.predict(rows)
    )


def test_columns_by_name(tmp_path: Path, pd: Any) -> None:
    frame = pd.DataFrame(NUMBERS, columns=["a", "b", "c"])
    path, booster = saved(tmp_path, frame, THREE, objective="regression")
    given = {"input": [{"name": "c"}, {"name": "b", "optional": True}, {"name": "a"}]}
    served = Served("lightgbm", path, given)
    assert served.columns == ["a", "b", "c"]
    row = {name: frame[[name]][:9].to_numpy() for name in "abc"}
    np.testing.assert_allclose(served.ask(row)["predict"][:, 0], booster.predict(frame[:9]))
    del row["b"]
    missing = frame[:9].assign(b=np.nan)
    np.testing.assert_allclose(served.ask(row)["predict"][:, 0], booster.predict(missing))


def test_categories_by_name(tmp_path: Path, frame: Any, pd: Any) -> None:
    path, booster = saved(tmp_path, frame, THREE, objective="regression")
    served = Served("lightgbm", path)
    assert served.signature() == {
        "kind": ("STRING", [1]), "size": ("FP64", [1]), "floor": ("INT64", [1]),
        "predict": ("FP64", [1]),
    }  # fmt: skip
    row = {
        "kind": texts(*frame["kind"][:6]),
        "size": frame[["size"]][:6].to_numpy(),
        "floor": frame["floor"][:6].to_numpy().astype(np.int64)[:, None],
    }
    np.testing.assert_allclose(served.ask(row)["predict"][:, 0], booster.predict(frame[:6]))
    unknown = frame[:6].assign(kind=pd.Categorical([None] * 6, ["ä", "b", "c"]))
    answer = served.ask(row | {"kind": texts(*["?"] * 6)})
    np.testing.assert_allclose(answer["predict"][:, 0], booster.predict(unknown))


def test_a_matrix_of_categories_has_their_codes(tmp_path: Path, frame: Any) -> None:
    path, booster = saved(tmp_path, frame, THREE, objective="regression")
    served = Served("lightgbm", path, {"input": [{"name": "all"}]})
    codes = frame.assign(kind=frame["kind"].cat.codes, floor=frame["floor"].cat.codes)
    answer = served.ask({"all": codes[:6].to_numpy().astype(np.float64)})
    np.testing.assert_allclose(answer["predict"][:, 0], booster.predict(frame[:6]))
