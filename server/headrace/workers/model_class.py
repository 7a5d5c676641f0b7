"""A model's own code: imported from its current files, and its class called wherever it runs.

Python stores compiled code beside a source file and considers it current if the modification time,
in whole seconds, and the size are equal: after two quick changes a model would run old code. So
files in a model's directories are always compiled, which takes milliseconds and writes nothing into
a model repository. Libraries in an environment below them use Python's cache.
"""

import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from os import sep
from os.path import dirname, realpath
from types import CodeType
from typing import TYPE_CHECKING, Any

from headrace.workers import triton_api as pb
from headrace.workers.triton_requests import InferenceRequest, InferenceResponse, is_given_back

if TYPE_CHECKING:
    from importlib.abc import PathEntryFinder

_LIBRARIES = {"site-packages", "dist-packages"}


class FreshLoader(SourceFileLoader):
    """Compiles a source file on every import."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of a module; raises `ImportError`, `SyntaxError`."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def import_freshly(paths: Iterable[str]) -> None:
    """Always import modules below `paths` from their source, from now on."""
    roots = [realpath(path) for path in paths]
    standard = [realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    make = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (FreshLoader, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )

    def hook(entry: str) -> "PathEntryFinder":
        folder = realpath(entry)
        libraries = _LIBRARIES.intersection(folder.split(sep)) or _is_in(folder, standard)
        if libraries or not _is_in(folder, roots):
            raise ImportError("left to Python's own finder", path=entry)
        return make(entry)

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


def _is_in(folder: str, roots: Iterable[str]) -> bool:
    """True if `folder` is one of `roots`, or below one."""
    return any(folder == root or folder.startswith(root.rstrip(sep) + sep) for root in roots)


_OURS = (dirname(__file__), "<frozen ")  # locations of the code that runs models


def complete(found: Any, config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration completed by the model, None for no change; passes on its exceptions."""
    if not hasattr(found, "auto_complete_config"):
        return None
    result = found.auto_complete_config(pb.ModelConfig(config))
    if not isinstance(result, pb.ModelConfig):
        raise TypeError(
            "auto_complete_config must return the ModelConfig that it was given,"
            f" got {type(result).__name__}"
        )
    return result.as_dict()


def reads_parameters(found: Any) -> bool:
    """True if a model may read request parameters, unless it declares that it does not."""
    return getattr(found, "reads_parameters", True) is not False


def columns(found: Any) -> Sequence[str]:
    """The names of the columns that a model was trained with, in order; none if unknown."""
    return [*getattr(found, "trained_columns", ())]


def instances(found: Any) -> int:
    """The number of instances that a model asks for."""
    return int(getattr(found, "wanted_instances", 1))


def start(found: Any, args: dict[str, str]) -> Any:
    """A started model; passes on its exceptions; `AttributeError` if it has no `execute`."""
    model = found()
    if hasattr(model, "initialize"):
        model.initialize(args)
    if not hasattr(model, "execute"):
        raise AttributeError("the class TritonPythonModel has no method execute")
    return model


def one_line(error: BaseException) -> str:
    """An exception without traceback, paths and modules, which are in the log."""
    try:
        text = str(error)
    except Exception:
        text = "<it has no text>"
    if isinstance(error, ImportError) and error.path:
        text = text.replace(f" ({error.path})", "")
    notes = getattr(error, "__notes__", ())
    name = type(error).__name__
    return " ".join([f"{name}: {text}" if text else name, *map(str, notes)]).replace("\n", " ")


def its_traceback(error: BaseException) -> str:
    """An exception with the model's part of its traceback; "" if there is none.

    The server's own frames are irrelevant to the model's author. Without other frames the error
    concerns the model's file as a whole, and says so, or it is the server's.
    """
    found = traceback.TracebackException.from_exception(error)
    theirs = _without_our_frames(found)
    if not theirs and not isinstance(error, (LookupError, SyntaxError)):
        found = traceback.TracebackException.from_exception(error)
    elif not theirs and not isinstance(error, SyntaxError):
        return ""
    return "".join(found.format()).rstrip()


def _without_our_frames(found: traceback.TracebackException) -> bool:
    """Remove the server's frames from a traceback and its causes; True if others remain."""
    found.stack = traceback.StackSummary.from_list(
        [frame for frame in found.stack if not frame.filename.startswith(_OURS)]
    )
    theirs = bool(found.stack)
    for other in (found.__cause__, found.__context__):
        if other is not None:
            theirs = _without_our_frames(other) or theirs
    return theirs


def wrong_responses(
    requests: Sequence[InferenceRequest], responses: Any, deferred: bool = False
) -> str:
    """The problem with the responses returned by an ordinary model; "" for none.

    With `deferred`, None stands for a response by a response sender.
    """
    if not isinstance(responses, list):
        found = type(responses).__name__
        return f"Expected a list in the execute return, found type '{found}'."
    if len(responses) != len(requests):
        return (
            "Number of InferenceResponse objects do not match the number of InferenceRequest"
            f" objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size"
            f" is:{len(responses)}"
        )
    for request, response in zip(requests, responses, strict=True):
        if isinstance(response, InferenceResponse):
            continue
        dealt_with = deferred or request._answering is not None or is_given_back(request)
        if response is not None or not dealt_with:
            found = type(response).__name__
            return (
                "Expected an 'InferenceResponse' object in the execute function return list,"
                f" found type '{found}'."
            )
    return ""
