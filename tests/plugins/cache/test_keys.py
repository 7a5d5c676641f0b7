"""Keys: equal for requests that a model answers equally, and for no others."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.core.call import Call, Parameter
from headrace.core.datatypes import Datatype
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor
from headrace.engine.chain import StageModel
from headrace.ipc.elements import object_array
from headrace.plugins.cache.keys import PREFIX, Keys, salt_of
from headrace.repository.model_files import Content, stamp_of

SIGNATURE = Signature(
    "m",
    8,
    (
        TensorSpec("A", Datatype.INT32, (-1,), optional=True),
        TensorSpec("B", Datatype.INT32, (-1,), optional=True),
        TensorSpec("T", Datatype.BYTES, (-1,), optional=True),
    ),
    (TensorSpec("Y", Datatype.INT32, (-1,)),),
)
ROW = np.array([[1, 2]], np.int32)


class HeaderCall(Call):
    """A call with a header."""

    value = ""

    def header(self, name: str) -> str:
        return self.value if name == "x-user" else ""


def call(
    inputs: Mapping[str, Array],
    outputs: tuple[str, ...] = (),
    parameters: dict[str, Parameter] | None = None,
    id: str = "",
    header: str = "",
) -> Call:
    texts = {n: Datatype.BYTES if n == "T" else Datatype.INT32 for n in inputs}
    tensors = {n: Tensor(n, texts[n], array) for n, array in inputs.items()}
    found = HeaderCall("m", "", id, tensors, outputs, parameters)
    found.value = header
    return found


def texts(*elements: bytes) -> Array:
    return object_array(list(elements), (1, len(elements)))


SAME = [
    (call({"A": ROW}), call({"A": ROW.copy()})),
    (call({"A": ROW, "B": ROW + 1}), call({"B": ROW + 1, "A": ROW})),
    (call({"A": ROW}, id="a"), call({"A": ROW}, id="b")),
    (call({"A": ROW}), call({"A": np.asfortranarray(np.array([[1, 9], [2, 9]], np.int32).T)[:1]})),
    (call({}, parameters={"a": 1, "b": 2}), call({}, parameters={"b": 2, "a": 1})),
]
OTHERS = [
    (call({"A": ROW}), call({"A": ROW + 1})),
    (call({"A": ROW}), call({"B": ROW})),
    (call({"A": ROW}), call({"A": ROW.reshape(2, 1)})),
    (call({"A": ROW}), call({"A": ROW}, ("Y",))),
    (call({"T": texts(b"ab", b"c")}), call({"T": texts(b"a", b"bc")})),
    (call({"A": ROW}), call({"A": ROW}, parameters={"a": 1})),
    (call({}, parameters={"a": 1}), call({}, parameters={"a": True})),
    (call({}, parameters={"a": 1}), call({}, parameters={"a": "1"})),
    (call({"A": ROW}, header="me"), call({"A": ROW}, header="you")),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_requests(one: Call, other: Call) -> None:
    keys = Keys(b"salt" * 8, SIGNATURE)
    assert keys.of(one, ("x-user",)) == keys.of(other, ("x-user",))


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_other_requests(one: Call, other: Call) -> None:
    keys = Keys(b"salt" * 8, SIGNATURE)
    assert keys.of(one, ("x-user",)) != keys.of(other, ("x-user",))


def test_parameters_that_a_model_cannot_read_make_no_difference() -> None:
    keys = Keys(b"salt" * 8, replace(SIGNATURE, parameters=frozenset({"b"})))
    one, other = call({}, parameters={"a": 1}, header="me"), call({}, parameters={"a": 2})
    assert keys.of(one, ()) == keys.of(other, ())
    assert keys.of(one, ()) != keys.of(call({}, parameters={"b": 1}), ())


def test_layouts_without_an_end() -> None:
    keys = Keys(b"salt" * 8, SIGNATURE)
    first = keys.of(call({"A": np.zeros((1, 1), np.int32)}), ())
    for width in range(2, 1500):
        keys.of(call({"A": np.zeros((1, width), np.int32)}), ())
    assert keys.of(call({"A": np.zeros((1, 1), np.int32)}), ()) == first


def model_at(folder: Path, data: bytes, config: bytes = b"c") -> Content:
    folder.mkdir()
    (folder / "model.onnx").write_bytes(data)
    files = {"model.onnx": stamp_of(folder / "model.onnx")}
    return Content(folder, files, config, frozenset())


def test_versions_have_keys_of_their_own(tmp_path: Path) -> None:
    content = model_at(tmp_path / "a", b"1")
    models = [StageModel("m", 1, {}, SIGNATURE), StageModel("m", 2, {}, SIGNATURE)]
    one, other = (Keys(salt_of(model, content, False), SIGNATURE) for model in models)
    assert one.prefix != other.prefix
    assert one.of(call({}), ())[:PREFIX] == one.prefix
    assert one.of(call({}), ()) != other.of(call({}), ())


def test_elsewhere_a_model_is_what_is_in_its_files(tmp_path: Path) -> None:
    model = StageModel("m", 1, {}, SIGNATURE)
    one, copy = model_at(tmp_path / "a", b"1"), model_at(tmp_path / "b", b"1")
    other = model_at(tmp_path / "c", b"2")
    configured = model_at(tmp_path / "d", b"1", b"d")
    salt = salt_of(model, one, True)
    assert salt_of(model, copy, True) == salt
    assert salt_of(model, other, True) != salt
    assert salt_of(model, configured, True) != salt
    assert salt_of(model, one, False) != salt_of(model, copy, False)
    (tmp_path / "b" / "model.onnx").write_bytes(b"changed since it was loaded")
    assert salt_of(model, copy, True) != salt
