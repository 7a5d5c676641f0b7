"""What stands on the command line of `headrace infer`, as the inputs of a model.

A value is a file, told by its suffix, or JSON, or for a BYTES input the text itself.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.client.inference import cast
from headrace.client.signature import Declared, fit, random
from headrace.commands.images import ImageOptions
from headrace.commands.input_files import (
    file_of,
    open_archive,
    parse_json,
    read_cells,
    read_file,
    read_member,
    read_rows,
    read_standard_input,
    read_text,
    to_array,
)
from headrace.commands.remote import CommandFailed
from headrace.core.call import Parameter
from headrace.core.datatypes import BY_NAME, Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Array, Tensor, element_count


@dataclass(frozen=True, slots=True)
class Random:
    """How to make up inputs: so many rows, and the shapes of some inputs."""

    rows: int = 1
    seed: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Given:
    """What has been read so far; what a whole request in JSON says beside its inputs, too."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    request_id: str = ""


class Reader:
    """Reads inputs of one model; every method raises `CommandFailed`."""

    def __init__(
        self, model: str, inputs: Mapping[str, Declared], images: ImageOptions | None = None
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._images = images or ImageOptions()

    def read(
        self,
        whole: str | None,
        named: Sequence[tuple[str, str]],
        make_up: Random | None = None,
    ) -> Given:
        """All inputs: `whole` is for several, `named` are single ones; `make_up` is for others."""
        given = Given()
        for name, text in named:
            declared = self._declared(name)
            self._add(given, declared, self._value(text, declared))
        if whole is not None:
            self._whole(given, whole)
        missing = [
            declared
            for declared in self._inputs.values()
            if declared.name not in given.tensors and not declared.optional
        ]
        if make_up is not None:
            for name in make_up.shapes:
                self._declared(name)
            generator = np.random.default_rng(make_up.seed)
            for declared in missing:
                shape = make_up.shapes.get(declared.name)
                array = random(declared, generator, make_up.rows, shape)
                given.tensors[declared.name] = Tensor(declared.name, declared.datatype, array)
        elif missing:
            raise CommandFailed(
                f"nothing is given for {', '.join(map(str, missing))};"
                f" --input {missing[0].name}=VALUE gives it, --random makes it up"
            )
        return given

    def _declared(self, name: str) -> Declared:
        found = self._inputs.get(name)
        if found is None:
            near = difflib.get_close_matches(name, self._inputs, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self._inputs)}"
            raise CommandFailed(f"{self._model} has no input {name!r}; {hint}")
        return found

    def _add(self, given: Given, declared: Declared, array: Array) -> None:
        name = declared.name
        if name in given.tensors:
            raise CommandFailed(f"input {name!r} is given twice")
        try:
            fitting = fit(cast(array, declared.datatype), declared)
        except ValueError as error:
            raise CommandFailed(f"input {name!r}: {error}") from None
        given.tensors[name] = Tensor(name, declared.datatype, fitting)

    # --- several inputs at once

    def _whole(self, given: Given, text: str) -> None:
        path = file_of(text)
        if path is not None and path.suffix == ".npz":
            with open_archive(path) as arrays:
                for name in arrays.files:
                    self._add(given, self._declared(name), read_member(path, arrays, name))
        elif text == "-" or text.lstrip()[:1] in ("{", "["):
            where = "standard input" if text == "-" else "the JSON on the command line"
            text = read_standard_input() if text == "-" else text
            if text.lstrip()[:1] in ("{", "["):
                self._document(given, parse_json(text, where), where)
            else:
                declared = self._only(given)
                self._add(given, declared, self._inline(text, declared))
        elif path is not None and path.suffix == ".json":
            self._document(given, parse_json(read_text(path), str(path)), str(path))
        elif path is not None and path.suffix == ".csv" and len(self._left(given)) > 1:
            self._table(given, path)
        else:
            declared = self._only(given)
            self._add(given, declared, self._value(text, declared))

    def _left(self, given: Given) -> list[Declared]:
        return [
            declared
            for declared in self._inputs.values()
            if declared.name not in given.tensors and not declared.optional
        ]

    def _only(self, given: Given) -> Declared:
        """The input that a value without a name is for."""
        left = self._left(given)
        if len(left) == 1:
            return left[0]
        if not left:
            raise CommandFailed("every input is given by --input: there is none left for VALUE")
        names = ", ".join(declared.name for declared in left)
        raise CommandFailed(
            f"{self._model} has {len(left)} inputs to be given ({names}): --input NAME=VALUE"
            " gives one"
        )

    def _document(self, given: Given, document: Any, where: str) -> None:
        """JSON for all inputs: a request of the protocol, values by name, or the only input's."""
        if not isinstance(document, dict):
            declared = self._only(given)
            self._add(given, declared, to_array(document, declared))
        elif isinstance(document.get("inputs"), list) and "inputs" not in self._inputs:
            try:
                self._request(given, document)
            except (AttributeError, KeyError, TypeError, ValueError, ServerError) as error:
                text = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise CommandFailed(f"{where}: not an inference request: {text}") from None
        else:
            for name, value in document.items():
                declared = self._declared(name)
                self._add(given, declared, to_array(value, declared))

    def _request(self, given: Given, document: Mapping[str, Any]) -> None:
        """As it says: what is wrong with it, the server is to say."""
        for item in document["inputs"]:
            name, data = str(item["name"]), item["data"]
            if "shape" not in item or "datatype" not in item:
                declared = self._declared(name)
                self._add(given, declared, to_array(data, declared))
                continue
            datatype = BY_NAME.get(item["datatype"])
            if datatype is None:
                raise CommandFailed(f"input {name!r}: there is no datatype {item['datatype']!r}")
            array = to_array(data, Declared(name, datatype, ()))
            count = element_count(name, item["shape"])
            if array.size != count:
                raise CommandFailed(
                    f"input {name!r}: shape {item['shape']} has {count} elements,"
                    f" there are {array.size}"
                )
            given.tensors[name] = Tensor(name, datatype, array.reshape(item["shape"]))
        for item in document.get("outputs", ()):
            given.outputs.append(item["name"])
            if classes := item.get("parameters", {}).get("classification"):
                given.classes[item["name"]] = classes
        given.request_id = str(document.get("id", ""))
        given.parameters.update(document.get("parameters", {}))
        given.parameters.pop("binary_data_output", None)

    def _table(self, given: Given, path: Path) -> None:
        """Columns named like inputs; several of one name are that input's, side by side."""
        names, *rows = read_rows(path)
        columns: dict[str, list[int]] = {}
        for column, name in enumerate(names):
            columns.setdefault(name.strip(), []).append(column)
        for name, places in columns.items():
            declared = self._declared(name)
            cells = [[row[place] for place in places] for row in rows]
            self._add(given, declared, read_cells(path, cells, declared))

    # --- one input

    def _value(self, text: str, declared: Declared) -> Array:
        if text == "-":
            return self._inline(read_standard_input(), declared)
        if (path := file_of(text)) is not None:
            return read_file(path, declared, self._images)
        return self._inline(text, declared)

    def _inline(self, text: str, declared: Declared) -> Array:
        """JSON, or for a BYTES input the text itself."""
        takes_text = declared.datatype is Datatype.BYTES
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if takes_text:
            return to_array(value if isinstance(value, str | list) else text, declared)
        if isinstance(value, bool | int | float | list):
            return to_array(value, declared)
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise CommandFailed(
            f"input {declared.name!r}: {shown!r} is neither a file nor a number or array in JSON;"
            f" expected {declared}"
        )
