"""scikit-learn models (`model.skops`, `model.joblib`), and the columns of a fitted one."""

import warnings
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
    threads,
    unreadable,
)


def takes_text(model: Any) -> bool:
    """True if the first step of a model is a text vectoriser."""
    return hasattr(_entry(model), "build_analyzer")


def is_composed(model: Any) -> bool:
    """True if a model contains other estimators."""
    parameters = model.get_params() if hasattr(model, "get_params") else {}
    return any(hasattr(value, "fit") for value in parameters.values())


def column_kinds(model: Any, names: Sequence[str]) -> dict[str, Feature]:
    """Columns with known types or categories, by name."""
    return _kinds(_outer(model), list(names)) if names else {}


def _outer(model: Any) -> Any:
    """The model within a search or a wrapper."""
    for name in ("best_estimator_", "estimator_", "regressor_"):
        inner = getattr(model, name, None)
        if inner is not None:
            return _outer(inner)
    calibrated = getattr(model, "calibrated_classifiers_", None)
    return _outer(calibrated[0].estimator) if calibrated else model


def _entry(model: Any) -> Any:
    model = _outer(model)
    steps = getattr(model, "steps", None) or getattr(model, "transformer_list", None) or ()
    for _, step in steps:
        if not isinstance(step, str) and step is not None:
            return _entry(step)
    return model


def _kinds(step: Any, names: list[str]) -> dict[str, Feature]:
    if step is None or isinstance(step, str):  # columns passed through, or dropped
        return {}
    if hasattr(step, "build_analyzer"):
        return {name: Feature(name, "BYTES", "") for name in names}
    if hasattr(step, "transformers_"):
        found: dict[str, Feature] = {}
        for _, inner, picked in step.transformers_:
            found = _kinds(inner, _picked(picked, names)) | found
        return found
    for attribute in ("steps", "transformer_list"):
        for _, inner in getattr(step, attribute, ()):
            if kinds := _kinds(inner, names):
                return kinds
    categories = getattr(step, "categories_", ())
    if len(categories) != len(names):
        return {}
    return {name: _category(name, known) for name, known in zip(names, categories, strict=True)}


def _picked(picked: Any, names: list[str]) -> list[str]:
    """The names selected by a column transformer: one, several, by number or by a mask."""
    if isinstance(picked, str):
        return [picked]
    if isinstance(picked, slice):
        if any(isinstance(end, str) for end in (picked.start, picked.stop)):
            return []
        return names[picked]
    items = picked.tolist() if hasattr(picked, "tolist") else picked
    items = items if isinstance(items, list) else [items]
    if items and all(isinstance(item, bool) for item in items):
        return [name for name, taken in zip(names, items, strict=False) if taken]
    return [item if isinstance(item, str) else names[item] for item in items]


def _category(name: str, known: Any) -> Feature:
    """A column with the categories that an encoder was fitted with."""
    values = known.tolist()
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return Feature(name, "BYTES", texts[0])
    kind = next((type(value) for value in values if value is not None), float)
    datatype = {bool: "BOOL", int: "INT64"}.get(kind, "FP64")
    return Feature(name, datatype, values[0] if datatype != "FP64" else 0)


_METHODS = (
    "predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples",
    "transform",
)  # fmt: skip
_TRUST_KEY = "skops_trusted_types"


def load(document: dict[str, Any]) -> type[Any]:
    """The model class for a file; raises `ImportError` or `ValueError`."""
    needed("sklearn", "scikit-learn")
    path = Path(document["file"])
    read = _read_skops if path.suffix == ".skops" else _read_joblib
    return model_class(Tabular(Estimator(read(path, document))), document, LEAST_ROWS)


def model_of(estimator: Any) -> type[Any]:
    """The model class for a fitted estimator; raises `ImportError` or `ValueError`."""
    needed("sklearn", "scikit-learn")
    document = {"default_max_batch_size": LEAST_ROWS}
    return model_class(Tabular(Estimator(estimator)), document, LEAST_ROWS)


class Estimator:
    """A fitted estimator or pipeline as a predictor; its outputs are named like its methods."""

    def __init__(self, model: Any) -> None:
        """Raises `ValueError` if it has no prediction method, `ImportError` if it needs pandas."""
        methods = [name for name in _METHODS if hasattr(model, name)]
        if not methods:
            raise ValueError(
                f"a {type(model).__name__} has none of the methods {', '.join(_METHODS)}"
            )
        first = [name for name in ("predict", "predict_proba") if name in methods]
        names = [str(name) for name in getattr(model, "feature_names_in_", ())]
        self._text = takes_text(model)
        kinds = column_kinds(model, names)
        columns = [kinds.get(name) or Feature(name) for name in names]
        by_column = any(column.datatype == "BYTES" for column in columns)
        width = int(getattr(model, "n_features_in_", -1))
        matrix: DeclaredTensor | None = DeclaredTensor(INPUT, "FP32", (width,))
        if self._text:
            matrix = DeclaredTensor(INPUT, "BYTES", (1,))
        elif by_column:
            matrix = None
        self.traits = Traits(columns, matrix, by_column, methods, first or methods[-1:])
        # Steps may select columns by name; a single estimator does not.
        framed = bool(names) and is_composed(model)
        self._pandas = needed("pandas", "pandas") if framed or by_column else None
        _limit_jobs(model)
        self._model = model
        # A model fitted with names gets the same columns in the same order without them.
        warnings.filterwarnings("ignore", "X does not have valid feature names")

    def from_matrix(self, array: Array) -> Any:
        """Doubles, as in training, with names if the model may need them; texts unchanged."""
        if self._text:
            return array.reshape(-1)
        matrix = array.reshape(len(array), -1).astype(np.float64)
        if self._pandas is None:
            return matrix
        return self._pandas.DataFrame(
            matrix, columns=[column.name for column in self.traits.columns]
        )

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """A data frame if the model may need names, otherwise a matrix."""
        absent = np.full(rows, np.nan)
        ordered = {column.name: columns.get(column.name, absent) for column in self.traits.columns}
        if self._pandas is None:
            return np.column_stack([*ordered.values()])
        return self._pandas.DataFrame(ordered)

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Call each method separately: some models do not predict the most probable class."""
        found = {name: getattr(self._model, name)(table) for name in names}
        return {k: v.toarray() if hasattr(v, "toarray") else v for k, v in found.items()}


def _read_joblib(path: Path, document: Mapping[str, Any]) -> Any:
    """Read a pickle by joblib, which runs its author's code: for trusted files only."""
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
            " you trust its author, start the server with --trust-model-code, or name them in"
            f' config.pbtxt: parameters {{ key: "{_TRUST_KEY}" value'
            f' {{ string_value: "{",".join(refused)}" }} }}'
        )
    try:
        return io.load(path, trusted=unknown)
    except Exception as error:
        raise unreadable(path.name, "a scikit-learn model", error) from error


def _limit_jobs(model: Any) -> None:
    """Limit `n_jobs` of every part of a model."""
    if not hasattr(model, "get_params"):
        return
    most = threads()
    jobs = {k: v for k, v in model.get_params().items() if k.split("__")[-1] == "n_jobs"}
    limited = {k: most for k, v in jobs.items() if v is not None and not 0 < v <= most}
    if limited:
        model.set_params(**limited)
