"""The request of `headrace infer`, from its options to the printed response."""

import argparse
import base64
import json
import math
import re
import shutil
import statistics
import sys
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.api.operations import Document
from headrace.cli.commands.infer_inputs import Given, ImageOptions, Random, Reader
from headrace.cli.remote import CommandFailed, print_json
from headrace.cli.text import duration, printable, table
from headrace.client.division import divided
from headrace.client.http import flat_document
from headrace.client.transport import InferRequest
from headrace.client.values import Signature
from headrace.core.call import InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Array, Tensor, brackets

if TYPE_CHECKING:
    from headrace.client.blocking import Client

_FLOATS = (Datatype.FP32, Datatype.FP64)


def infer(options: argparse.Namespace, server: "Client") -> int:
    """Send the request of the command line, and print the response."""
    model, version = options.model, options.version or ""
    known = server.signature(model, version)
    images = ImageOptions(options.layout, options.scale, options.mean, options.std)
    make_up = Random(options.rows, options.seed, dict(options.shape)) if options.random else None
    reader = Reader(model, known.inputs, images, options.format or "")
    given = reader.read(options.data, options.input, make_up)
    given.parameters.update(options.parameter)
    if options.id is not None:
        given.request_id = options.id
    if options.stream or known.decoupled:
        return _stream(options, server, given, known)
    question = _question(options, given, known)
    parts = len(divided(question, known.most_rows))
    if parts > 1:
        print(
            f"asked in {parts} requests: {model} takes {known.most_rows} rows at a time",
            file=sys.stderr,
        )
    seconds = []
    reply: InferResponse
    for _ in range(options.repeat):
        started = time.perf_counter()
        reply = server.send(question).response
        seconds.append(time.perf_counter() - started)
    written = save(reply, Path(options.save)) if options.save is not None else []
    if options.json:
        print_json(reply_document(reply, seconds))
        return 0
    print(f"{reply.model_name} version {reply.model_version}, {timing_line(seconds)}")
    width = shutil.get_terminal_size().columns
    print(*reply_lines(reply, question.classes, width), sep="\n")
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _question(options: argparse.Namespace, given: Given, known: Signature) -> InferRequest:
    outputs = options.output or given.outputs
    classes = dict(given.classes)
    if options.classes:
        if not outputs:
            outputs = list(known.outputs)
            best = [name for name in outputs if known.outputs[name].datatype in _FLOATS]
            if not best:
                raise CommandFailed(f"{options.model} has no outputs of floats to take classes of")
        else:
            best = outputs
        classes = dict.fromkeys(best, options.classes)
    return InferRequest(
        options.model, list(given.tensors.values()), outputs, classes, given.parameters,
        given.request_id, options.version or "",
    )  # fmt: skip


def _stream(options: argparse.Namespace, server: "Client", given: Given, known: Signature) -> int:
    """Print each response as it arrives: texts concatenated, other responses on a line each."""
    for name in ("classes", "save"):
        if getattr(options, name) is not None:
            raise CommandFailed(
                f"--{name} is not for streams"
                + ("" if options.stream else f", and {options.model} answers in a stream")
            )
    wanted = options.output or given.outputs or list(known.outputs)
    texts = len(wanted) == 1 and (
        wanted[0] in known.outputs and known.outputs[wanted[0]].datatype is Datatype.BYTES
    )
    document = flat_document(list(given.tensors.values()), given.parameters, given.request_id)
    for _ in range(options.repeat):
        count = 0
        started = time.perf_counter()
        try:
            for response in server.generate_stream(
                options.model, document, version=options.version or ""
            ):
                count += 1
                _print_response(response, wanted, options.json, texts)
        finally:
            if texts and count and not options.json:
                print(flush=True)
        if not options.json:
            taken_secs = time.perf_counter() - started
            print(f"{count} responses, {timing_line([taken_secs])}", file=sys.stderr)
    return 0


def _print_response(response: Document, wanted: list[str], as_json: bool, texts: bool) -> None:
    if as_json:
        print(json.dumps(response, ensure_ascii=False), flush=True)
    elif texts:
        value = response.get(wanted[0], "")
        text = value if isinstance(value, str) else "\n".join(map(str, value))
        print(printable(text), end="", flush=True)
    else:
        shown = {name: response[name] for name in wanted if name in response}
        print(json.dumps(shown, ensure_ascii=False), flush=True)


# --- responses

_SHOWN = 128  # elements printed; of larger tensors the first and last
_QUANTILES = (("p50", 50), ("p90", 90), ("p99", 99))


def reply_lines(reply: InferResponse, classified: Container[str], width: int) -> list[str]:
    """A response for a terminal of `width` columns; `classified` outputs contain classes."""
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
    """The duration of requests, with quantiles if there are several."""
    if len(seconds) == 1:
        return duration(seconds[0])
    found = _timing(seconds)
    names = ("mean", "p50", "p90", "p99", "max")
    parts = [f"{name} {duration(found[f'{name}_seconds'])}" for name in names]
    return f"{len(seconds)} requests: {', '.join(parts)}"


def reply_document(reply: InferResponse, seconds: Sequence[float]) -> Document:
    """The protocol's response, with the requests' durations."""
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
            np.save(path, _saved(tensor), allow_pickle=False)
            written.append(path)
    except OSError as error:
        raise CommandFailed(f"{error.filename or folder}: {error.strerror}") from None
    return written


def _file_name(output: str) -> str:
    """A file name for an output, which cannot leave the folder: the name is the model's."""
    return re.sub(r"[^\w.-]", "_", output).lstrip(".") or "_"


def _saved(tensor: Tensor) -> Array:
    """The tensor in a form that .npy can store."""
    if tensor.datatype is Datatype.BF16:
        return np.asarray(tensor.array).astype(np.float32)  # float32 has the same values
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
    """Text as a string, other bytes as base64, non-finite numbers as text."""
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
    """Lines for rows of `score:index` or `score:index:label`, highest first."""
    rows: list[list[bytes]] = np.asarray(tensor.array).reshape(-1, tensor.array.shape[-1]).tolist()
    lines: list[str] = []
    for number, row in enumerate(rows):
        if len(rows) > 1:
            lines.append(f"  row {number}")
        parts = [printable(item.decode("utf-8", "backslashreplace")).split(":", 2) for item in row]
        cells = [("  " + p[0], *p[1:], *[""] * (3 - len(p))) for p in parts]
        lines += table(("  SCORE", "CLASS", "LABEL"), cells, right="  SCORE CLASS")
    return lines
