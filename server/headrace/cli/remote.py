"""Commands for a running server: common options, and error messages.

Results go to standard output, everything else to standard error.
"""

import argparse
import difflib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.command import EXIT_FAILURE, Argument, Command, CommandParser, OptionGroup, option
from headrace.client import ClientError, ConnectionFailed, StatusError
from headrace.client.address import DEFAULT_URL, Address
from headrace.settings import URL_ENV

TIMEOUT_SECS = 30.0
EXIT_PIPE = 141  # as for a process ended by SIGPIPE
_NAMED = 12  # models named in a message

if TYPE_CHECKING:
    from headrace.client.blocking import Client

# Files for a server with TLS; their values are arguments of clients.
TLS_OPTIONS = (
    option(
        "--tls-root-cert FILE",
        "PEM file of the authorities that sign the server's certificate (default: the system's)",
        default="",
    ),
    option("--tls-cert FILE", "PEM file of a client certificate to show", default=""),
    option("--tls-key FILE", "PEM file of its key, unless it is in the same file", default=""),
)  # fmt: skip
Action = Callable[[argparse.Namespace, "Client"], int]


class CommandFailed(Exception):
    """The failure of a command, with a message for the user."""


def remote_command(
    name: str,
    action: Action,
    *options: Argument,
    timeout: float = TIMEOUT_SECS,
    as_json: str = "print one JSON document",
    groups: Sequence[OptionGroup] = (),
    **texts: Any,
) -> Command:
    """A command that calls `action` with a client of the server named by its options.

    `as_json` is the help of `--json`; the `texts` are those of `Command`.
    """
    server = (
        option(
            "--url URL", f"HTTP address of the server (default: ${URL_ENV}, or {DEFAULT_URL})",
            type=parse_address,
        ),
        option(
            "--header 'NAME: VALUE'",
            "header to send, such as restricted APIs require; may be repeated",
            many=True, type=parse_header,
        ),
        option(
            "--timeout SECS", f"seconds to wait for a response (default: {timeout:g})",
            type=parse_positive, default=timeout,
        ),
        *TLS_OPTIONS,
    )  # fmt: skip
    return Command(
        name=name,
        run=partial(_run, action),
        options=(*options, option("--json", as_json)),
        groups=(*groups, OptionGroup("server", server)),
        **texts,
    )


def connected(at: Address, options: argparse.Namespace) -> "Client":
    """A client of the server, with the options common to all commands."""
    # Imported late, so that `--help` and usage errors are fast.
    from headrace.client.blocking import Client

    files = tls_files(options) if at.secure else {}
    return Client(str(at), headers=dict(options.header), timeout=options.timeout, **files)


def tls_files(options: argparse.Namespace) -> dict[str, Any]:
    """The given ones of `TLS_OPTIONS` as arguments of a client."""
    given = {name: getattr(options, name) for name in ("tls_root_cert", "tls_cert", "tls_key")}
    return {name: path for name, path in given.items() if path}


def address(options: argparse.Namespace) -> Address:
    """The server's address from option, environment or default; exits with 2 if it is invalid."""
    given: Address | None = options.url
    parser: CommandParser = options.parser
    try:
        return given or _over_http(os.environ.get(URL_ENV) or DEFAULT_URL)
    except ValueError as error:
        parser.error(f"{URL_ENV}: {error}")


def print_json(document: object) -> None:
    """Print one JSON document, indented on a terminal."""
    indent = 2 if sys.stdout.isatty() else None
    print(json.dumps(document, indent=indent, ensure_ascii=False))


def explain(error: ClientError, server: "Client", model: str = "") -> str:
    """The error with a suggestion: the nearest model name for an unknown one, or an option."""
    text = str(error)
    if isinstance(error, ConnectionFailed) and isinstance(error.__cause__, ConnectionRefusedError):
        return f"{text}; 'headrace serve' starts one, --url names another"
    if isinstance(error, StatusError) and error.status == 403:
        return f"{text}; --header sends one"
    if not model or not isinstance(error, StatusError) or error.status not in (400, 404, 500):
        return text
    names: list[str] = []
    with suppress(ClientError):
        names = list(
            dict.fromkeys(str(item.get("name")) for item in server.documents("RepositoryIndex", {}))
        )
    if model in names or not names:
        return text
    if near := difflib.get_close_matches(model, names, 1):
        return f"{text}; did you mean {near[0]!r}?"
    if error.status == 500:  # of a load, whose name may be unknown
        return text
    shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{text}; there are {shown}"


def content(path: str | Path) -> bytes:
    """The content of a file; raises `CommandFailed`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}") from None


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; `where` names the source in messages. Raises `CommandFailed`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"{where}: not JSON: {error}") from None


def complain(options: argparse.Namespace, text: str) -> None:
    """Print a line on standard error, with the command's name."""
    print(f"{options.parser.prog}: {text}", file=sys.stderr)


def _run(action: Action, options: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # the encoding may lack some characters
        sys.stdout.reconfigure(errors="backslashreplace")
    at = address(options)
    if tls_files(options) and not at.secure:
        options.parser.error(f"{at} is without TLS: --tls-... are for https://")
    try:
        with connected(at, options) as server:
            try:
                status = action(options, server)
            except ClientError as error:
                complain(options, explain(error, server, getattr(options, "model", None) or ""))
                status = EXIT_FAILURE
            except CommandFailed as error:
                complain(options, str(error))
                status = EXIT_FAILURE
        sys.stdout.flush()
    except BrokenPipeError:  # closed by the reader, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    return status


def parse_address(text: str) -> Address:
    """A URL on the command line; raises `argparse.ArgumentTypeError`."""
    try:
        return _over_http(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _over_http(text: str) -> Address:
    """An HTTP URL; raises `ValueError`."""
    found = Address.parse(text)
    if found.grpc:
        raise ValueError(
            f"{text!r} is of gRPC; commands ask over HTTP: expected the address of that door,"
            f" such as {DEFAULT_URL}"
        )
    return found


def parse_header(text: str) -> tuple[str, str]:
    """A header on the command line, its name in lower case; raises `ArgumentTypeError`."""
    name, colon, value = text.partition(":")
    known = name.strip().lower()
    if not colon or not known.isascii() or not known or " " in known or not text.isprintable():
        raise argparse.ArgumentTypeError(f"expected 'NAME: VALUE', got {text!r}")
    return known, value.strip()


def parse_positive(text: str) -> float:
    """A number above 0; raises `argparse.ArgumentTypeError`."""
    with suppress(ValueError):
        value = float(text)
        if 0 < value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def parse_model(text: str) -> str:
    """A model's name on the command line; raises `argparse.ArgumentTypeError`."""
    if not text:
        raise argparse.ArgumentTypeError("expected a model's name, got ''")
    return text


def parse_version(text: str) -> str:
    """A version number on the command line; raises `argparse.ArgumentTypeError`."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return text
