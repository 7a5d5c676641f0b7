"""Answers as bytes, and their budget."""

import gc

import numpy as np
import pytest

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array, Tensor
from headrace.ipc.elements import object_array
from headrace.plugins.cache.answers import FoundAnswer, KeptAnswers, check, packed
from headrace.plugins.cache.keys import PREFIX
from tests.scheduling.fakes import FakeCall

EACH = 400  # bytes beside those of an answer


def key(number: int, version: int = 0) -> bytes:
    return version.to_bytes(PREFIX, "big") + number.to_bytes(32, "big")


def found(answer: bytes) -> FoundAnswer:
    return FoundAnswer(answer, FakeCall(), 0)


@pytest.mark.parametrize("datatype", list(Datatype))
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_an_answer_comes_back_as_it_was(datatype: Datatype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    array: Array
    if datatype is Datatype.BYTES:
        array = np.array([b"x" * n for n in range(count)], object).reshape(shape)
    else:
        array = np.arange(count).astype(NUMPY[datatype]).reshape(shape)
    other = Tensor("OTHER", Datatype.INT8, np.ones(3, np.int8))
    answer = packed("7", 2, {"a": 1.5, "b": True}, [Tensor("OUT", datatype, array), other])
    check(answer)
    back = found(answer)
    assert (back.version, back.rows, back.parameters) == ("7", 2, {"a": 1.5, "b": True})
    first, second = back.tensors
    assert (first.name, first.datatype, first.array.shape) == ("OUT", datatype, shape)
    np.testing.assert_array_equal(np.asarray(first.array), array)
    np.testing.assert_array_equal(np.asarray(second.array), [1, 1, 1])


def test_nobody_can_write_to_an_answer() -> None:
    answer = packed("1", 1, {}, [Tensor("OUT", Datatype.FP32, np.zeros(2, np.float32))])
    array = np.asarray(found(answer).tensors[0].array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_the_collector_of_garbage_has_nothing_to_visit() -> None:
    assert not gc.is_tracked(packed("1", 1, {}, []))


GOOD = packed("1", 1, {}, [Tensor("OUT", Datatype.FP32, np.zeros(2, np.float32))])
TEXT = packed("1", 1, {}, [Tensor("OUT", Datatype.BYTES, object_array([b"abc"], (1,)))])


@pytest.mark.parametrize(
    "answer",
    [
        b"", GOOD[:-1], GOOD + b"x", GOOD.replace(b"FP32", b"FP99"), GOOD.replace(b"[2]", b"[3]"),
        b"\0\0\0\2{}", TEXT.replace(b"\x03\0\0\0abc", b"\x04\0\0\0abc"),
    ],
)  # fmt: skip
def test_malformed_answers_of_others_are_noticed(answer: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011
        check(answer)


def test_the_least_recently_used_answers_make_room() -> None:
    answers = KeptAnswers(3 * (EACH + 100))
    for number in range(3):
        answers.put(key(number), bytes(100))
    assert answers.get(key(0)) == bytes(100)
    answers.put(key(3), bytes(100))
    assert answers.get(key(1)) is None
    assert [answers.get(key(n)) is not None for n in (0, 2, 3)] == [True, True, True]
    assert (len(answers), answers.evictions, answers.nbytes) == (3, 1, 3 * (EACH + 100))
    answers.put(key(4), bytes(EACH + 200))  # as much as two
    assert [answers.get(key(n)) is not None for n in (0, 2, 3, 4)] == [False, False, True, True]
    assert answers.nbytes <= answers.budget


def test_an_answer_beyond_the_budget_drops_no_others() -> None:
    answers = KeptAnswers(EACH + 10)
    answers.put(key(0), bytes(10))
    answers.put(key(1), bytes(11))
    assert answers.get(key(0)) == bytes(10)
    assert answers.get(key(1)) is None
    assert answers.evictions == 1


def test_a_newer_answer_replaces_one() -> None:
    answers = KeptAnswers(10_000)
    answers.put(key(0), b"long")
    answers.put(key(0), b"s")
    assert (answers.get(key(0)), len(answers), answers.nbytes) == (b"s", 1, EACH + 1)


def test_a_version_takes_its_answers_along_a_few_at_a_time() -> None:
    answers = KeptAnswers(100_000)
    for number in range(5):
        answers.put(key(number, 1), b"old")
    answers.put(key(0, 2), b"other")
    assert answers.drop(key(0, 1)[:PREFIX], 3)
    assert len(answers) == 3
    assert not answers.drop(key(0, 1)[:PREFIX], 3)
    assert (len(answers), answers.get(key(0, 2))) == (1, b"other")
    assert not answers.drop(key(0, 1)[:PREFIX], 3)
    assert (answers.nbytes, answers.evictions) == (EACH + 5, 0)
