"""scikit-learn models: `model.skops`, `model.joblib`."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.workers.elements import Array
from headrace.workers.loaders.rows import Declared, model_class, needed, threads, unreadable
from headrace.workers.loaders.sklearn_columns import column_kinds, is_composed, takes_text
from headrace.workers.loaders.tabular import INPUT, LEAST_ROWS, Column, Tabular, Traits

_METHODS = (
    "predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples",
    "transform",
)  # fmt: skip
_TRUST_KEY = "skops_trusted_types"


def load(document: dict[str, Any]) -> type[Any]:
    """The class of a model; raises `ImportError` or `ValueError`."""
    needed("sklearn", "scikit-learn")
    path = Path(document["file"])
    read = _read_skops if path.suffix == ".skops" else _read_joblib
    return model_class(Tabular(Estimator(read(path, document))), document, LEAST_ROWS)


class Estimator:
    """A fitted estimator or pipeline as a predictor; its outputs are called like its methods."""

    def __init__(self, model: Any) -> None:
        """Raises `ValueError` if it predicts nothing, `ImportError` if it needs pandas."""
        methods = [name for name in _METHODS if hasattr(model, name)]
        if not methods:
            raise ValueError(
                f"a {type(model).__name__} has none of the methods {', '.join(_METHODS)}"
            )
        first = [name for name in ("predict", "predict_proba") if name in methods]
        names = [str(name) for name in getattr(model, "feature_names_in_", ())]
        self._text = takes_text(model)
        kinds = column_kinds(model, names)
        columns = [kinds.get(name) or Column(name) for name in names]
        by_column = any(column.datatype == "BYTES" for column in columns)
        width = int(getattr(model, "n_features_in_", -1))
        matrix: Declared | None = Declared(INPUT, "FP32", (width,))
        if self._text:
            matrix = Declared(INPUT, "BYTES", (1,))
        elif by_column:
            matrix = None
        self.traits = Traits(columns, matrix, by_column, methods, first or methods[-1:])
        # Whatever lies within may pick columns by name; a lone estimator does not look at them.
        framed = bool(names) and is_composed(model)
        self._pandas = needed("pandas", "pandas") if framed or by_column else None
        _limit_jobs(model)
        self._model = model
        # A model that was fitted with names gets the same columns in the same order without them.
        warnings.filterwarnings("ignore", "X does not have valid feature names")

    def from_matrix(self, array: Array) -> Any:
        """Doubles, as in training, with names if the model may ask for them; texts as they are."""
        if self._text:
            return array.reshape(-1)
        matrix = array.reshape(len(array), -1).astype(np.float64)
        if self._pandas is None:
            return matrix
        return self._pandas.DataFrame(
            matrix, columns=[column.name for column in self.traits.columns]
        )

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """A data frame if the model may ask for names."""
        absent = np.full(rows, np.nan)
        ordered = {column.name: columns.get(column.name, absent) for column in self.traits.columns}
        if self._pandas is None:
            return np.column_stack([*ordered.values()])
        return self._pandas.DataFrame(ordered)

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Each method by itself: some models do not predict what is most probable."""
        found = {name: getattr(self._model, name)(table) for name in names}
        return {k: v.toarray() if hasattr(v, "toarray") else v for k, v in found.items()}


def _read_joblib(path: Path, document: Mapping[str, Any]) -> Any:
    """Whoever wrote the file decides what happens here, so it must be trusted."""
    if not document["trusted"]:
        raise PermissionError(f"{path.name} is not trusted")
    joblib = needed("joblib", "joblib")
    try:
        return joblib.load(path)
    except Exception as error:
        raise unreadable(path.name, "a scikit-learn model", error) from error


def _read_skops(path: Path, document: Mapping[str, Any]) -> Any:
    io = needed("skops.io", "skops")
    try:
        unknown = io.get_untrusted_types(file=path)
    except Exception as error:
        raise unreadable(path.name, "a scikit-learn model", error) from error
    listed = {name.strip() for name in document["parameters"].get(_TRUST_KEY, "").split(",")}
    refused = [] if document["trusted"] else [name for name in unknown if name not in listed]
    if refused:
        raise ValueError(
            f"{path.name} holds types that skops does not know to be safe: {', '.join(refused)}. If"
            f' you trust them, name them in config.pbtxt: parameters {{ key: "{_TRUST_KEY}" value'
            f' {{ string_value: "{",".join(refused)}" }} }}'
        )
    try:
        return io.load(path, trusted=unknown)
    except Exception as error:
        raise unreadable(path.name, "a scikit-learn model", error) from error


def _limit_jobs(model: Any) -> None:
    """Have no part of a model use more threads than it may."""
    if not hasattr(model, "get_params"):
        return
    most = threads()
    jobs = {k: v for k, v in model.get_params().items() if k.split("__")[-1] == "n_jobs"}
    limited = {k: most for k, v in jobs.items() if v is not None and not 0 < v <= most}
    if limited:
        model.set_params(**limited)
