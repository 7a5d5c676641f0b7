"""Models of tables: rows of features in, a prediction for each row out.

A predictor takes its features as one matrix, or each column as an input of its own. A table of
numbers is a matrix unless the configuration declares columns; where a column is no number, each is
an input.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from headrace.workers.elements import DTYPES, Array, datatype_of
from headrace.workers.loaders.rows import Declared, fill, fitted, log

INPUT = "input-0"  # what KServe's examples call it
LEAST_ROWS = 4096  # of a batch: rows of a table cost little


@dataclass(frozen=True, slots=True)
class Column:
    """A feature under its name. `sample` is a value that the model knows what to do with."""

    name: str
    datatype: str = "FP64"
    sample: Any = 0
    dims: tuple[int, ...] = (1,)
    optional: bool = False

    @property
    def declared(self) -> Declared:
        """It as an input."""
        return Declared(self.name, self.datatype, self.dims, self.optional)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a predictor takes and gives.

    `columns` are in the order of training, and empty where nobody knows their names. `matrix` is
    the one input that stands for all of them; None where that cannot be. `by_column` says which of
    the two is offered. `names` are all outputs that it has, `offered` those that are declared for
    it, and `outputs` is what it says of these, empty where it says nothing.
    """

    columns: Sequence[Column]
    matrix: Declared | None
    by_column: bool
    names: Sequence[str]
    offered: Sequence[str]
    outputs: Sequence[Declared] = ()


class Predictor(Protocol):
    """What a library makes of a file."""

    traits: Traits

    def from_matrix(self, array: Array) -> Any:
        """The table of a matrix of rows."""

    def from_columns(self, columns: Mapping[str, Array], rows: int) -> Any:
        """The table of columns, of which optional ones may be absent."""

    def run(self, table: Any, names: Sequence[str]) -> Mapping[str, Any]:
        """Outputs by name."""


class Tabular:
    """A predictor as an artefact."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._traits = traits = predictor.traits
        self._columns = {column.name: column for column in traits.columns}
        self._matrix: str | None = None  # the name of the input that is the whole table
        self._outputs: dict[str, str] = {}  # the predictor's names by the configuration's

    def complete(self, config: dict[str, Any], lead: Sequence[int]) -> None:
        """Declare a matrix or columns, and what comes of a sample; raises `ValueError`."""
        traits = self._traits
        given = [tensor["name"] for tensor in config.get("input", ())]
        offer = traits.matrix
        self._matrix = None if traits.by_column or offer is None else offer.name
        if given:
            self._matrix = self._whole(given)
        if self._matrix is None or offer is None:
            fill(config, "input", [column.declared for column in traits.columns], lead)
        else:
            fill(config, "input", [replace(offer, name=self._matrix)], lead)
        outputs = config.get("output", ())
        if outputs and all(
            tensor.get("dims") and tensor.get("data_type") not in (None, "TYPE_INVALID")
            for tensor in outputs
        ):
            return
        self._name_outputs([tensor["name"] for tensor in outputs])
        names = self._outputs or {name: name for name in traits.offered}
        known = {d.name: d for d in traits.outputs} or self._told(names.values())
        found = [
            Declared(own, known[name].datatype, known[name].dims)
            for own, name in names.items()
            if name in known
        ]
        fill(config, "output", found, lead)

    def bind(self, inputs: Sequence[Declared], outputs: Sequence[Declared], device: str) -> None:
        """Decide how inputs make a table; raises `ValueError`."""
        if device != "cpu":
            log.warning("this model runs on the CPU; its instance group asks for a GPU")
        matrix = self._traits.matrix
        self._matrix = self._whole([declared.name for declared in inputs])
        if self._matrix is None:
            self._check_columns({declared.name for declared in inputs})
        elif matrix is not None:
            _check_matrix(inputs[0], matrix)
        self._name_outputs([declared.name for declared in outputs])
        sample = self._sample()
        if sample is None:
            return
        try:
            found = self.run(sample, [declared.name for declared in outputs], 1)
        except Exception as error:  # it may be the sample that is of no use
            log.warning("a row of zeros cannot be predicted: %s", error)
            return
        for declared in outputs:
            fitted(found[declared.name], declared, 1)

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str], rows: int) -> dict[str, Any]:
        """The wanted outputs of a table."""
        predictor = self._predictor
        if self._matrix is not None:
            table = predictor.from_matrix(inputs[self._matrix])
        else:
            columns = {
                name: array.reshape(rows) if self._columns[name].dims == (1,) else array
                for name, array in inputs.items()
            }
            table = predictor.from_columns(columns, rows)
        names = dict.fromkeys(self._outputs[name] for name in wanted)
        found = predictor.run(table, list(names))
        return {name: found[self._outputs[name]] for name in wanted}

    def _whole(self, names: Sequence[str]) -> str | None:
        """The input that is the whole table, of those that are declared; None if they are columns.

        Raises `ValueError` if they can be neither.
        """
        unknown = [name for name in names if name not in self._columns]
        if not unknown and names:
            return None
        if len(names) == 1 and self._traits.matrix is not None:
            return names[0]
        if not self._columns:
            raise ValueError(
                "the model does not know the names of its columns: declare one input for all of"
                f" them, got {', '.join(names)}"
            )
        known = ", ".join(list(self._columns)[:20])
        raise ValueError(f"the model has no column '{unknown[0]}'; it has {known}")

    def _check_columns(self, given: Collection[str]) -> None:
        required = [c.name for c in self._columns.values() if not c.optional]
        missing = [name for name in required if name not in given]
        if missing:
            raise ValueError(
                f"the model also needs the columns {', '.join(missing)}: declare them, as optional"
                " if they may be left out"
            )

    def _name_outputs(self, names: Sequence[str]) -> None:
        """Find what is meant by the outputs that are declared; raises `ValueError`."""
        known = self._traits.names
        unknown = [name for name in names if name not in known]
        if len(names) == 1 and unknown:
            self._outputs = {names[0]: self._traits.offered[0]}
            return
        if unknown:
            raise ValueError(f"the model has no output '{unknown[0]}'; it has {', '.join(known)}")
        self._outputs = {name: name for name in names}

    def _sample(self) -> dict[str, Array] | None:
        """Inputs of one row; None if nobody knows how they look."""
        matrix, offer = self._matrix, self._traits.matrix
        if matrix is None:
            return {c.name: _filled(c.declared, c.sample) for c in self._traits.columns}
        if offer is None or any(d < 0 for d in offer.dims):
            return None
        return {matrix: _filled(offer, "" if offer.datatype == "BYTES" else 0)}

    def _told(self, names: Iterable[str]) -> dict[str, Declared]:
        """What outputs look like, by a sample; raises `ValueError` if it cannot be told."""
        sample = self._sample()
        if sample is None:
            raise ValueError("the model does not say what it takes: declare input and output")
        known = self._outputs
        self._outputs = {name: name for name in names}
        try:
            found = self.run(sample, list(names), 1)
        except Exception as error:
            raise ValueError(
                "what the model gives cannot be told, because it cannot predict a row of zeros:"
                f" declare its outputs ({type(error).__name__}; the log has details)"
            ) from error
        finally:
            self._outputs = known
        told = {}
        for name, result in found.items():
            if isinstance(result, list):
                continue  # several arrays under one name are no tensor
            array = np.asarray(result)
            datatype = datatype_of(array.dtype)
            if datatype is not None:
                told[name] = Declared(name, datatype, array.shape[1:] or (1,))
        return told


def stacked(
    columns: Sequence[Column],
    given: Mapping[str, Array],
    rows: int,
    categories: Mapping[str, Mapping[Any, int]],
) -> Array:
    """Columns as a matrix in the order of training, with the numbers of categories.

    What is absent, and a category that is not known, is NaN.
    """
    matrix = np.full((rows, len(columns)), np.nan)
    for index, column in enumerate(columns):
        values: Any = given.get(column.name)
        if values is None:
            continue
        if (known := categories.get(column.name)) is not None:
            values = [known.get(value, np.nan) for value in values.tolist()]
        matrix[:, index] = values
    return matrix


def _check_matrix(declared: Declared, offer: Declared) -> None:
    if (declared.datatype == "BYTES") != (offer.datatype == "BYTES"):
        raise ValueError(
            f"the model takes {offer.datatype} for '{declared.name}', the configuration says"
            f" {declared.datatype}"
        )
    sizes = [np.prod(dims, dtype=int) for dims in (declared.dims, offer.dims)]
    if min(*declared.dims, *offer.dims, 0) >= 0 and sizes[0] != sizes[1]:
        raise ValueError(
            f"the model takes {sizes[1]} features a row, the configuration says"
            f" dims {list(declared.dims)} for '{declared.name}'"
        )


def _filled(declared: Declared, value: Any) -> Array:
    shape = (1, *(max(d, 1) for d in declared.dims))
    return np.full(shape, value, DTYPES[declared.datatype])
