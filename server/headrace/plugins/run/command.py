"""`headrace run MODEL INPUT... OUTPUT`: the rows of files through a model."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.cli.command import EXIT_INTERRUPTED, EXIT_USAGE, Command, OptionGroup, option
from headrace.cli.remote import (
    EXIT_PIPE,
    TLS_OPTIONS,
    complain,
    parse_header,
    parse_model,
    parse_positive,
    parse_version,
    print_json,
    tls_files,
)
from headrace.cli.text import progress_bar
from headrace.client.address import Address
from headrace.plugins.run.sources import (
    FORMATS,
    STANDARD,
    TableFailed,
    TableFile,
    find,
    format_of,
    pyarrow,
)
from headrace.settings import URL_ENV

if TYPE_CHECKING:
    from headrace.client.values import ModelSignature
    from headrace.plugins.run.rows import TableReader

EXIT_ROWS = 1
EXIT_TABLES = 3
EXIT_MODEL = 4
_TIMEOUT_SECS = 300.0
_PATIENCE_SECS = 60.0
_MOST_ROWS = 1 << 16  # of a block
_BATCH_ROWS = 1 << 13
_ROWS_AT_FAULT = (400, 413, 422, 500)  # statuses of an answer
_AWAY = (429, 502, 503, 504)


class UsageFailed(Exception):
    """Options that do not fit together, the files or the model."""


class RowsFailed(Exception):
    """A bad row that ends the run, since there is no file for it."""


def _run(options: argparse.Namespace) -> int:
    # Imported late: help and usage errors need neither numpy nor an engine.
    from headrace.client import ClientError
    from headrace.plugins.run.journal import ResumeRefused
    from headrace.plugins.run.scoring import ModelFailed
    from headrace.serving.sources import ServeError

    try:
        return _tables(options)
    except (UsageFailed, ResumeRefused) as error:
        text, status = str(error), EXIT_USAGE
    except RowsFailed as error:
        text, status = str(error), EXIT_ROWS
    except TableFailed as error:
        text, status = str(error), EXIT_TABLES
    except (ModelFailed, ClientError, ServeError) as error:
        text, status = f"model {options.model}: {error}", EXIT_MODEL
    except BrokenPipeError:  # closed by the reader, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        text, status = "interrupted", EXIT_INTERRUPTED
    complain(options, text)
    return status


def _tables(options: argparse.Namespace) -> int:
    from headrace.plugins.run.outputs import beside, is_direct

    begun = time.monotonic()
    pyarrow()
    place = _place(options)
    form, codec = format_of(options.output, options.output_format)
    if os.path.isdir(options.output):
        raise UsageFailed(f"{options.output} is a directory; the results are one file")
    if options.as_json and options.output == STANDARD:
        raise UsageFailed("standard output has the results, and not the document of --json")
    files = find(options.input, options.format)
    keeps_log = not is_direct(options.output) and not any(file.size < 0 for file in files)
    if options.resume and not keeps_log:
        raise UsageFailed("--resume needs inputs and an output that are files")
    run = _TableRun(options, place, files)
    return run.complete(form, codec, beside(options.output, ".run") if keeps_log else "", begun)


class _TableRun:
    """A run: its model, columns and files."""

    def __init__(self, options: argparse.Namespace, place: str, files: Sequence[TableFile]) -> None:
        from headrace.client import InputError
        from headrace.plugins.run.rows import TableReader
        from headrace.runner.runner import Runner

        self._options = options
        columns = dict(options.columns)
        settings: dict[str, Any] = {"timeout": options.timeout}
        if options.header:
            settings["headers"] = dict(options.header)
        settings |= tls_files(options)
        if options.model_repository:  # requests for tables are larger than those of clients
            settings["default_max_batch_size"] = _BATCH_ROWS
        outputs = [name for one in options.outputs for name in one] or None
        known = Runner(place, options.model, options.version or "", **settings)
        self.version = options.version or _newest(known.metadata)
        signature = known.signature
        types = _types(options.types)
        keep = [*dict.fromkeys(name for one in options.keep for name in one)]

        def type_of(name: str) -> Any:
            return types.get(name) or _told(signature, columns, keep, name)

        self._reader = TableReader(files, type_of)
        self._reader.require(keep)
        self._columns = _taken(self._reader, signature, columns, keep)
        self._rows = _good_rows(signature)
        self._runner = Runner(
            place, options.model, self.version, columns=columns, outputs=outputs,
            keep={name: self._reader.types[name] for name in keep}, **settings,
        )  # fmt: skip
        try:
            self.schema = self._runner.schema
        except InputError as error:
            raise UsageFailed(str(error)) from error
        if twice := [name for name in self.schema.names if self.schema.names.count(name) > 1]:
            raise UsageFailed(f"the kept column '{twice[0]}' is called like an output")
        # What makes the bytes of the result, apart from the model's own files.
        self._identity: Mapping[str, Any] = {
            "program": f"headrace {__version__}, pyarrow {pyarrow().__version__}",
            "model": options.model, "version": self.version,
            "inputs": [file.identity for file in files], "columns": self._columns,
            "mapping": columns, "schema": str(self.schema), "rows in a block": self._rows,
        }  # fmt: skip

    def complete(self, form: str, codec: str, log: str, begun: float) -> int:
        """Run to the end, and return the exit status; see `_run` for errors."""
        from headrace.plugins.run.journal import Journal
        from headrace.plugins.run.outputs import Output
        from headrace.plugins.run.progress import RunProgress
        from headrace.plugins.run.rows import Position

        options, identity = self._options, {**self._identity, "output": f"{form} {codec}".strip()}
        journal = Journal(log, identity, options.resume) if log else None
        quiet = options.quiet or options.as_json
        progress = RunProgress(quiet, None if quiet else progress_bar())
        output: Output | None = None
        rows = failed = earlier = 0
        complete = False
        try:
            output = Output(options.output, form, codec, self.schema, options.bad)
            place = Position()
            for done in journal.replayed() if journal is not None else ():
                output.write(done)
                place, earlier, failed = done.end, earlier + done.rows, failed + done.failed
            rows, start = earlier + failed, time.monotonic()
            before = rows
            progress.begin()
            for done, share in self._finished(place):
                if journal is not None:
                    journal.append(done)
                output.write(done)
                rows += done.rows + done.failed
                failed += done.failed
                progress.tell(rows - before, failed, share)
            output.finish()
            seconds = time.monotonic() - start
            complete = True
        finally:
            progress.close()
            if journal is not None:
                nothing = not journal.finished
                journal.close(remove=complete or nothing)
                if output is not None and not complete:
                    output.discard()
                    if not nothing:
                        complain(options, f"{log} has what is done; --resume continues")
        self._tell({
            "model": options.model, "version": self.version, "output": options.output,
            "rows": rows, "failed": failed, "resumed_rows": before,
            "seconds": round(time.monotonic() - begun, 3),
            "rows_per_second": round((rows - before) / max(seconds, 1e-9)),
        })  # fmt: skip
        return EXIT_ROWS if failed else 0

    def _finished(self, place: Any) -> Iterator[Any]:
        from headrace.plugins.run.journal import Finished
        from headrace.plugins.run.outputs import finished_table, json_line
        from headrace.plugins.run.scoring import Scoring, joined

        scoring = Scoring(self._runner.tables, _fault, self._options.patience)
        for block, tables in scoring.scored(self._reader.blocks(place, self._columns, self._rows)):
            if block.bad and not self._options.bad:
                first = block.bad[0]
                raise RowsFailed(
                    f"{first.file} row {first.row}: {first.reason}; --bad FILE continues without"
                    " such rows, and writes them there"
                )
            table = joined(tables) if tables else None
            yield Finished(
                block.end, table.num_rows if table is not None else 0, len(block.bad),
                finished_table(table, self.schema) if table is not None else b"",
                b"".join(json_line(one._asdict()) for one in block.bad),
            ), block.share  # fmt: skip

    def _tell(self, summary: Mapping[str, Any]) -> None:
        if self._options.as_json:
            print_json(summary)
        elif not self._options.quiet:
            failed = f", {summary['failed']:,} failed" if summary["failed"] else ""
            earlier = summary["resumed_rows"]
            print(
                f"{summary['rows']:,} rows{failed} in {summary['seconds']:.1f} s,"
                f" {summary['rows_per_second']:,} rows/s"
                + (f", {earlier:,} of them by an earlier process" if earlier else ""),
                file=sys.stderr,
            )


def _place(options: argparse.Namespace) -> str:
    """The repository, or the address of a server; raises `UsageFailed`."""
    if options.model_repository and options.url:
        raise UsageFailed("--model-repository and --url exclude each other")
    if options.model_repository:
        if options.header or tls_files(options):
            raise UsageFailed("--header and --tls-... are for a server, which --url names")
        return str(options.model_repository)
    if not (url := options.url or os.environ.get(URL_ENV)):
        raise UsageFailed(f"where is the model? --model-repository, --url or {URL_ENV} tells")
    try:
        return str(Address.parse(url))
    except ValueError as error:
        raise UsageFailed(str(error)) from None


def _newest(metadata: Mapping[str, Any]) -> str:
    """The version of the whole run, whatever the server loads meanwhile."""
    versions: Sequence[str] = metadata.get("versions") or [""]
    return max(versions, key=lambda one: int(one) if one.isdecimal() else -1)


def _types(given: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    from headrace.client import InputError
    from headrace.runner.schemas import type_of

    pairs = [pair.rpartition("=") for several in given for pair in several]
    try:
        return {name: type_of(kind) for name, _, kind in pairs}
    except InputError as error:
        raise UsageFailed(f"--types: {error}") from error


def _told(
    signature: "ModelSignature", columns: Mapping[str, Any], keep: Sequence[str], name: str
) -> Any:
    """The type of a text's column, if the model has one for it."""
    from headrace.runner.schemas import arrow_type

    inputs = {column: of for of, names in columns.items() for column in names}
    declared = signature.inputs.get(inputs.get(name, name))
    if declared is None and not columns and len(signature.inputs) == 1 and name not in keep:
        [declared] = signature.inputs.values()
    if declared is None:
        return None
    kind = arrow_type(declared.datatype)
    return pyarrow().float32() if pyarrow().types.is_float16(kind) else kind


def _taken(
    reader: "TableReader", signature: "ModelSignature", columns: Mapping[str, Any],
    keep: Sequence[str],
) -> Sequence[str]:  # fmt: skip
    """The columns to read: those of the model, and those to keep; raises `TableFailed`."""
    known = [*reader.types]
    if columns:
        taken = [name for names in columns.values() for name in names]
    elif len(signature.inputs) > 1 or {*signature.inputs} <= {*known}:
        taken = [
            one.name for one in signature.inputs.values()
            if one.name in known or not one.optional
        ]  # fmt: skip
    else:  # the columns of the only input
        [only] = signature.inputs.values()
        named = only.columns if {*only.columns} & {*known} else ()
        taken = [*named] or [name for name in known if name not in keep]
    reader.require(taken)
    return [*dict.fromkeys([*taken, *keep])]


def _good_rows(signature: "ModelSignature") -> int:
    """Rows of a block, by the sizes of inputs and outputs that the model declares."""
    from math import prod

    from headrace.core.datatypes import NUMPY
    from headrace.plugins.run.rows import BLOCK_BYTES

    each = sum(
        max(NUMPY[one.datatype].itemsize, 1) * prod(max(size, 1) for size in one.shape[1:])
        for one in (*signature.inputs.values(), *signature.outputs.values())
    )
    return max(min(_MOST_ROWS, BLOCK_BYTES // max(each, 1)), 1)


def _fault(error: Exception) -> Any:
    """Whose an error of a request is; None for one that is none of a request."""
    from headrace.client import ClientError, ConnectionFailed, InputError, StatusError
    from headrace.plugins.run.scoring import Fault

    if isinstance(error, StatusError):
        if error.status in _AWAY:
            return Fault.AWAY
        return Fault.ROWS if error.status in _ROWS_AT_FAULT else Fault.MODEL
    if isinstance(error, ConnectionFailed):
        return Fault.AWAY
    if isinstance(error, InputError):
        return Fault.ROWS
    return Fault.MODEL if isinstance(error, ClientError) else None


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected names with commas between, got {text!r}")
    return found


def _input(text: str) -> tuple[str, list[str]]:
    name, equals, rest = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected INPUT=COLUMN,COLUMN..., got {text!r}")
    return name, _names(rest)


RUN = Command(
    name="run",
    run=_run,
    options=(
        option("model MODEL", type=parse_model),
        option("input INPUT...", "file, pattern, directory with partitions, URL of an object"
               " store, or - for standard input"),
        option("output OUTPUT", "file, URL of an object store, or - for standard output"),
        option("--version N", "version of the model (default: the newest)", type=parse_version),
        option("--columns INPUT=COLUMN,...", "columns of the tables that are an input; may be"
               " repeated (default: those called like the inputs, or all that are not kept)",
               many=True, type=_input),
        option("--keep COLUMN,...", "columns of the tables to write beside the outputs", many=True,
               type=_names),
        option("--outputs OUTPUT,...", "outputs to write (default: all)", many=True, type=_names),
        option("--types COLUMN=TYPE,...", "types of Arrow for columns of CSV and JSON (default: the"
               " model's for its inputs, and as the first rows look for others)", many=True,
               type=_names),
        option("--format", "format of inputs whose names do not tell", action="store",
               choices=FORMATS, default=""),
        option("--output-format", "the same for the output", action="store", choices=FORMATS,
               default=""),
        option("--bad FILE", "write rows that fail to FILE as JSON lines, with the reason, and"
               " continue; otherwise the first one ends the run", default=""),
        option("--resume", "continue a run that was stopped, if there is one"),
        option("--quiet", "write errors only"),
        option("--json", "print a summary as one JSON document", dest="as_json"),
    ),
    groups=(OptionGroup("model", (
        option("--model-repository PATH", "repository whose model to run in this process"),
        option("--url URL", f"address of a server, over HTTP, gRPC or a Unix socket (default:"
               f" ${URL_ENV})"),
        option("--header 'NAME: VALUE'", "header to send; may be repeated", many=True,
               type=parse_header),
        *TLS_OPTIONS,
        option("--timeout SECS", f"seconds to wait for an answer (default: {_TIMEOUT_SECS:g})",
               type=parse_positive, default=_TIMEOUT_SECS),
        option("--patience SECS", "seconds to ask again while a server is away or overloaded"
               f" (default: {_PATIENCE_SECS:g})", type=parse_positive, default=_PATIENCE_SECS),
    )),),
    help="run a model with the rows of files",
    epilog="""\
Exit status: 0 all rows succeeded, 1 some rows failed, 2 usage, 3 a file cannot
be read or written, 4 the model or its server failed, 130 interrupted.

  headrace run digits in.parquet out.parquet --model-repository model_repository
""",
)  # fmt: skip
