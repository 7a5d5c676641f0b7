"""The request of `headrace infer`, from its options to the printed response."""

import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from headrace.api.operations import Document
from headrace.cli.commands.infer_inputs import read_inputs
from headrace.cli.remote import CommandFailed, print_json
from headrace.cli.text import duration, printable, table
from headrace.client.blocking import Client
from headrace.client.http import flat_document
from headrace.client.transport import InferRequest, Result
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor, brackets
from headrace.protocol.elements import nested_json

_TIMES = ("mean", "p50", "p90", "p99", "max")


def infer(options: Namespace, server: Client) -> int:
    """Send the request of the command line, and print the response."""
    model, version, parameters = options.model, options.version or "", dict(options.parameter)
    known = server.signature(model, version)
    tensors = server.tensors(model, read_inputs(options, known), version)
    outputs = options.output or list(known.outputs)
    if options.stream or known.decoupled:
        if options.classes or options.save:
            raise CommandFailed(f"--classes and --save are not for streams, such as of {model}")
        kinds = [known.outputs[n].datatype if n in known.outputs else None for n in outputs]
        text = outputs[0] if kinds == [Datatype.BYTES] and not options.json else ""
        document = flat_document(tensors, parameters, options.id)
        for _ in range(options.repeat):
            responses = server.generate_stream(model, document, version=version)
            _print_stream(responses, text, options.output)
        return 0
    best = [n for n, one in known.outputs.items() if one.datatype in ("FP32", "FP64")] or outputs
    classes = dict.fromkeys(options.output or best, options.classes) if options.classes else {}
    request = InferRequest(model, tensors, outputs, classes, parameters, options.id, version)
    seconds = []
    for _ in range(options.repeat):
        started = time.perf_counter()
        result = server.send(request)
        seconds.append(time.perf_counter() - started)
    if options.save:
        _save(result.response.outputs, Path(options.save))
    _print_result(result, seconds, options.json)
    return 0


def _print_stream(responses: Iterable[Document], text: str, outputs: Sequence[str]) -> None:
    """Print each response as it arrives: only the output `text` unless "", else a line of JSON.

    Lines have these `outputs` only, if there are any.
    """
    for response in responses:
        shown = {name: response[name] for name in outputs or response if name in response}
        words = json.loads(json.dumps(shown), parse_constant=str)  # NaN is no JSON: "NaN"
        line = json.dumps(words, ensure_ascii=False) + "\n"
        pieces = np.ravel(response.get(text, ""))
        print(printable("".join(map(str, pieces))) if text else line, end="", flush=True)
    print(end="\n" if text else "")


def _print_result(result: Result, seconds: Sequence[float], as_json: bool) -> None:
    outputs = result.response.outputs
    quantiles = np.quantile(seconds, (0.5, 0.9, 0.99), method="inverted_cdf")
    times = dict(zip(_TIMES, (np.mean(seconds), *quantiles, max(seconds)), strict=True))
    if as_json:
        return print_json({
            "model_name": result.model, "model_version": result.version, "id": result.id,
            "parameters": result.parameters,
            "outputs": [
                {"name": name, "datatype": datatype, "shape": array.shape,
                 "data": json.loads(nested_json(datatype, np.ravel(array)), parse_constant=str)}
                for name, datatype, array in outputs
            ],
            "timing": {"requests": len(seconds)} | {f"{n}_seconds": t for n, t in times.items()},
        })  # fmt: skip
    took = ", ".join(f"{name} {duration(taken)}" for name, taken in times.items())
    took = f"{len(seconds)} requests: {took}" if len(seconds) > 1 else duration(seconds[0])
    print(f"{result.model} version {result.version}, {took}")
    heads = table(("", ""), [(o.name, f"{o.datatype} {brackets(o.array.shape)}") for o in outputs])
    for head, (name, datatype, given) in zip(heads[1:], outputs, strict=True):
        array = np.asarray(result.texts(name) if datatype is Datatype.BYTES else given)
        text = np.array2string(array, precision=6, suppress_small=True, threshold=128)
        text = printable(str(array.ravel()[0]) if array.size == 1 else text)
        print(head, text.replace("\n", "\n  "), sep="\n  " if "\n" in text else "  ")


def _save(outputs: Sequence[Tensor], folder: Path) -> None:
    """Write each output as an .npy file; raises `CommandFailed`."""
    types = {Datatype.BF16: "f4", Datatype.BYTES: "S"}  # which .npy can hold
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stems = _file_stems([name for name, _, _ in outputs])
        for name, datatype, given in outputs:
            array = np.asarray(given)
            saved = array.astype(types.get(datatype, array.dtype))
            if saved.dtype.kind == "S" and saved.tolist() != array.tolist():
                raise CommandFailed(f"output {name!r} has texts that end with zero bytes")
            path = folder / (stems[name] + ".npy")
            np.save(path, saved, allow_pickle=False)
            print(f"wrote {path}", file=sys.stderr)
    except OSError as error:
        raise CommandFailed(f"{error.filename or folder}: {error.strerror}") from None


def _file_stems(names: Sequence[str]) -> dict[str, str]:
    """The names of outputs as those of files: each another one, and none leaves the folder.

    Names that need no change have the first choice, so that they do not depend on the others.
    """
    clean = {name: re.sub(r"[^\w.-]", "_", name).lstrip(".") for name in names}
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: clean[name] != name):
        stem, number = clean[name], 1
        while stem in found.values():
            number += 1
            stem = f"{clean[name]}-{number}"
        found[name] = stem
    return found
