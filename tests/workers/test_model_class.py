"""What is said of what a model does wrong."""

from pathlib import Path

import pytest

from headrace.workers.model_class import its_traceback, one_line
from headrace.workers.triton_responses import InferenceResponse


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


def test_one_line() -> None:
    assert one_line(error_of("raise ValueError('a\\nb')")) == "ValueError: a b"
    assert one_line(error_of("def f(:")) == "SyntaxError: invalid syntax (model.py, line 1)"
