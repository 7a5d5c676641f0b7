"""XGBoost models: `model.json`, `model.ubj`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.ipc.elements import Array
from headrace.plugins.loaders.tabular import (
    INPUT,
    LEAST_ROWS,
    DeclaredTensor,
    Feature,
    RefusedInput,
    Tabular,
    Traits,
    model_class,
    needed,
    stacked,
    threads,
    unreadable,
)


def load(document: dict[str, Any]) -> type[Any]:
    """The model class for a file; raises `ImportError` or `ValueError`."""
    library = needed("xgboost", "xgboost")
    path = Path(document["file"])
    try:
        booster = library.Booster(model_file=path)
        return model_class(Tabular(XGBoostPredictor(library, booster)), document, LEAST_ROWS)
    except (library.core.XGBoostError, json.JSONDecodeError) as error:
        raise unreadable(path.name, "an XGBoost model", error) from error


class XGBoostPredictor:
    """A booster as a predictor.

    If saved by `XGBClassifier`, `predict` is the class and `predict_proba` exists, as there;
    otherwise `predict` is the booster's prediction.
    """

    def __init__(self, library: Any, booster: Any) -> None:
        booster.set_param({"nthread": threads()})
        self._library, self._booster = library, booster
        learner = json.loads(booster.save_config())["learner"]
        self._linear = learner["gradient_booster"]["name"] == "gblinear"
        wrapper = json.loads(booster.attr("scikit_learn") or "{}").get("_estimator_type")
        self._classifies = wrapper == "classifier"
        best = booster.attr("best_iteration") if wrapper and not self._linear else None
        self._trees = (0, int(best) + 1) if best else (0, 0)
        objective = learner["objective"]["name"]
        self._two_classes = objective.startswith("binary:")
        if self._classifies and objective == "multi:softmax":
            booster.set_param({"objective": "multi:softprob"})
        self._types = booster.feature_types
        known = _categories(booster)
        names = booster.feature_names or [""] * booster.num_features()
        found = [
            _column(name or f"f{index}", known.get(index, ())) for index, name in enumerate(names)
        ]
        columns = found if booster.feature_names or known else []
        self._categories = {columns[index].name: values for index, values in known.items()}
        self._pandas = needed("pandas", "pandas") if known else None
        matrix = DeclaredTensor(INPUT, "FP32", (booster.num_features(),))
        given = ["predict", "predict_proba"] if self._classifies else ["predict"]
        named = bool(booster.feature_names)
        self.traits = Traits(columns, matrix, bool(known), given, given, named=named)

    def from_matrix(self, array: Array) -> Any:
        """A matrix, unchanged; categories are codes."""
        return array.reshape(len(array), -1)

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """A matrix; with categories a data frame, whose codes the library determines itself."""
        if self._pandas is None:
            return stacked(self.traits.columns, columns, rows, {})
        absent = np.full(rows, np.nan)
        ordered = {column.name: columns.get(column.name, absent) for column in self.traits.columns}
        for name, known in self._categories.items():
            _check(name, ordered[name].tolist(), known)
            ordered[name] = self._pandas.Categorical(ordered[name])
        return self._pandas.DataFrame(ordered)

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Compute one prediction, from which class and probabilities are derived."""
        found = self._predict(table)
        if not self._classifies:
            return {"predict": found}
        if found.ndim == 1:
            labels = (found > 0.5).astype(np.int64)
            return {"predict": labels, "predict_proba": np.column_stack([1 - found, found])}
        if self._two_classes:  # several labels per row, each present or not
            return {"predict": (found > 0.5).astype(np.int64), "predict_proba": found}
        return {"predict": found.argmax(axis=1), "predict_proba": found}

    def _predict(self, table: Any) -> Array:
        if not self._linear:
            try:
                found: Array = self._booster.inplace_predict(
                    table, iteration_range=self._trees, validate_features=False
                )
            except self._library.core.XGBoostError as error:
                if self._categories and "category" in str(error):
                    raise RefusedInput("a category that the model does not know") from error
                raise
            return found
        matrix = self._library.DMatrix(table, feature_types=self._types, nthread=threads())
        found = self._booster.predict(matrix, validate_features=False)
        return found


def _categories(booster: Any) -> dict[int, list[Any]]:
    """The categories of columns by index, if the model has stored them."""
    if "c" not in (booster.feature_types or ()):
        return {}
    model = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]
    model = model.get("gbtree", model).get("model", {})
    found = {}
    for index, kept in enumerate(model.get("cats", {}).get("enc", ())):
        values = kept["values"]
        if "offsets" in kept:  # concatenated texts, as signed bytes
            data = np.array(values, np.int8).tobytes()
            ends = zip(kept["offsets"], kept["offsets"][1:], strict=False)
            values = [data[start:end].decode(errors="replace") for start, end in ends]
        if values:
            found[index] = values
    return found


def _column(name: str, known: Sequence[Any]) -> Feature:
    if not known:
        return Feature(name)
    if isinstance(known[0], str):
        return Feature(name, "BYTES", next((word for word in known if word.isascii()), ""))
    return Feature(name, "INT64", known[0])


def _check(name: str, values: list[Any], known: Sequence[Any]) -> None:
    """Refuse categories that the library would mistake for others.

    It truncates words with non-ASCII letters, so for these only the library itself can tell.
    """
    if any(isinstance(word, str) and not word.isascii() for word in known):
        return
    for value in values:
        if value not in known and value == value:  # NaN is a missing value
            raise RefusedInput(f"input '{name}' has a category that is not known: {value!r}")
