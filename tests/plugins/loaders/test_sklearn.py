"""scikit-learn models: completion, answers and refusals."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.loaders.conftest import imported
from tests.plugins.loaders.served import Served, texts

NUMBERS = np.random.default_rng(1).normal(size=(40, 3))
CLASSES = (NUMBERS[:, 0] > 0).astype(int)
WORDS = ["good day", "fine day", "bad day", "vile day"] * 3
FEELINGS = ["up", "up", "down", "down"] * 3
COLUMNS = {
    "age": [20.0, 30, 40, None] * 5, "city": ["Rome", "Oslo", "Rome", "Bonn"] * 5,
    "grade": [1, 2, 3, 2] * 5, "note": ["good one", "bad one", "bad thing", "good thing"] * 5,
}  # fmt: skip
BOUGHT = ["yes", "no", "no", "yes"] * 5


def saved(folder: Path, model: Any, name: str = "model.skops") -> Path:
    path = folder / name
    if path.suffix == ".skops":
        imported("skops.io").dump(model, path)
    else:
        imported("joblib").dump(model, path)
    return path


def column(values: Any, dtype: Any = np.float64) -> np.ndarray:
    return np.array(values, dtype).reshape(-1, 1)


def by_column(sk: Any, pd: Any) -> Any:
    """A typical pipeline on a data frame."""
    categories = sk.make_pipeline(
        sk.SimpleImputer(strategy="most_frequent"), sk.OneHotEncoder(handle_unknown="ignore")
    )
    columns = sk.ColumnTransformer(
        [
            ("numbers", sk.make_pipeline(sk.SimpleImputer(), sk.StandardScaler()), ["age"]),
            ("categories", categories, ["city", "grade"]),
            ("text", sk.CountVectorizer(), "note"),
        ]
    )
    return sk.make_pipeline(columns, sk.LogisticRegression()).fit(pd.DataFrame(COLUMNS), BOUGHT)


def test_a_classifier(tmp_path: Path, sk: Any) -> None:
    model = sk.make_pipeline(sk.StandardScaler(), sk.LogisticRegression()).fit(NUMBERS, CLASSES)
    served = Served("sklearn", saved(tmp_path, model))
    assert served.config["max_batch_size"] == 4096
    assert served.signature() == {
        "input-0": ("FP32", [3]), "predict": ("INT64", [1]), "predict_proba": ("FP64", [2]),
    }  # fmt: skip
    rows = NUMBERS.astype(np.float32)
    answers = served.ask_all([{"input-0": rows[:1]}, {"input-0": rows[1:4]}])
    np.testing.assert_array_equal(answers[1]["predict"], model.predict(rows[1:4])[:, None])
    for part, answer in zip((rows[:1], rows[1:4]), answers, strict=True):
        np.testing.assert_allclose(
            answer["predict_proba"], model.predict_proba(part.astype(np.float64))
        )


def test_only_requested_outputs_are_computed(tmp_path: Path, sk: Any) -> None:
    model = sk.LogisticRegression().fit(NUMBERS, CLASSES)
    served = Served("sklearn", saved(tmp_path, model))
    assert served.ask({"input-0": NUMBERS[:2]}, "predict").keys() == {"predict"}


def test_a_model_of_texts_with_classes_that_are_words(tmp_path: Path, sk: Any) -> None:
    model = sk.make_pipeline(sk.TfidfVectorizer(), sk.LogisticRegression()).fit(WORDS, FEELINGS)
    served = Served("sklearn", saved(tmp_path, model))
    assert served.signature() == {
        "input-0": ("STRING", [1]), "predict": ("STRING", [1]), "predict_proba": ("FP64", [2]),
    }  # fmt: skip
    answer = served.ask({"input-0": texts("a good one", "vile")}, "predict")
    assert answer["predict"].tolist() == [["up"], ["down"]]


def test_texts_without_batches_are_a_list(tmp_path: Path, sk: Any) -> None:
    union = sk.make_union(sk.CountVectorizer(), sk.TfidfVectorizer())
    model = sk.make_pipeline(union, sk.LogisticRegression()).fit(WORDS, FEELINGS)
    given = {"input": [{"name": "text", "data_type": "TYPE_STRING", "dims": [-1]}]}
    served = Served("sklearn", saved(tmp_path, model), given, default_rows=0)
    assert served.signature()["predict"] == ("STRING", [-1, 1])
    answer = served.ask({"text": texts("good", "bad", "fine")[:, 0]}, "predict")
    assert answer["predict"].tolist() == [["up"], ["down"], ["up"]]


def test_a_text_that_is_no_text(tmp_path: Path, sk: Any) -> None:
    model = sk.make_pipeline(sk.TfidfVectorizer(), sk.LogisticRegression()).fit(WORDS, FEELINGS)
    served = Served("sklearn", saved(tmp_path, model))
    answer = served.ask({"input-0": texts(b"\xff")})
    assert answer == {"error": "input 'input-0' holds bytes that are not UTF-8", "code": 3}
    with pytest.raises(ValueError, match="not UTF-8"):  # then the server retries in halves
        served.ask_all([{"input-0": texts("good")}, {"input-0": texts(b"\xff")}])


def test_a_data_frame_with_words_has_an_input_for_each_column(
    tmp_path: Path, sk: Any, pd: Any
) -> None:
    model = by_column(sk, pd)
    served = Served(
        "sklearn", saved(tmp_path, model), skops_trusted_types="numpy.dtype, numpy.ndarray"
    )
    assert {t["name"]: (t["data_type"], t["dims"]) for t in served.config["input"]} == {
        "age": ("TYPE_FP64", [1]), "city": ("TYPE_STRING", [1]), "grade": ("TYPE_INT64", [1]),
        "note": ("TYPE_STRING", [1]),
    }  # fmt: skip
    row = {
        "age": column([25, np.nan]), "city": texts("Oslo", "Paris"),
        "grade": column([2, 1], np.int64), "note": texts("bad thing", "good one"),
    }  # fmt: skip
    frame = pd.DataFrame({k: v[:, 0] for k, v in row.items()})
    answer = served.ask(row)
    assert answer["predict"][:, 0].tolist() == model.predict(frame).tolist()
    np.testing.assert_allclose(answer["predict_proba"], model.predict_proba(frame))


def test_columns_that_may_be_left_out(tmp_path: Path, sk: Any, pd: Any) -> None:
    model = by_column(sk, pd)
    inputs = [{"name": name} for name in ("city", "grade", "note")]
    path = saved(tmp_path, model, "model.joblib")
    given = {"input": [{"name": "age", "optional": True}, *inputs]}
    served = Served("sklearn", path, given, trusted=True)
    row = {"city": texts("Rome"), "grade": column([1], np.int64), "note": texts("good one")}
    assert served.ask(row, "predict")["predict"].tolist() == [["yes"]]
    with pytest.raises(ValueError, match="also needs the columns age"):
        Served("sklearn", path, {"input": inputs}, trusted=True)


def test_a_data_frame_of_numbers_is_a_matrix_unless_declared_otherwise(
    tmp_path: Path, sk: Any, pd: Any
) -> None:
    frame = pd.DataFrame(NUMBERS, columns=["a", "b", "c"])
    scale = sk.ColumnTransformer([("some", sk.StandardScaler(), ["c", "a"])])
    model = sk.make_pipeline(scale, sk.LinearRegression()).fit(frame, NUMBERS[:, 1])
    path = saved(tmp_path, model, "model.joblib")
    matrix = Served("sklearn", path, trusted=True)
    assert matrix.signature() == {"input-0": ("FP32", [3]), "predict": ("FP64", [1])}
    expected = model.predict(frame[:4])
    answer = matrix.ask({"input-0": NUMBERS[:4]})
    np.testing.assert_allclose(answer["predict"][:, 0], expected)
    given = {"input": [{"name": name} for name in "cab"]}
    columns = Served("sklearn", path, given, trusted=True)
    assert columns.signature()["c"] == ("FP64", [1])
    row = {name: column(frame[name][:4]) for name in "abc"}
    np.testing.assert_allclose(columns.ask(row)["predict"][:, 0], expected)


@pytest.mark.filterwarnings("error")
def test_a_bare_estimator_accepts_any_names(tmp_path: Path, sk: Any, pd: Any) -> None:
    frame = pd.DataFrame(NUMBERS, columns=["a", "b", "c"])
    model = sk.CalibratedClassifierCV(sk.LogisticRegression(), cv=2).fit(frame, CLASSES)
    for fitted in (model, sk.LogisticRegression().fit(frame, CLASSES)):
        served = Served("sklearn", saved(tmp_path, fitted, "model.joblib"), trusted=True)
        answer = served.ask({"input-0": NUMBERS[:3]}, "predict")
        assert answer["predict"][:, 0].tolist() == fitted.predict(frame[:3]).tolist()


def test_a_declared_signature_wins(tmp_path: Path, sk: Any) -> None:
    model = sk.LogisticRegression().fit(NUMBERS, CLASSES)
    given = {
        "max_batch_size": 8,
        "input": [{"name": "features", "data_type": "TYPE_FP64", "dims": [3, 1]}],
        "output": [
            {"name": "decision_function", "data_type": "TYPE_FP32", "dims": [1]},
            {"name": "predict"},
        ],
    }
    served = Served("sklearn", saved(tmp_path, model), given)
    assert served.config["max_batch_size"] == 8
    assert served.signature() == {
        "features": ("FP64", [3, 1]), "decision_function": ("FP32", [1]), "predict": ("INT64", [1]),
    }  # fmt: skip
    answer = served.ask({"features": NUMBERS[:2, :, None]})
    expected = model.decision_function(NUMBERS[:2])[:, None]
    np.testing.assert_allclose(answer["decision_function"], expected, rtol=1e-6)
    assert answer["decision_function"].dtype == np.float32


def test_a_single_output_may_have_any_name(tmp_path: Path, sk: Any) -> None:
    model = sk.LinearRegression().fit(NUMBERS, NUMBERS[:, :2])
    served = Served("sklearn", saved(tmp_path, model), {"output": [{"name": "output__0"}]})
    assert served.signature()["output__0"] == ("FP64", [2])
    answer = served.ask({"input-0": NUMBERS[:2]})
    np.testing.assert_allclose(answer["output__0"], NUMBERS[:2, :2])


def test_a_transformer_and_a_request_without_rows(tmp_path: Path, sk: Any) -> None:
    model = sk.make_pipeline(sk.CountVectorizer()).fit(["one two", "three"])
    served = Served("sklearn", saved(tmp_path, model))
    assert served.signature()["transform"] == ("INT64", [3])
    assert served.ask({"input-0": texts("two two")})["transform"].tolist() == [[0, 0, 2]]
    linear = Served("sklearn", saved(tmp_path, sk.LinearRegression().fit(NUMBERS, CLASSES)))
    assert linear.ask({"input-0": np.empty((0, 3))})["predict"].shape == (0, 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [4]}]}, "3 features a row"),
        ({"input": [{"name": "a", "data_type": "TYPE_STRING", "dims": [3]}]}, "takes FP32 for 'a'"),
        ({"input": [{"name": "a"}, {"name": "b"}]}, "does not know the names of its columns"),
        ({"output": [{"name": "predict"}, {"name": "x"}]}, "no output 'x'; it has predict, pre"),
        ({"output": [{"name": "predict", "data_type": "TYPE_STRING", "dims": [2]}]}, r"says \[2\]"),
        (
            {"output": [{"name": "predict_proba", "data_type": "TYPE_INT64", "dims": [2]}]},
            "'predict_proba' as float64, its configuration says INT64",
        ),
        (
            {"output": [{"name": "predict", "data_type": "TYPE_BF16", "dims": [1]}]},
            "'predict' cannot be BF16 here",
        ),
    ],
)
def test_invalid_declarations(tmp_path: Path, given: Any, says: str, sk: Any) -> None:
    path = saved(tmp_path, sk.LogisticRegression().fit(NUMBERS, CLASSES))
    with pytest.raises(ValueError, match=says):
        Served("sklearn", path, given)


def test_no_more_threads_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sk: Any
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    model = sk.make_pipeline(sk.Watched(3, n_jobs=-1, max_depth=2)).fit(NUMBERS, CLASSES)
    sk.JOBS.clear()
    Served("sklearn", saved(tmp_path, model, "model.joblib"), trusted=True)
    assert set(sk.JOBS) == {2}


def test_code_is_not_run_without_trust(tmp_path: Path, sk: Any) -> None:
    path = saved(tmp_path, sk.LinearRegression().fit(NUMBERS, CLASSES), "model.joblib")
    with pytest.raises(PermissionError, match=r"model\.joblib is not trusted"):
        Served("sklearn", path)
    path = saved(tmp_path, sk.DBSCAN().fit(NUMBERS))
    with pytest.raises(ValueError, match="a DBSCAN has none of the methods predict, "):
        Served("sklearn", path)


def twice(values: Any) -> Any:
    return values * 2


def test_skops_refuses_types_that_it_does_not_know(tmp_path: Path, sk: Any) -> None:
    model = sk.make_pipeline(sk.FunctionTransformer(twice), sk.LinearRegression()).fit(
        NUMBERS, CLASSES
    )
    path = saved(tmp_path, model)
    (name,) = imported("skops.io").get_untrusted_types(file=path)
    with pytest.raises(ValueError, match=r"types that skops does not know to be safe: \S*twice\."):
        Served("sklearn", path)
    with pytest.raises(ValueError, match=r'--trust-model-code.*key: "skops_trusted_types"'):
        Served("sklearn", path, skops_trusted_types="other.type")
    Served("sklearn", path, skops_trusted_types=f"other.type, {name}")
    Served("sklearn", path, trusted=True)


def test_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skops.io", None)
    path = tmp_path / "model.skops"
    with pytest.raises(ImportError, match=r"needs the package skops, and 'skops\.io' is missing"):
        Served("sklearn", path)
