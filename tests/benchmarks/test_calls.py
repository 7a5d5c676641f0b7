"""Profile hooks that count calls and objects."""

import gc
import inspect
import sys
from collections.abc import Callable, Iterator

from benchmarks.calls import Call, CallRecorder, ObjectRecorder, walk
from headrace.core.datatypes import Datatype
from headrace.core.signature import TensorSpec
from headrace.core.tensors import brackets

HERE = "tests/benchmarks/test_calls.py"


def recorded(work: Callable[[], object]) -> tuple[Call, ...]:
    recorder = CallRecorder()
    sys.setprofile(recorder)
    work()
    sys.setprofile(None)
    return recorder.take()


def shape(call: Call) -> tuple[str, list[object]]:
    return call.name, [shape(child) for child in call.children]


def leaf() -> None:
    len("a C function is not seen")


def outer() -> None:
    leaf()
    inner()


def inner() -> None:
    leaf()


def fails() -> None:
    raise ValueError


def catches() -> None:
    try:
        fails()
    except ValueError:
        leaf()


def numbers() -> Iterator[int]:
    leaf()
    yield 1
    leaf()


def test_calls_are_trees_in_the_order_in_which_they_began() -> None:
    (root,) = recorded(outer)
    assert shape(root) == ("outer", [("leaf", []), ("inner", [("leaf", [])])])
    assert [call.name for call in walk([root, root])] == ["outer", "leaf", "inner", "leaf"] * 2
    assert {call.file for call in root.walk()} == {HERE}


def test_an_exception_ends_a_call() -> None:
    (root,) = recorded(catches)
    assert shape(root) == ("catches", [("fails", []), ("leaf", [])])


def test_each_step_of_a_generator_is_a_call() -> None:
    roots = recorded(lambda: list(numbers()))
    assert [call.name for call in walk(roots)].count("numbers") == 2


def test_earlier_calls_are_not_counted() -> None:
    recorder = CallRecorder()

    def starts() -> None:
        sys.setprofile(recorder)
        leaf()

    starts()
    inner()
    sys.setprofile(None)
    assert [shape(root) for root in recorder.take()] == [
        ("leaf", []), ("inner", [("leaf", [])]),
    ]  # fmt: skip
    assert recorder.take() == ()


def test_functions_of_the_server() -> None:
    (shown,) = recorded(lambda: brackets([1, 2]))[0].children
    line = brackets.__code__.co_firstlineno
    assert shown == Call("brackets", "core/tensors.py", line, own=True)
    (here,) = recorded(leaf)
    assert (here.file, here.line, here.own) == (HERE, 0, False)


def test_generated_dataclass_methods_belong_to_their_class() -> None:
    (made,) = recorded(lambda: TensorSpec("input", Datatype.FP32, (16,)))[0].children
    _, line = inspect.getsourcelines(TensorSpec)  # its decorator's
    assert made == Call("TensorSpec.__init__", "core/signature.py", line + 1, own=True)


def test_objects_are_counted_by_class_even_if_freed() -> None:
    recorder = ObjectRecorder("headrace")
    kept: list[object] = []

    def work() -> None:
        kept.append(TensorSpec("input", Datatype.FP32, (16,)))
        TensorSpec("output", Datatype.FP32, (16,))
        kept.append([])

    gc.collect()
    gc.disable()
    sys.setprofile(recorder)
    work()
    sys.setprofile(None)
    gc.enable()
    assert recorder.take() == (("TensorSpec", 2),)
    assert recorder.take() == ()
