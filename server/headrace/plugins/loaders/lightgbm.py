"""LightGBM models: `model.txt`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    library = needed("lightgbm", "lightgbm")
    path = Path(document["file"])
    try:
        booster = library.Booster(model_file=path)
    except (library.basic.LightGBMError, ValueError) as error:
        raise unreadable(path.name, "a LightGBM model", error) from error
    return model_class(Tabular(LightGBMPredictor(booster)), document, LEAST_ROWS)


class LightGBMPredictor:
    """A booster as a predictor: `predict` is its prediction, for a classifier probabilities."""

    def __init__(self, booster: Any) -> None:
        """Raises `ValueError` if its categories cannot be assigned to columns."""
        self._booster = booster
        names = booster.feature_name()
        kept = booster.pandas_categorical or []
        which = booster.params.get("categorical_feature") or []
        if len(which) != len(kept):
            which = []
        self._categories = {
            names[index]: {value: code for code, value in enumerate(values)}
            for index, values in zip(sorted(which), kept, strict=bool(which))
        }
        columns = [_column(name, self._categories.get(name)) for name in names]
        matrix = DeclaredTensor(INPUT, "FP32", (booster.num_feature(),))
        given = ["predict"]
        made_up = names == [f"Column_{index}" for index in range(len(names))]
        self.traits = Traits(
            columns, matrix, bool(self._categories), given, given, named=not made_up
        )

    def from_matrix(self, array: Array) -> Any:
        """A matrix, unchanged; categories are codes."""
        return array.reshape(len(array), -1)

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """A matrix with the codes of categories; unknown ones are missing, as in the library."""
        return stacked(self.traits.columns, columns, rows, self._categories)

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """The booster's predictions."""
        return {"predict": self._booster.predict(table, num_threads=threads())}


def _column(name: str, known: Mapping[Any, int] | None) -> Feature:
    if not known:
        return Feature(name)
    first = next(iter(known))
    datatype = {str: "BYTES", bool: "BOOL", int: "INT64"}.get(type(first), "FP64")
    return Feature(name, datatype, first)
