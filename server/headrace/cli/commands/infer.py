"""`headrace infer MODEL`: sends a request to a model of a running server."""

import argparse
import json
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.cli.command import OptionGroup, option
from headrace.cli.remote import parse_model, parse_version, remote_command

if TYPE_CHECKING:
    from headrace.client.blocking import Client

FORMATS = ("csv", "tsv", "parquet", "feather", "arrow", "orc", "jsonl")


def _infer(options: argparse.Namespace, server: "Client") -> int:
    # Imported late: help and usage errors need no numpy.
    from headrace.cli.commands.infer_request import infer

    return infer(options, server)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _parameter(text: str) -> tuple[str, str | int | float | bool]:
    name, value = _pair(text)
    with suppress(ValueError):
        if isinstance(parsed := json.loads(value), str | int | float | bool):
            return name, parsed
    return name, value


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        parts = [part.partition("/") for part in text.split(",")]
        return tuple(float(over) / float(under or 1) for over, _, under in parts)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _divisors(text: str) -> tuple[float, ...]:
    if 0 in (found := _numbers(text)):
        raise argparse.ArgumentTypeError(f"expected numbers other than 0, got {text!r}")
    return found


INFER = remote_command(
    "infer", _infer,
    option("model MODEL", type=parse_model),
    option("data [VALUE]", "value of the model's only input; or all inputs as a .npz file, a table"
           " with a column per input, or JSON such as {\"NAME\": VALUE}"),
    option("--version N", "version of the model", type=parse_version),
    option("--format", "kind of a table whose name does not tell, such as standard input",
           action="store", choices=FORMATS, default=""),
    option("--input NAME=VALUE", "value of one input; may be repeated", many=True, type=_pair),
    option("--output NAME", "request only this output; may be repeated", many=True),
    option("--classes K", "request the K best classes with their labels instead of values, for the"
           " outputs named by --output, or for all of floats", type=_count),
    option("--parameter NAME=VALUE", "request parameter: a number, true, false, or text; may be"
           " repeated", many=True, type=_parameter),
    option("--id TEXT", "request id", default=""),
    option("--repeat N", "send the request N times, and print latencies", type=_count, default=1),
    option("--stream", "print responses as they arrive; always on for models with several"),
    option("--save DIR", "write each output to DIR/NAME.npy"),
    option("--random", "generate inputs that are not given"),
    option("--rows N", "rows to generate (default: 1)", type=_count, default=1),
    option("--seed N", "seed of generated values (default: 0)", type=int, default=0),
    as_json="print JSON: one document, or one per response of a stream",
    groups=(OptionGroup("images", (
        option("--layout", "order of an input's axes, if ambiguous", action="store",
               choices=("HWC", "CHW", "HW"), default=""),
        option("--scale X", "factor (default: 1/255 for floats, else 1)", type=_numbers),
        option("--mean X[,X,X]", "mean, for all channels or each", type=_numbers, default=(0.0,)),
        option("--std X[,X,X]", "standard deviation, likewise", type=_divisors, default=(1.0,)),
    ), "Images are resized to the input's shape; values are (pixel * scale - mean) / std."),),
    help="send an inference request to a running server",
    epilog="""\
A VALUE is the name of a .json, .npy, .npz or image file, or of a table (.csv,
.tsv, .parquet, .feather, .arrow, .orc, .jsonl); @ and the name of any other
file; JSON; - for standard input; or text, if the model takes text.

  headrace infer digits three.png --scale=-16/255 --mean=-16 --classes 3
""",
)  # fmt: skip
