"""H2O's MOJO models: `model.zip`, scored by H2O in a Java virtual machine inside the worker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.ipc.elements import Array
from headrace.plugins.loaders.jvm import machine
from headrace.plugins.loaders.tabular import (
    LEAST_ROWS,
    DeclaredTensor,
    Feature,
    Tabular,
    Traits,
    model_class,
    needed,
    stacked,
    unreadable,
)

_CLASSES = ("Binomial", "Multinomial")


def load(document: dict[str, Any]) -> type[Any]:
    """The model class for a file; raises `ImportError` or `ValueError`."""
    jpype = machine(needed("h2o", "h2o"))
    path = Path(document["file"])
    try:
        model = jpype.JClass("hex.genmodel.MojoModel").load(str(path))
    except jpype.JException as error:
        raise unreadable(path.name, "an H2O MOJO", error) from error
    return model_class(Tabular(MOJOPredictor(jpype, model)), document, LEAST_ROWS)


class MOJOPredictor:
    """A MOJO as a predictor: `predict` is the class or the number, `predict_proba` the classes'.

    Raises `ValueError` for models that are neither classifiers nor regressions.
    """

    def __init__(self, jpype: Any, model: Any) -> None:
        kind = str(model.getModelCategory())
        if kind not in (*_CLASSES, "Regression"):
            raise ValueError(f"MOJOs of the category {kind} are not served")
        self._jpype, self._model = jpype, model
        names = [str(name) for name in model.getNames()][: model.nfeatures()]
        domains = [model.getDomainValues(index) for index in range(len(names))]
        self._categories = {
            name: {str(value): code for code, value in enumerate(domain)}
            for name, domain in zip(names, domains, strict=True)
            if domain is not None
        }
        columns = [Feature(n, "BYTES", "") if n in self._categories else Feature(n) for n in names]
        self._labels: Array | None = None
        outputs = [DeclaredTensor("predict", "FP64")]
        if kind in _CLASSES:
            labels = model.getDomainValues(model.getResponseIdx())
            self._labels = np.array([str(label) for label in labels], object)
            size = len(self._labels)
            outputs = [
                DeclaredTensor("predict", "BYTES"),
                DeclaredTensor("predict_proba", "FP64", (size,)),
            ]
        offered = [declared.name for declared in outputs]
        self.traits = Traits(columns, None, True, offered, offered, outputs)

    def from_matrix(self, array: Array) -> Any:
        """Not offered: columns have names and types of their own."""
        raise ValueError("a MOJO takes its columns by name")

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """A matrix with the codes of categories; unknown ones are missing, as in H2O."""
        return stacked(self.traits.columns, columns, rows, self._categories)

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Score the rows one by one, as the library does."""
        doubles = self._jpype.JArray(self._jpype.JDouble)
        size = self._model.getPredsSize()
        found = np.array([self._model.score0(doubles(row), doubles([0.0] * size)) for row in table])
        if self._labels is None:
            return {"predict": found[:, 0]}
        labels = self._labels[found[:, 0].astype(int)]
        return {"predict": labels, "predict_proba": found[:, 1:]}
