"""CatBoost models: `model.cbm`."""

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
    library = needed("catboost", "catboost")
    path = Path(document["file"])
    try:
        model = library.CatBoost().load_model(path)
        if len(model.classes_):
            model = library.CatBoostClassifier().load_model(path)
    except library.CatBoostError as error:
        raise unreadable(path.name, "a CatBoost model", error) from error
    return model_class(Tabular(CatBoostPredictor(model)), document, LEAST_ROWS)


class CatBoostPredictor:
    """A CatBoost model as a predictor; a classifier also has `predict_proba`."""

    def __init__(self, model: Any) -> None:
        """Raises `ValueError` for a model with embedding features."""
        if model.get_embedding_feature_indices():
            raise ValueError("CatBoost models with embedding features are not served")
        self._model = model
        texts = {*model.get_cat_feature_indices(), *model.get_text_feature_indices()}
        columns = [
            Feature(name, "BYTES", "") if index in texts else Feature(name)
            for index, name in enumerate(model.feature_names_)
        ]
        self._mixed = bool(texts)
        matrix = None if texts else DeclaredTensor(INPUT, "FP32", (len(columns),))
        proba = hasattr(model, "predict_proba")
        names = ["predict", "predict_proba"] if proba else ["predict"]
        self.traits = Traits(columns, matrix, self._mixed, names, names)

    def from_matrix(self, array: Array) -> Any:
        """A matrix of numbers, unchanged."""
        return np.ascontiguousarray(array.reshape(len(array), -1))

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """A table of numbers and texts; absent columns are missing values."""
        known = self.traits.columns
        if not self._mixed:
            return stacked(known, columns, rows, {})
        table = np.empty((rows, len(known)), object)
        for index, column in enumerate(known):
            missing = "" if column.datatype == "BYTES" else np.nan
            table[:, index] = columns.get(column.name, missing)
        return table

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Compute each kind of prediction separately."""
        return {name: getattr(self._model, name)(table, thread_count=threads()) for name in names}
