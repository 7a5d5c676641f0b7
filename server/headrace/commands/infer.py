"""`headrace infer MODEL`: ask a model of a running server."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.client.address import Refused
from headrace.client.inference import Question, divided, joined
from headrace.client.server import Document, Server
from headrace.client.signature import Taken, taken
from headrace.commands.images import ImageOptions
from headrace.commands.infer_inputs import Given, Random, Reader
from headrace.commands.remote import CommandFailed, print_json
from headrace.commands.replies import reply_document, reply_lines, save, timing_line
from headrace.commands.text import printable
from headrace.core.call import InferResponse
from headrace.core.datatypes import Datatype
from headrace.core.tensors import Tensor

_FLOATS = (Datatype.FP32, Datatype.FP64)


def infer(options: argparse.Namespace, server: Server) -> int:
    """Ask as the command line says, and print what comes."""
    model, version = options.model, options.version or ""
    config: Document = {}
    metadata = server.metadata(model, version)
    with suppress(Refused):  # not every server of the protocol has configurations
        config = server.config(model, version)
    known = taken(metadata, config)
    images = ImageOptions(options.layout, options.scale, options.mean, options.std)
    make_up = Random(options.rows, options.seed, dict(options.shape)) if options.random else None
    given = Reader(model, known.inputs, images).read(options.data, options.input, make_up)
    given.parameters.update(options.parameter)
    if options.id is not None:
        given.request_id = options.id
    if options.stream or known.decoupled:
        return _stream(options, server, given, known)
    question = _question(options, given, known)
    parts = divided(question, known.most_rows)
    if len(parts) > 1:
        print(
            f"asked in {len(parts)} requests: {model} takes {known.most_rows} rows at a time",
            file=sys.stderr,
        )
    seconds = []
    reply: InferResponse
    for _ in range(options.repeat):
        started = time.perf_counter()
        replies = [server.infer(model, version, parts[0])]
        # Of the same version, whatever share of the requests each version gets.
        replies += [server.infer(model, replies[0].model_version, part) for part in parts[1:]]
        seconds.append(time.perf_counter() - started)
        reply = joined(replies)
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


def _question(options: argparse.Namespace, given: Given, known: Taken) -> Question:
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
    return Question(
        list(given.tensors.values()), outputs, classes, given.parameters, given.request_id
    )


def _stream(options: argparse.Namespace, server: Server, given: Given, known: Taken) -> int:
    """Print each response as it comes: texts one behind the other, or a line each."""
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
    document = flat_document(given)
    for _ in range(options.repeat):
        count = 0
        started = time.perf_counter()
        try:
            for response in server.generate(options.model, options.version or "", document):
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


def flat_document(given: Given) -> Document:
    """Inputs as members of flat JSON; raises `CommandFailed` for what has no such form."""
    document: Document = dict(given.parameters)
    if given.request_id:
        document["id"] = given.request_id
    for name, tensor in given.tensors.items():
        values = list(_plain(tensor))
        document[name] = values[0] if len(values) == 1 else values
    return document


def _plain(tensor: Tensor) -> Iterator[Any]:
    for item in tensor.array.ravel().tolist():
        if not isinstance(item, bytes):
            yield item
            continue
        try:
            yield item.decode()
        except UnicodeDecodeError:
            raise CommandFailed(
                f"input {tensor.name!r}: a stream is asked for in JSON, which takes texts in UTF-8"
                " and no other bytes"
            ) from None
