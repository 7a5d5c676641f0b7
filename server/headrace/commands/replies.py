"""What a model has answered, for people, as JSON, and as files."""

import base64
import json
import math
import re
import statistics
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.client.server import Document
from headrace.commands.remote import CommandFailed
from headrace.commands.text import duration, printable, table
from headrace.core.call import InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor, brackets

_SHOWN = 128  # elements that are printed, of more the first and last
_QUANTILES = (("p50", 50), ("p90", 90), ("p99", 99))


def reply_lines(reply: InferResponse, classified: Container[str], width: int) -> list[str]:
    """The reply for a terminal with `width` columns; `classified` outputs hold classes."""
    heads = [(t.name, f"{t.datatype} {brackets(t.array.shape)}") for t in reply.outputs]
    lines = table(("", ""), heads)[1:]
    shown: list[str] = []
    for line, tensor in zip(lines, reply.outputs, strict=True):
        if tensor.name in classified and tensor.array.ndim:
            shown += [line, *_class_lines(tensor)]
            continue
        texts = _array_lines(tensor, width - 2)
        if len(texts) == 1 and len(line) + 2 + len(texts[0]) <= width:
            shown.append(f"{line}  {texts[0]}")
        else:
            shown += [line, *(f"  {text}" for text in texts)]
    shown += [f"parameter {name} = {json.dumps(v)}" for name, v in reply.parameters.items()]
    return shown


def timing_line(seconds: Sequence[float]) -> str:
    """How long requests took."""
    if len(seconds) == 1:
        return duration(seconds[0])
    found = _timing(seconds)
    names = ("mean", "p50", "p90", "p99", "max")
    parts = [f"{name} {duration(found[f'{name}_seconds'])}" for name in names]
    return f"{len(seconds)} requests: {', '.join(parts)}"


def reply_document(reply: InferResponse, seconds: Sequence[float]) -> Document:
    """The protocol's response, and how long requests took."""
    return {
        "model_name": reply.model_name,
        "model_version": reply.model_version,
        "id": reply.id,
        "parameters": dict(reply.parameters),
        "outputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": list(tensor.array.shape),
                "data": [_json_value(item) for item in tensor.array.ravel().tolist()],
            }
            for tensor in reply.outputs
        ],
        "timing": _timing(seconds),
    }


def save(reply: InferResponse, folder: Path) -> list[Path]:
    """Write each output as an .npy file; raises `CommandFailed`."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for tensor in reply.outputs:
            path = folder / f"{_file_name(tensor.name)}.npy"
            if path in written:
                raise CommandFailed(f"two outputs would be written to {path}")
            np.save(path, _plain(tensor), allow_pickle=False)
            written.append(path)
    except OSError as error:
        raise CommandFailed(f"{error.filename or folder}: {error.strerror}") from None
    return written


def _file_name(output: str) -> str:
    """The name is the model's: nothing in it may lead out of the folder."""
    return re.sub(r"[^\w.-]", "_", output).lstrip(".") or "_"


def _plain(tensor: Tensor) -> Array:
    """An array that .npy can hold."""
    if tensor.datatype is Datatype.BF16:
        return np.asarray(tensor.array).astype(np.float32)  # the same values
    if tensor.datatype is not Datatype.BYTES:
        return np.asarray(tensor.array)
    items: list[bytes] = tensor.array.ravel().tolist()
    if any(item.endswith(b"\0") for item in items):
        raise CommandFailed(
            f"output {tensor.name!r} cannot be saved: in .npy, texts cannot end with zero bytes"
        )
    return np.array(items, f"S{max(map(len, items), default=1) or 1}").reshape(tensor.array.shape)


def _timing(seconds: Sequence[float]) -> Document:
    ranked = sorted(seconds)
    found: Document = {"requests": len(seconds), "mean_seconds": statistics.fmean(seconds)}
    for name, percent in _QUANTILES:
        found[f"{name}_seconds"] = ranked[math.ceil(len(ranked) * percent / 100) - 1]
    return found | {"max_seconds": ranked[-1]}


def _json_value(item: Any) -> Any:
    """Texts as texts, other bytes as base64; what JSON has no number for as a text."""
    if isinstance(item, bytes):
        try:
            return item.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(item).decode()}
    if isinstance(item, float) and not math.isfinite(item):
        return "NaN" if item != item else "Infinity" if item > 0 else "-Infinity"
    return item


def _array_lines(tensor: Tensor, width: int) -> list[str]:
    array = np.asarray(tensor.array)
    form: Any = None
    if tensor.datatype is Datatype.BYTES:
        texts: list[str] = [
            item.decode("utf-8", "backslashreplace") for item in array.ravel().tolist()
        ]
        if len(texts) == 1:
            return printable(texts[0]).split("\n")
        array = np.array([json.dumps(text, ensure_ascii=False) for text in texts], object)
        array = array.reshape(tensor.array.shape)
        form = {"object": str}
    elif tensor.datatype is Datatype.BF16:
        array = array.astype(np.float32)
    if array.size == 1 and array.ndim:
        return [str(array.ravel()[0])]
    text: str = np.array2string(
        array, width, precision=6, suppress_small=True, threshold=_SHOWN, formatter=form
    )
    return text.splitlines()


def _class_lines(tensor: Tensor) -> list[str]:
    """Rows of `score:index` or `score:index:label`, the best first."""
    rows: list[list[bytes]] = np.asarray(tensor.array).reshape(-1, tensor.array.shape[-1]).tolist()
    lines: list[str] = []
    for number, row in enumerate(rows):
        if len(rows) > 1:
            lines.append(f"  row {number}")
        parts = [printable(item.decode("utf-8", "backslashreplace")).split(":", 2) for item in row]
        cells = [("  " + p[0], *p[1:], *[""] * (3 - len(p))) for p in parts]
        lines += table(("  SCORE", "CLASS", "LABEL"), cells, right="  SCORE CLASS")
    return lines
