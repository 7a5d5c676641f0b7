"""What `headrace infer` takes on its command line."""

import argparse
import json
from typing import TYPE_CHECKING

from headrace.commands.models import version_number
from headrace.commands.parser import Commands
from headrace.commands.remote import add_json, add_remote

if TYPE_CHECKING:
    from headrace.client.server import Server

_EPILOG = """\
A VALUE is a file that its suffix tells (.json .npy .npz .csv, or an image),
another file after an @, JSON, - for standard input, or the text itself where
the model takes text.

  headrace infer text_language "Wann fährt der nächste Zug nach Hamburg?"
  headrace infer digits three.png --scale=-16/255 --mean=-16 --classes 3
  headrace infer simple --input INPUT0=left.npy --random --json
  headrace infer storyteller --input text_input="The miller" \\
      --input max_tokens=5
"""


def add_infer(commands: Commands) -> None:
    """Declare `headrace infer`."""
    parser = commands.add_parser(
        "infer", help="ask a model of a running server",
        description="Ask a model of a running server, and print what it answers.",
        epilog=_EPILOG,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "data", nargs="?", metavar="VALUE",
        help="the value of the model's only input; or a .npz file, a table with a column for each,"
        " or JSON such as {\"NAME\": VALUE}, for all; or an inference request in JSON",
    )  # fmt: skip
    parser.add_argument(
        "--version", type=version_number, metavar="N", help="this version of the model"
    )
    parser.add_argument(
        "--input", action="append", default=[], type=_named, metavar="NAME=VALUE",
        help="the value of one input; may be repeated",
    )  # fmt: skip
    _add_random(parser)
    _add_images(parser)
    parser.add_argument(
        "--output", action="append", metavar="NAME", help="only this output; may be repeated"
    )
    parser.add_argument(
        "--classes", type=_count, metavar="K",
        help="the K best classes with their labels in place of an output's numbers: of those named"
        " by --output, or all of floats",
    )  # fmt: skip
    parser.add_argument(
        "--parameter", action="append", default=[], type=_parameter, metavar="NAME=VALUE",
        help="a parameter of the request: a number, true, false, or a text; may be repeated",
    )  # fmt: skip
    parser.add_argument("--id", metavar="TEXT", help="the request's id")
    parser.add_argument(
        "--repeat", type=_count, default=1, metavar="N",
        help="ask N times, one after the other, and say how long that took",
    )  # fmt: skip
    parser.add_argument(
        "--stream", action="store_true",
        help="print responses as they come; models that answer many times are always asked so",
    )  # fmt: skip
    parser.add_argument("--save", metavar="DIR", help="write each output to DIR/NAME.npy")
    add_json(parser, "print one JSON document; with a stream, one for each response")
    add_remote(parser, _run)


def _add_random(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("made-up inputs")
    group.add_argument(
        "--random", action="store_true", help="make up the inputs that are not given"
    )
    group.add_argument(
        "--rows", type=_count, default=1, metavar="N", help="that many rows (default: 1)"
    )
    group.add_argument(
        "--shape", action="append", default=[], type=_shape, metavar="NAME=N,N,...",
        help="an input's shape, where the model's leaves it open; may be repeated",
    )  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="the same values every time")


def _add_images(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "images", "Resized to the input's shape; a value is (pixel * scale - mean) / std."
    )
    group.add_argument(
        "--layout", choices=("HWC", "CHW", "HW"), default="",
        help="order of an input's axes, if its number of channels does not tell",
    )  # fmt: skip
    group.add_argument(
        "--scale", type=_number, metavar="X", help="such as 1/255, the default for floats; else 1"
    )
    group.add_argument(
        "--mean", type=_numbers, default=(0.0,), metavar="X[,X,X]", help="one number, or by channel"
    )
    group.add_argument(
        "--std", type=_divisors, default=(1.0,), metavar="X[,X,X]", help="one number, or by channel"
    )


def _run(options: argparse.Namespace, server: "Server") -> int:
    # Imported late: `--help` should not wait for it.
    from headrace.commands.infer import infer

    return infer(options, server)


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _parameter(text: str) -> tuple[str, str | int | float | bool]:
    name, value = _named(text)
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, parsed if isinstance(parsed, str | int | float | bool) else value


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, value = _named(text)
    try:
        shape = tuple(int(size) for size in value.split(","))
    except ValueError:
        shape = (-1,)
    if min(shape) < 0:
        raise argparse.ArgumentTypeError(f"expected NAME=N,N,..., got {text!r}")
    return name, shape


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")


def _number(text: str) -> float:
    over, _, under = text.partition("/")
    try:
        return float(over) / float(under or 1)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(_number, text.split(",")))


def _divisors(text: str) -> tuple[float, ...]:
    found = _numbers(text)
    if 0 in found:
        raise argparse.ArgumentTypeError(f"expected numbers other than 0, got {text!r}")
    return found
