"""Inputs of a model from the command line of `headrace infer`: texts, JSON, files, random values.

Suffixes tell what files contain; pyarrow reads tables, Pillow images. The client converts values to
the declared datatypes and shapes. `read_inputs` raises `CommandFailed` with the source's name, and
the client's errors.
"""

import csv
import json
import re
import sys
from argparse import Namespace
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cli.remote import CommandFailed, content, parse_json
from headrace.client.tables import ColumnTable, pyarrow, table_of
from headrace.client.values import Declared, ModelSignature
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array

TABLES = ("csv", "tsv", "parquet", "feather", "arrow", "orc", "jsonl")
_IMAGES = ("bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp")
_SUFFIXES = ("json", "npy", "npz", *TABLES, *_IMAGES)
_MODULES = {"arrow": "feather", "jsonl": "json"}  # of pyarrow


def read_inputs(options: Namespace, known: ModelSignature) -> dict[str, Any]:
    """Values by the names of inputs: from `--input`, the positional VALUE, and `--random`."""
    found: dict[str, Any] = {}
    for name, text in options.input:
        inputs = [one for one in known.inputs.values() if one.name == name]
        value = _value(text, inputs, str | list, options) if inputs else text
        found[name] = value.get(name, value) if isinstance(value, dict) else value
    rest = [one for one in known.inputs.values() if one.name not in found]
    left = [one for one in rest if not one.optional]
    if options.data is not None and not rest:
        raise CommandFailed("every input is given by --input: there is none left for VALUE")
    if options.data is not None:
        inputs = left if len(left) == 1 else rest
        value = _value(options.data, inputs, str | list | dict, options)
        if len(inputs) == 1 and not isinstance(value, dict) and table_of(value) is None:
            value = {inputs[0].name: value}
        found = {**known.named(options.model, value), **found}
    if options.random:
        generator = np.random.default_rng(options.seed)
        found = {one.name: random_values(one, generator, options.rows) for one in left} | found
    return found


def random_values(declared: Declared, generator: np.random.Generator, rows: int) -> Array:
    """Floats from 0 to 1, integers from 0 to 9, or texts of eight letters.

    Variable dimensions other than that of rows are 1.
    """
    shape = [1 if size < 0 else size for size in declared.shape]
    shape[:1] = [rows] if declared.rows else shape[:1]
    kind = NUMPY[declared.datatype].kind
    if kind == "O":
        return generator.integers(97, 123, (*shape, 8), np.uint8).view("S8")[..., 0]
    if kind in "iub":
        return generator.integers(0, 2 if kind == "b" else 10, shape)
    return generator.random(shape)


def _value(text: str, inputs: list[Declared], types: Any, options: Namespace) -> Any:
    """The value that `text` is or names, for one of `inputs` or several.

    JSON of other `types` is text, if the only input takes text.
    """
    takes_text = [one.datatype for one in inputs] == [Datatype.BYTES]
    path = Path(text.removeprefix("@"))
    kind = path.suffix.lower()[1:]
    if text == "-" and takes_text and not options.format:
        text = sys.stdin.buffer.read().decode("utf-8-sig", "replace").removesuffix("\n")
    elif text == "-" or text.startswith("@") or kind in _SUFFIXES:
        data = sys.stdin.buffer.read() if text == "-" else content(path)
        kind = kind if kind in _SUFFIXES else options.format
        if takes_text and kind in ("", *_IMAGES):
            return data
        try:
            return _content(path, data, kind, inputs, options)
        except Exception as error:  # of csv, json, numpy, pyarrow, Pillow, zipfile or zlib
            raise CommandFailed(f"{path}: cannot be read: {error}") from None
    if takes_text:
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(text), types):
                return value
        return text
    return parse_json(text, f"{text[:60]!r}, which is no file")


def _content(path: Path, data: bytes, kind: str, inputs: list[Declared], options: Namespace) -> Any:
    """Data in a file of some kind; "" is JSON or CSV."""
    if kind in ("npy", "npz"):
        found = np.load(BytesIO(data), allow_pickle=False)
        return found if kind == "npy" else dict(found)
    if kind in _IMAGES:
        return read_image(path, inputs[0], options)
    if kind == "json" or (not kind and data.lstrip()[:1] in (b"{", b"[")):
        return json.loads(data)
    if kind in ("csv", "tsv", ""):
        return _separated(data, "\t" if kind == "tsv" else ",", inputs)
    source = pyarrow().BufferReader(data)
    module = import_module(f"pyarrow.{_MODULES.get(kind, kind)}")
    return module.read_json(source) if kind == "jsonl" else module.read_table(source)


def _separated(data: bytes, separator: str, inputs: list[Declared]) -> Any:
    """A table of CSV, with or without a header.

    Cells of BYTES inputs are texts; others have the type that their column appears to have.
    """
    arrow, reader = pyarrow(), import_module("pyarrow.csv")
    first = data.partition(b"\n")[0].decode("utf-8-sig", "replace")
    names = [cell.strip() for row in csv.reader([first], delimiter=separator) for cell in row]
    known = {name for one in inputs for name in (one.name, *one.columns)}
    headed = len(inputs) != 1 or known >= {*names} or not (
        inputs[0].datatype == "BYTES" or any(re.match(r"(?i)[-+.]?\d|nan$", n) for n in names)
    )  # fmt: skip
    names = names if headed else [*map(str, range(len(names)))]
    # Integers beyond INT64 would be taken for doubles, which lose digits.
    types = {Datatype.BYTES: arrow.string(), Datatype.UINT64: arrow.uint64()}
    of = dict.fromkeys(names, inputs[0]) if len(inputs) == 1 else {one.name: one for one in inputs}
    table = reader.read_csv(
        arrow.BufferReader(data),
        reader.ReadOptions(column_names=names, skip_rows=int(headed), block_size=8 << 20),
        reader.ParseOptions(delimiter=separator, newlines_in_values=True),
        reader.ConvertOptions(
            column_types={n: types[i.datatype] for n, i in of.items() if i.datatype in types}
        ),
    )
    columns = dict(zip(names, table.columns, strict=True))
    return table if headed else ColumnTable(columns, table.num_rows, named=False)


def read_image(path: Path, declared: Declared, options: Namespace) -> Array:
    """The image in `path` as values of `declared`: (pixel * scale - mean) / std.

    Axes are CHW, unless only the last one can be that of channels.
    """
    dims = declared.shape[1:] if declared.rows else declared.shape[-3:]
    is_last = dims[:1] not in ((1,), (3,)) and dims[-1:] in ((1,), (3,), (4,))
    layout = options.layout or ("HW" if len(dims) == 2 else "HWC" if is_last else "CHW")
    axes = {"C": 1, **dict(zip(layout, dims, strict=False))}
    mode = {-1: "RGB", 1: "L", 3: "RGB", 4: "RGBA"}.get(axes["C"])
    if len(layout) != len(dims) or mode is None:
        raise ValueError(f"input {declared} is not plainly an image; --layout names its axes")
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise CommandFailed("it needs Pillow: pip install 'headrace[cli]'") from None
    # Cameras store the orientation separately.
    image = ImageOps.exif_transpose(Image.open(path)).convert(mode)
    wide, high = (axes[a] if axes[a] >= 0 else image.size["WH".index(a)] for a in "WH")
    pixels = np.asarray(image.resize((wide, high), Image.Resampling.BILINEAR))
    integers = NUMPY[declared.datatype].kind in "iub"
    scale = options.scale or (1 if integers else 1 / 255,)
    values: Array = (pixels.reshape(high, wide, -1) * scale - options.mean) / options.std
    values = np.rint(values) if integers else values
    values = np.squeeze(values, 2) if layout == "HW" else np.moveaxis(values, 2, layout.index("C"))
    return values if len(dims) == len(declared.shape) else values[np.newaxis]
