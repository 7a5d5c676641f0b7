"""`headrace stubs PLACE`: writes types of models for type checkers, as a `.pyi` file.

Each model is a protocol that a `headrace.Runner` fits: its inputs are parameters, its outputs the
keys of its result. Nothing of the file is needed when a program runs.
"""

import argparse
import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.command import EXIT_FAILURE, Command, option
from headrace.cli.remote import TLS_OPTIONS, complain, parse_header, tls_files
from headrace.client import ClientError
from headrace.client.address import is_address

if TYPE_CHECKING:
    from headrace.client.blocking import BlockingModels
    from headrace.client.values import Declared, ModelSignature

_HEAD = '''\
"""Models at {place}; written by `headrace stubs`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from headrace.client.tables import ArrowStream
from headrace.client.transport import Result
from headrace.client.values import DLPackTensor

Values = NDArray[Any] | Sequence[Any] | DLPackTensor | float | str | bytes
Table = TypeVar("Table", bound=Mapping[str, Any] | ArrowStream)
'''
_TYPES = {"BOOL": "np.bool_", "BYTES": "np.object_", "BF16": "Any"}


def _run(options: argparse.Namespace) -> int:
    try:
        text, skipped = _text(options.place, {"headers": dict(options.header)} | tls_files(options))
        if options.output:
            Path(options.output).write_text(text, encoding="utf-8")
        else:
            print(text, end="")
    except (ClientError, OSError, ValueError) as error:
        complain(options, str(error))
        return EXIT_FAILURE
    for name, why in skipped.items():
        complain(options, f"model '{name}' is left out: {why}")
    return EXIT_FAILURE if skipped else 0


STUBS = Command(
    name="stubs",
    run=_run,
    options=(
        option("place PLACE", "URL of a server, such as grpc://host:8001, or a model repository"),
        option("--output FILE", "write to this file instead of standard output", default=""),
        option(
            "--header 'NAME: VALUE'",
            "header to send, such as restricted APIs require; may be repeated",
            many=True, type=parse_header,
        ),
        *TLS_OPTIONS,
    ),
    help="write types of models, for mypy and other type checkers of programs with a Runner",
    epilog="""\
  headrace stubs model_repository --output models.pyi

In the program, `digits: "Digits" = headrace.Runner("model_repository", "digits")`,
with `Digits` imported from models under `if TYPE_CHECKING`.
""",
)  # fmt: skip


def _text(place: str, given: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The stubs of all models, and the reasons of those that are left out.

    Clients are `given` these arguments.
    Raises `ClientError`, or `ValueError` for a place that is none.
    """
    # Imported late: help and usage errors need no engine.
    from headrace.client.blocking import Client
    from headrace.runner.embedded import EmbeddedEngine
    from headrace.serving.sources import ServeError

    if is_address(place):
        with Client(place, **given) as client:
            return _stubs(place, client)
    if not Path(place).is_dir():
        raise ValueError(f"{place} is neither a directory nor a URL such as grpc://host:8001")
    try:
        with EmbeddedEngine(place, exit_on_error=False) as engine:
            return _stubs(place, engine)
    except ServeError as error:
        raise ValueError(str(error)) from None


def _stubs(place: str, models: "BlockingModels[Any]") -> tuple[str, dict[str, str]]:
    parts, skipped, taken = [_HEAD.format(place=place)], dict[str, str](), set[str]()
    for name in dict.fromkeys(str(entry["name"]) for entry in models.index()):
        try:
            signature = models.signature(name)
        except ClientError as error:
            skipped[name] = str(error)
            continue
        if signature.decoupled:
            parts.append(f"# Model {name} may answer any number of times: call Client.stream.\n")
            continue
        words = re.sub(r"\W|_", " ", name).split()
        title = "".join(word[:1].upper() + word[1:] for word in words)
        if not title.isidentifier() or keyword.iskeyword(title):
            title = f"Model{title}"
        while title in taken:
            title += "_"
        taken |= {title, f"{title}Result"}
        parts.append("\n".join(_class(name, title, signature)))
    return "\n\n".join(parts), skipped


def _class(name: str, title: str, signature: "ModelSignature") -> Iterator[str]:
    """The lines of a model's protocol and of its result."""
    inputs, outputs = (
        ", ".join(map(str, s.values())) for s in (signature.inputs, signature.outputs)
    )
    yield f"class {title}Result(Result):"
    for one in signature.outputs.values():
        yield "    @overload"
        yield f"    def __getitem__(self, name: Literal[{one.name!r}]) -> {_array(one)}: ..."
    yield "    @overload"
    yield "    def __getitem__(self, name: str) -> NDArray[Any]: ..."
    yield ""
    yield f"class {title}(Protocol):"
    yield f"    {f'Model {name}: {inputs} -> {outputs}'!r}"
    yield ""
    parameters = _parameters(list(signature.inputs.values()))
    for method in ("def __call__", "async def call"):
        yield "    @overload"
        yield f"    {method}(self, table: Table, /) -> Table: ..."
        yield "    @overload"
        yield f"    {method}(self, {parameters}) -> {title}Result: ..."
    yield "    def tables(self, tables: Iterable[Table]) -> Iterator[Table]: ..."
    yield ""


def _array(declared: "Declared") -> str:
    default = f"np.{declared.datatype.lower().replace('fp', 'float')}"
    return f"NDArray[{_TYPES.get(declared.datatype, default)}]"


def _parameters(inputs: list["Declared"]) -> str:
    """Parameters by name and position, or only by one of the two if that is all that Python can."""
    named = all(one.name.isidentifier() and not keyword.iskeyword(one.name) for one in inputs)
    found = [
        f"{one.name if named else f'input{place}'}: Values{' | None = ...' if one.optional else ''}"
        for place, one in enumerate(inputs)
    ]
    if not named:
        return ", ".join([*found, "/"])
    gaps = [one.optional for one in inputs]
    return ", ".join(found if gaps == sorted(gaps) else ["*", *found])
