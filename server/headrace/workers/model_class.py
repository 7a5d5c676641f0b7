"""A model's own code: imported as its files are, and its class called wherever it runs.

Python keeps compiled code beside a source file and takes it for current if the time of the last
change, in whole seconds, and the size are the same: after two quick changes a model would run what
it was before. So what lies in a model's directories is compiled each time, which takes milliseconds
and writes nothing into a model repository. Libraries in an environment beneath them are left to
Python's cache.
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
    """Compiles a source file whenever it is imported."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of a module; raises `ImportError`, `SyntaxError`."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def import_freshly(paths: Iterable[str]) -> None:
    """Import modules beneath `paths` from their source from now on."""
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
    """True if it is one of `roots`, or lies beneath one."""
    return any(folder == root or folder.startswith(root.rstrip(sep) + sep) for root in roots)


_OURS = (dirname(__file__), "<frozen ")  # where what runs a model lies


def complete(found: Any, config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration as the model completes it, None if it does not; raises what it raises."""
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
    """True if a model may read parameters of requests: any but those that say that they do not."""
    return getattr(found, "reads_parameters", True) is not False


def start(found: Any, args: dict[str, str]) -> Any:
    """A model that can run; raises what it raises, and `AttributeError` if it has no `execute`."""
    model = found()
    if hasattr(model, "initialize"):
        model.initialize(args)
    if not hasattr(model, "execute"):
        raise AttributeError("the class TritonPythonModel has no method execute")
    return model


def one_line(error: BaseException) -> str:
    """An exception without its traceback, and without paths and modules, which the log has."""
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
    """An exception with its traceback, as far as that is the model's; "" if nothing of it is.

    Our own frames are of no interest to whoever wrote the model. Where there are no others the
    error is about the model's file as a whole, and says so, or it is ours.
    """
    found = traceback.TracebackException.from_exception(error)
    theirs = _without_our_frames(found)
    if not theirs and not isinstance(error, (LookupError, SyntaxError)):
        found = traceback.TracebackException.from_exception(error)
    elif not theirs and not isinstance(error, SyntaxError):
        return ""
    return "".join(found.format()).rstrip()


def _without_our_frames(found: traceback.TracebackException) -> bool:
    """Take our frames out of a traceback and of those that led to it; whether others are left."""
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
    """Why the responses that an ordinary model's `execute` returned are wrong; "" if they are not.

    With `deferred`, None stands for a response that comes by a response sender.
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
