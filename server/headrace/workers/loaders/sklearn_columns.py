"""What a fitted scikit-learn model says of the columns that it takes."""

from collections.abc import Sequence
from typing import Any

from headrace.workers.loaders.tabular import Column


def takes_text(model: Any) -> bool:
    """Whether the first thing that looks at the data is a vectoriser of texts."""
    return hasattr(_entry(model), "build_analyzer")


def is_composed(model: Any) -> bool:
    """Whether other estimators lie within a model."""
    parameters = model.get_params() if hasattr(model, "get_params") else {}
    return any(hasattr(value, "fit") for value in parameters.values())


def column_kinds(model: Any, names: Sequence[str]) -> dict[str, Column]:
    """Those of the columns of which more is known than their names, by name."""
    return _kinds(_outer(model), list(names)) if names else {}


def _outer(model: Any) -> Any:
    """The model within a search or a wrapper around one."""
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


def _kinds(step: Any, names: list[str]) -> dict[str, Column]:
    if step is None or isinstance(step, str):  # columns that pass through, or are dropped
        return {}
    if hasattr(step, "build_analyzer"):
        return {name: Column(name, "BYTES", "") for name in names}
    if hasattr(step, "transformers_"):
        found: dict[str, Column] = {}
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
    """The names that a column transformer has picked: one, several, by number or by a mask."""
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


def _category(name: str, known: Any) -> Column:
    """A column by the categories that an encoder has seen in it."""
    values = known.tolist()
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return Column(name, "BYTES", texts[0])
    kind = next((type(value) for value in values if value is not None), float)
    datatype = {bool: "BOOL", int: "INT64"}.get(kind, "FP64")
    return Column(name, datatype, values[0] if datatype != "FP64" else 0)
