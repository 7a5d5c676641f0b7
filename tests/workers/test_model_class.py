"""What is said of what a model does wrong."""

from pathlib import Path

import pytest

from headrace.plugins.functions.offered import ResultError
from headrace.workers.model_class import its_traceback, one_line
from headrace.workers.triton_requests import InferenceResponse
from headrace.workers.triton_tensors import TritonModelException


def error_of(source: str, file: str = "model.py") -> Exception:
    """What running a file raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        exec(compile(source, file, "exec"), {"InferenceResponse": InferenceResponse})
    return caught.value


def test_a_traceback_is_the_models() -> None:
    trace = its_traceback(error_of("def f():\n    1 / 0\nf()"))
    lines = trace.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert 'File "model.py", line 2, in f' in trace


def test_our_frames_are_left_out() -> None:
    trace = its_traceback(error_of("InferenceResponse([1])"))
    assert 'File "model.py", line 1' in trace
    assert "headrace/workers" not in trace.rpartition("\n")[0]


def test_the_error_of_a_file_as_a_whole_has_no_traceback() -> None:
    assert its_traceback(LookupError("neither this nor that")) == ""


def test_a_bug_of_ours_is_shown() -> None:
    path = Path(InferenceResponse.__module__.replace(".", "/")).with_name("x.py")
    ours = str(Path(__file__).parents[2] / "server" / path.parent / "x.py")
    code = compile("raise RuntimeError('ours')", ours, "exec")
    with pytest.raises(RuntimeError) as caught:
        exec(code)
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert "x.py" in its_traceback(caught.value)


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def _with_note() -> ValueError:
    error = ValueError("two\nlines")
    error.add_note("and a note")
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TritonModelException("no"), "TritonModelException: no"),
        (ResultError("not this"), "ResultError: not this"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (_with_note(), "ValueError: two lines and a note"),
        (_Mute(), "_Mute: <it has no text>"),
        (ImportError("cannot import name 'x' from 'm' (/secret/m.py)", path="/secret/m.py"),
         "ImportError: cannot import name 'x' from 'm'"),
        (error_of("def f(:", "/secret/m.py"), "SyntaxError: invalid syntax (m.py, line 1)"),
    ],
)  # fmt: skip
def test_an_exception_is_one_line_without_paths_and_modules(
    error: BaseException, text: str
) -> None:
    assert one_line(error) == text
