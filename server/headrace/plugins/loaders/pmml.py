"""PMML models: `model.pmml`, evaluated by JPMML in a Java virtual machine inside the worker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.ipc.elements import DTYPES, Array
from headrace.plugins.loaders.jvm import listed, machine
from headrace.plugins.loaders.tabular import (
    LEAST_ROWS,
    DeclaredTensor,
    Feature,
    RefusedInput,
    Tabular,
    Traits,
    model_class,
    needed,
    unreadable,
)

# The datatypes of PMML's own; dates and times are texts, as in PMML.
_DATATYPES = {
    "double": "FP64", "float": "FP32", "integer": "INT64", "boolean": "BOOL", "string": "BYTES",
}  # fmt: skip


def load(document: dict[str, Any]) -> type[Any]:
    """The model class for a file; raises `ImportError` or `ValueError`."""
    library = needed("jpmml_evaluator", "jpmml-evaluator")
    jpype = machine(library)
    backend = needed("jpmml_evaluator.jpype", "JPype1").JPypeBackend()
    path = Path(document["file"])
    try:
        evaluator = library.make_evaluator(path, backend=backend)
        evaluator.verify()  # computes the rows that the file has with it, and compares
    except (jpype.JException, library.JavaError) as error:
        raise unreadable(path.name, "a PMML model", error) from error
    return model_class(Tabular(PMMLPredictor(library, backend, evaluator)), document, LEAST_ROWS)


class PMMLPredictor:
    """An evaluator as a predictor: targets and output fields, by their names in the file."""

    def __init__(self, library: Any, backend: Any, evaluator: Any) -> None:
        self._library, self._backend, self._evaluator = library, backend, evaluator
        columns = [_column(field) for field in evaluator.getInputFields()]
        results = [*evaluator.getTargetFields(), *evaluator.getOutputFields()]
        self._outputs = {field.name: DeclaredTensor(field.name, _type(field)) for field in results}
        names = list(self._outputs)
        self.traits = Traits(columns, None, True, names, names, list(self._outputs.values()))

    def from_matrix(self, array: Array) -> Any:
        """Not offered: fields have names and types of their own."""
        raise ValueError("a PMML model takes its fields by name")

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """Columns as lists; absent fields, NaN and empty texts are missing values."""
        return {"columns": list(columns), "data": [listed(array) for array in columns.values()]}

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Evaluate the rows; a result without value is NaN, or an empty text.

        Raises `RefusedInput` for a row that the model refuses.
        """
        evaluate = self._library.PythonEvaluatorUtil.evaluateAll
        found = evaluate(self._backend, self._evaluator.javaEvaluator, table, None, 1)
        for row, error in enumerate(found["errors"] or ()):
            if error is not None:
                raise RefusedInput(f"row {row}: {_reason(str(error))}")
        results = dict(zip(found["columns"], found["data"], strict=True))
        return {name: _filled(self._outputs[name], results[name]) for name in names}


def _type(field: Any) -> str:
    return _DATATYPES.get(field.dataType, "BYTES")


def _column(field: Any) -> Feature:
    datatype = _type(field)
    return Feature(field.name, datatype, "" if datatype == "BYTES" else 0)


def _filled(declared: DeclaredTensor, values: Sequence[Any]) -> Array:
    if declared.datatype == "BYTES":
        return np.array(["" if value is None else str(value) for value in values], object)
    if declared.datatype in ("INT64", "BOOL") and None in values:
        raise ValueError(f"output '{declared.name}' has no value: declare it as TYPE_FP64")
    return np.array(
        [np.nan if value is None else value for value in values], DTYPES[declared.datatype]
    )


def _reason(text: str) -> str:
    """The first line of a Java exception without its class."""
    return text.partition("\n")[0].partition(": ")[2] or "the model refuses it"
