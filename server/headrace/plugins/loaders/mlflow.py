"""MLflow models of any flavour, as functions of a table: a folder with a file `MLmodel`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.ipc.elements import DTYPES, Array, datatype_of
from headrace.plugins.loaders.tabular import (
    INPUT,
    LEAST_ROWS,
    DeclaredTensor,
    Feature,
    Tabular,
    Traits,
    model_class,
    needed,
    unreadable,
)

_TYPES = {
    "boolean": "BOOL", "integer": "INT32", "long": "INT64", "float": "FP32", "double": "FP64",
    "string": "BYTES", "datetime": "BYTES",
}  # fmt: skip


def load(document: dict[str, Any]) -> type[Any]:
    """The model class for a folder; raises `ImportError` or `ValueError`."""
    if not document["trusted"]:
        raise PermissionError("this MLflow model is not trusted")
    pyfunc = needed("mlflow.pyfunc", "mlflow-skinny")
    pandas = needed("pandas", "pandas")
    folder = Path(document["file"]).parent
    try:
        model = pyfunc.load_model(str(folder))
    except Exception as error:
        raise unreadable(folder.name, "an MLflow model", error) from error
    return model_class(Tabular(Function(model, pandas)), document, LEAST_ROWS)


class Function:
    """An MLflow model as a predictor, by its signature.

    Each column of a returned data frame becomes an output, any other result the output `predict`.
    """

    def __init__(self, model: Any, pandas: Any) -> None:
        """Raises `ValueError` for types that are not tensors."""
        self._model, self._pandas = model, pandas
        signature = model.metadata.signature
        inputs = signature.inputs.inputs if signature is not None and signature.inputs else []
        outputs = signature.outputs.inputs if signature is not None and signature.outputs else []
        self._tensors = bool(inputs) and signature.inputs.is_tensor_spec()
        self._dates = {i.name for i in inputs if not self._tensors and i.type.name == "datetime"}
        named = bool(inputs) and signature.inputs.has_input_names()
        columns = [_column(spec) for spec in inputs] if named else []
        matrix: DeclaredTensor | None = None
        if len(inputs) == 1 and not named:
            found = _column(inputs[0])
            matrix = DeclaredTensor(INPUT, found.datatype, found.dims)
        elif not named:
            matrix = DeclaredTensor(INPUT, "FP64", (len(inputs) or -1,))
        given = [replace(_column(s).declared, name=s.name or "predict") for s in outputs]
        names = [declared.name for declared in given] or ["predict"]
        self.traits = Traits(columns, matrix, named, names, names, given)

    def from_matrix(self, array: Array) -> Any:
        """A tensor, unchanged, or a data frame without names."""
        return array if self._tensors else self._pandas.DataFrame(array.reshape(len(array), -1))

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """A data frame, or tensors by name; absent columns stay absent."""
        given = {c.name: columns[c.name] for c in self.traits.columns if c.name in columns}
        if self._tensors:
            return given
        for name in self._dates & given.keys():
            given[name] = self._pandas.to_datetime(given[name])
        return self._pandas.DataFrame(given)

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Compute the whole prediction."""
        found = self._model.predict(table)
        if isinstance(found, self._pandas.DataFrame) and list(names) != ["predict"]:
            return {name: found[name].to_numpy() for name in names}
        if isinstance(found, Mapping):
            return {name: found[name] for name in names}
        return {names[0]: found.to_numpy() if hasattr(found, "to_numpy") else found}


def _column(spec: Any) -> Feature:
    """A column or tensor of a signature."""
    name = spec.name or ""
    if hasattr(spec, "shape"):
        dtype = spec.type
        datatype = datatype_of(dtype)
        if datatype is None:
            raise ValueError(f"'{name}' is {dtype}, which is no tensor of the protocol")
        sample: Any = "" if datatype == "BYTES" else 0
        return Feature(name, datatype, sample, tuple(spec.shape[1:]) or (1,), not spec.required)
    kind = getattr(spec.type, "name", str(spec.type))
    if kind not in _TYPES:
        raise ValueError(f"'{name}' is of the type {kind}, which is no tensor of the protocol")
    datatype = _TYPES[kind]
    sample = {"datetime": "2000-01-01", "string": ""}.get(kind, DTYPES[datatype].type(0))
    return Feature(name, datatype, sample, (1,), not spec.required)
