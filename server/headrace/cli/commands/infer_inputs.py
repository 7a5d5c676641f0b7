"""Inputs of a model from the command line of `headrace infer`.

A value is a file, recognised by its suffix, or JSON, or the text itself for a BYTES input. Files
are arrays, tables and images; each is converted to the declared form. Functions raise
`CommandFailed` that names the file and the problem.
"""

import difflib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.cli.commands.infer_tables import KINDS, Columns, kind_of, read_columns
from headrace.cli.remote import CommandFailed, content, parse_json
from headrace.client.tables import Table
from headrace.client.values import NULLS, Declared, cast, elements, fit, read_value
from headrace.core.call import Parameter
from headrace.core.datatypes import BY_NAME, NUMPY, Datatype
from headrace.core.errors import ServerError
from headrace.core.tensors import Array, Tensor, brackets, element_count
from headrace.ipc.elements import object_array

if TYPE_CHECKING:
    from PIL.Image import Image

_RANDOM_INTEGERS = 10  # exclusive
_RANDOM_LETTERS = 8


def random(
    declared: Declared, generator: np.random.Generator, rows: int, shape: Sequence[int] | None
) -> Array:
    """Random values in a valid shape, with 1 for variable dimensions.

    Floats are from 0 to 1, integers from 0 to 9, texts have eight letters. `shape` replaces the
    declared one, including rows.
    """
    full = tuple(1 if size < 0 else size for size in declared.shape)
    if declared.rows:
        full = (rows, *full[1:])
    if shape is not None:
        full = tuple(shape)
    dtype = NUMPY[declared.datatype]
    if declared.datatype is Datatype.BYTES:
        letters = generator.integers(97, 123, (math.prod(full), _RANDOM_LETTERS), np.uint8)
        return object_array([[row.tobytes() for row in letters]], full)
    if declared.datatype is Datatype.BOOL:
        return generator.integers(0, 2, full).astype(dtype)
    if dtype.kind in "iu":
        return generator.integers(0, _RANDOM_INTEGERS, full).astype(dtype)
    return generator.random(full).astype(dtype)


# --- images

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Conversion of pixels: (pixel * scale - mean) / std, a number for all channels or for each.

    An empty `layout` is derived from the shape; the default `scale` is 1/255 for floats, else 1.
    """

    layout: str = ""
    scale: float | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


def read_image(path: Path, declared: Declared, options: ImageOptions) -> Array:
    """The image in `path` as one row of `declared`; raises `CommandFailed`."""
    dims = declared.shape[1:] if declared.rows else declared.shape
    if not declared.rows and len(dims) == 4:
        dims = dims[1:]  # an undeclared batch dimension
    layout = options.layout or _layout(dims)
    if len(layout) != len(dims) or not layout:
        raise CommandFailed(
            f"input '{declared.name}' of shape {brackets(declared.shape)} is not plainly an image;"
            " --layout says which axis is what: HWC, CHW or HW"
        )
    axes = dict(zip(layout, dims, strict=True))
    channels = axes.get("C", 1)
    if channels not in (-1, *_MODES):
        raise CommandFailed(
            f"input '{declared.name}' of shape {brackets(declared.shape)} has {channels} channels"
            f" by layout {layout}; images have 1, 3 or 4"
        )
    with _opened(path) as image:
        image = image.convert(_MODES[3 if channels == -1 else channels])
        high, wide = axes["H"], axes["W"]
        wanted = (image.width if wide < 0 else wide, image.height if high < 0 else high)
        pixels = np.asarray(image if wanted == image.size else _resized(image, wanted))
    values = _normalised(pixels, declared, options)
    if layout == "CHW":
        values = values.transpose(2, 0, 1) if values.ndim == 3 else values[np.newaxis]
    elif layout == "HWC" and values.ndim == 2:
        values = values[:, :, np.newaxis]
    return values if len(dims) == len(declared.shape) else values[np.newaxis]


def _layout(dims: tuple[int, ...]) -> str:
    """The layout of an image's axes, if the number of channels determines it."""
    if len(dims) == 2:
        return "HW"
    if len(dims) != 3:
        return ""
    for channels in ((1, 3), (4,)):  # an image may be four pixels wide, but hardly three
        first, last = dims[0] in channels, dims[2] in channels
        if first != last:
            return "CHW" if first else "HWC"
    return ""


def _normalised(pixels: Array, declared: Declared, options: ImageOptions) -> Array:
    wanted = NUMPY[declared.datatype]
    floats = wanted.kind not in "iub"
    scale = options.scale if options.scale is not None else 1 / 255 if floats else 1.0
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    for name, given in (("--mean", options.mean), ("--std", options.std)):
        if len(given) not in (1, channels):
            raise CommandFailed(f"{name} has {len(given)} numbers for {channels} channels")
    values = (pixels * scale - np.array(options.mean)) / np.array(options.std)
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        values = np.rint(values).clip(limits.min, limits.max)
    result: Array = values.astype(wanted)
    return result


def _opened(path: Path) -> "Image":
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise CommandFailed(
            f"reading {path.name} needs Pillow: pip install 'headrace[cli]'"
        ) from None
    try:
        image = Image.open(path)
        # Cameras store the orientation separately.
        return ImageOps.exif_transpose(image)
    except UnidentifiedImageError:
        raise CommandFailed(f"{path}: not an image that Pillow can read") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise CommandFailed(f"{path}: {error}") from None


def _resized(image: "Image", size: tuple[int, int]) -> "Image":
    from PIL import Image

    return image.resize(size, Image.Resampling.BILINEAR)


# --- files

_TABLES = tuple(f".{kind}" for kind in KINDS)
KNOWN_SUFFIXES = (".json", ".npy", ".npz", *_TABLES, *SUFFIXES)


def file_of(text: str) -> Path | None:
    """The file that `text` names: after an @, or by its suffix."""
    if text.startswith("@"):
        return Path(text[1:])
    if "\n" in text or len(text) > 4096 or text.lstrip()[:1] in ("{", "[", '"'):
        return None
    path = Path(text)
    return path if path.suffix.lower() in KNOWN_SUFFIXES else None


def read_file(path: Path, declared: Declared, images: ImageOptions) -> Array:
    """The array in a file for one input, read according to its suffix."""
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return _array(path)
    if suffix == ".npz":
        with open_archive(path) as arrays:
            return read_member(path, arrays, declared.name)
    if suffix == ".json":
        return to_array(parse_json(read_text(path), str(path)), declared)
    if suffix in _TABLES:
        table = read_columns(content(path), suffix[1:], str(path), [declared])
        return input_array(table, declared, str(path))
    if declared.datatype is Datatype.BYTES:
        return np.array(content(path), object)
    if suffix in SUFFIXES:
        content(path)  # reports unreadable files
        return read_image(path, declared, images)
    raise CommandFailed(
        f"{path}: what it holds is told by its suffix; known are {' '.join(KNOWN_SUFFIXES)}"
    )


def read_standard_input() -> bytes:
    """Standard input."""
    return sys.stdin.buffer.read()


def as_text(data: bytes) -> str:
    """Text without the final line break."""
    return data.decode("utf-8-sig", "replace").removesuffix("\n")


def input_array(table: Columns, declared: Declared, where: str) -> Array:
    """A table for one input, whose columns are put in order if the model knows their names."""
    names = table.names
    if names is None or not declared.columns:
        columns = {str(place): column for place, column in enumerate(table.columns)}
        given = Table(columns, table.rows, named=False)
    else:
        given = Table(dict(zip(names, table.columns, strict=True)), table.rows)
        if len(given.columns) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise CommandFailed(f"{where}: there are several columns {twice!r}")
    try:
        array, _ = read_value(given, declared)
    except ValueError as error:
        raise CommandFailed(f"{where}: input {declared.name!r}: {error}") from None
    return array


def to_array(value: Any, declared: Declared) -> Array:
    """JSON values as an array of the declared datatype."""
    try:
        return elements(value, declared.datatype)
    except ValueError as error:
        raise CommandFailed(f"input {declared.name!r}: {error}") from None


def read_text(path: Path) -> str:
    """A text file."""
    return content(path).decode("utf-8-sig", "replace")


def _array(path: Path) -> Array:
    content(path)
    try:
        found: Array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise CommandFailed(f"{path}: not an array that can be read: {error}") from None
    return _texts(found)


def open_archive(path: Path) -> Any:
    """The arrays in an .npz file, as a context manager."""
    content(path)
    try:
        return np.load(path, allow_pickle=False)
    except Exception as error:  # including those of zipfile and zlib
        raise CommandFailed(f"{path}: not an archive that can be read: {error}") from None


def read_member(path: Path, arrays: Any, name: str) -> Array:
    """The array named `name`."""
    try:
        return _texts(arrays[name])
    except KeyError:
        raise CommandFailed(f"{path}: has no array {name!r}, only {arrays.files}") from None
    except ValueError as error:
        raise CommandFailed(f"{path}: array {name!r} cannot be read: {error}") from None


def _texts(array: Array) -> Array:
    return array.astype(object) if array.dtype.kind in "SU" else array


@dataclass(frozen=True, slots=True)
class Random:
    """Options of generated inputs: number of rows, and shapes of some inputs."""

    rows: int = 1
    seed: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Given:
    """The inputs read so far, with the other members of a JSON request."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    request_id: str = ""


class Reader:
    """Reads the inputs of one model; every method raises `CommandFailed`."""

    def __init__(
        self, model: str, inputs: Mapping[str, Declared], images: ImageOptions | None = None,
        form: str = "",
    ) -> None:  # fmt: skip
        """`form` is the kind of tables, "" if their name or content tells."""
        self._form = form
        self._model = model
        self._inputs = inputs
        self._images = images or ImageOptions()

    def read(
        self, whole: str | None, named: Sequence[tuple[str, str]], make_up: Random | None = None
    ) -> Given:
        """Read all inputs: `whole` has several, `named` are single ones, `make_up` the rest."""
        given = Given()
        for name, text in named:
            declared = self._declared(name)
            self._add(given, declared, self._value(text, declared))
        if whole is not None:
            self._whole(given, whole)
        missing = self._left(given)
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
        suffix = "" if path is None else path.suffix.lower()
        if text == "-":
            self._standard_input(given)
        elif path is not None and self._form:
            self._table(given, content(path), self._form, str(path))
        elif path is not None and suffix == ".npz":
            with open_archive(path) as arrays:
                for name in arrays.files:
                    self._add(given, self._declared(name), read_member(path, arrays, name))
        elif path is not None and suffix == ".json":
            self._document(given, parse_json(read_text(path), str(path)), str(path))
        elif path is not None and suffix in _TABLES:
            self._table(given, content(path), suffix[1:], str(path))
        elif text.lstrip()[:1] in ("{", "["):
            where = "the JSON on the command line"
            self._document(given, parse_json(text, where), where)
        else:
            declared = self._only(given)
            self._add(given, declared, self._value(text, declared))

    def _standard_input(self, given: Given) -> None:
        """Read JSON, a table, or the text for an input of BYTES."""
        data, where = read_standard_input(), "standard input"
        left = self._left(given)
        form = self._form or kind_of(data)
        if form:
            self._table(given, data, form, where)
        elif data.lstrip()[:1] in (b"{", b"["):
            self._document(given, parse_json(as_text(data), where), where)
        elif len(left) == 1 and left[0].datatype is Datatype.BYTES:
            self._add(given, left[0], self._inline(as_text(data), left[0]))
        else:
            self._table(given, data, "csv", where)

    def _left(self, given: Given) -> list[Declared]:
        return [
            declared
            for declared in self._inputs.values()
            if declared.name not in given.tensors and not declared.optional
        ]

    def _only(self, given: Given) -> Declared:
        """The input for a value without a name."""
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
        """Read JSON for all inputs: a request, values by name, or the only input's value."""
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
        """Read a request of the protocol; the server validates it."""
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

    def _table(self, given: Given, data: bytes, kind: str, where: str) -> None:
        """Read columns named like inputs, of which several may form one; or the only input."""
        left = self._left(given)
        if not left:
            self._only(given)
        several = len(left) > 1
        inputs = [*self._inputs.values()] if several else left
        table = read_columns(data, kind, where, inputs)
        names = [name.strip() for name in table.names or ()]
        if not (several or (names and {*names} <= {*self._inputs})):
            self._add(given, left[0], input_array(table, left[0], where))
            return
        parts: dict[str, list[Any]] = {}
        for name, column in zip(names, table.columns, strict=True):
            parts.setdefault(name, []).append(column)
        for name, columns in parts.items():
            declared = self._declared(name)
            values = {str(place): column for place, column in enumerate(columns)}
            nulls = None if name + NULLS in parts else self._inputs.get(name + NULLS)
            value = Table(values, table.rows, named=False) if len(columns) > 1 else columns[0]
            try:
                array, missing = read_value(value, declared, nulls is not None)
            except ValueError as error:
                raise CommandFailed(f"{where}: input {name!r}: {error}") from None
            self._add(given, declared, array)
            if missing is not None and nulls is not None:
                self._add(given, nulls, missing)

    # --- one input

    def _value(self, text: str, declared: Declared) -> Array:
        if text == "-":
            data = read_standard_input()
            form = self._form or kind_of(data)
            if not form:
                return self._inline(as_text(data), declared)
            table = read_columns(data, form, "standard input", [declared])
            return input_array(table, declared, "standard input")
        if (path := file_of(text)) is not None:
            return read_file(path, declared, self._images)
        return self._inline(text, declared)

    def _inline(self, text: str, declared: Declared) -> Array:
        """Read JSON, or the text itself for a BYTES input."""
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
