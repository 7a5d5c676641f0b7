"""The plain JSON codec: the complete codec's results for plain bodies, and no others."""

import json
import math
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.call import NO_OPTIONS, Call, InferResponse, Timing
from headrace.core.datatypes import BY_NAME, NUMPY, Datatype
from headrace.core.errors import InvalidRequest
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import Array, Tensor
from headrace.protocol.elements import FLAT
from headrace.protocol.json_text import LONG
from headrace.protocol.plain_json import PlainJson
from headrace.protocol.v2_json import ResponseForm, decode_infer
from tests.protocol.strategies import PROPERTY, any_text, mutations, outcome, tensors

Json = dict[str, Any]
NUMBERS = tuple(BY_NAME[name] for name in FLAT)


def signature(
    *inputs: TensorSpec, max_batch_size: int = 8, outputs: tuple[TensorSpec, ...] = ()
) -> Signature:
    return Signature("m", max_batch_size, inputs, outputs)


def spec(
    name: str = "x", datatype: Datatype = Datatype.FP32, dims: tuple[int, ...] = (2,)
) -> TensorSpec:
    return TensorSpec(name, datatype, dims)


ONE = signature(spec())
TWO = signature(spec(), spec("y", Datatype.INT32, (2, 1)))
SIGNATURES = (
    ONE, TWO, signature(spec(), max_batch_size=0), signature(spec(dims=(-1,))),
    signature(spec(datatype=Datatype.UINT8, dims=())),
    signature(spec(datatype=Datatype.FP64, dims=(1, 2))),
    signature(spec(datatype=Datatype.INT64), TensorSpec("y", Datatype.FP32, (2,), optional=True)),
    signature(spec(datatype=Datatype.BOOL)), signature(spec(datatype=Datatype.BYTES)),
    signature(spec(datatype=Datatype.FP16)), signature(spec(dims=()), max_batch_size=0),
)  # fmt: skip


def an_input(**changes: Any) -> Json:
    """A valid input with members changed, or left out if None."""
    members = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]} | changes
    return {name: value for name, value in members.items() if value is not None}


def document(*inputs: Any, **members: Any) -> Json:
    return members | {"inputs": list(inputs) or [an_input()]}


def complete(of: Signature, body: bytes) -> tuple[Call, int]:
    request, form = decode_infer("m", "1", body, None, of)
    assert form == ResponseForm() or request.outputs or b"parameters" in body
    return request, of.check(request)


def check(reader: PlainJson, of: Signature, body: bytes) -> bool:
    """True if the body is plain; asserts the complete decoder's result."""
    expected = outcome(complete, of, body)
    found = reader.decode(body)
    if found is None:
        return False
    assert isinstance(expected, tuple), expected
    request, rows = expected
    request_id, arrays, plain_rows = found
    assert (request_id, plain_rows) == (request.id, rows)
    assert list(arrays) == list(request.inputs)
    for name, tensor in arrays.items():
        array, other = tensor.array, request.inputs[name].array
        assert (tensor.name, tensor.datatype) == (name, request.inputs[name].datatype)
        assert isinstance(array, np.ndarray)
        assert isinstance(other, np.ndarray)
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array.tobytes() == other.tobytes()
        assert array.flags.writeable == other.flags.writeable or array.size > 1024
    assert type(request) is Call
    assert (request.outputs, request.parameters, request.options) == ((), {}, NO_OPTIONS)
    return True


def is_plain(of: Signature, request: Any) -> bool:
    """True if a request is plain, for a new and a known layout, with and without spaces."""
    found = set()
    for separators in ((",", ":"), (", ", ": ")):
        reader = PlainJson(of, "m", "1")
        for _ in range(3):
            body = json.dumps(request, separators=separators).encode()
            found.add(check(reader, of, body))
    assert len(found) == 1
    return found.pop()


# --- bodies


@pytest.mark.parametrize("count", [1, 2, 64, 784, 1024, 1025, 4096])
@pytest.mark.parametrize("datatype", NUMBERS)
def test_plain_bodies_of_any_datatype_and_length(datatype: Datatype, count: int) -> None:
    of = signature(spec(datatype=datatype, dims=(count,)))
    data = (np.arange(count) % 100).tolist()
    assert is_plain(of, document(an_input(datatype=datatype, shape=[1, count], data=data)))
    assert is_plain(of, document(an_input(datatype=datatype, shape=[1, count], data=data), id="42"))


@pytest.mark.parametrize(
    ("of", "request_"),
    [
        (ONE, document()),
        (ONE, document(id="")),
        (ONE, document(id="a\"b\\ü\n\x7f\u2028\U0001f600")),
        (ONE, document(an_input(shape=[8, 2], data=[1.5, -2] * 8))),
        (ONE, document(an_input(data=[1e300 / 1e299, 2**64 - 1]))),
        (ONE, document(an_input(data=[2**53 + 1, -(2**63)]))),
        (ONE, document(an_input(data=[16777217, 16777219]))),
        (ONE, document(an_input(data=[1e-45, -1e-46]))),
        (ONE, document(an_input(data=[-0.0, 3.4028235677973362e38]))),
        (TWO, document(an_input(), an_input(name="y", shape=[1, 2, 1], datatype="INT32"))),
        (TWO, document(an_input(name="y", shape=[1, 2, 1], datatype="INT32"), an_input(), id="7")),
        (signature(spec("false", dims=(1,))), document(an_input(name="lu", shape=[1, 1]))),
        (signature(spec("value")), document(an_input(name="value"))),
        (signature(spec("data")), document(an_input(name="data"))),
        (signature(spec('"data":')), document(an_input(name='"data":'))),
        (signature(spec(), max_batch_size=0), document(an_input(shape=[2]))),
        (signature(spec(dims=(-1, 2))), document(an_input(shape=[1, 1, 2]))),
    ],
)  # fmt: skip
def test_plain_bodies(of: Signature, request_: Json) -> None:
    known = {item["name"] for item in request_["inputs"]} <= {s.name for s in of.inputs}
    assert is_plain(of, request_) == known


@pytest.mark.parametrize(
    "request_",
    [
        document(parameters={}), document(outputs=[]), document(id=None), document(id=7),
        document(an_input(), an_input()), document(an_input(name="z")), document(other=1),
        document(an_input(parameters={})), document(an_input(other=1)), {"inputs": []},
        document(an_input(name=None)), document(an_input(shape=None)),
        document(an_input(datatype=None)), document(an_input(data=None)),
        document(an_input(name=["x"])), document(an_input(name=1)),
        document(an_input(shape=[1.0, 2])), document(an_input(shape=[True, 2])),
        document(an_input(shape=[2])), document(an_input(shape=[])), document(an_input(shape="12")),
        document(an_input(shape={"1": 1, "2": 2})), document(an_input(shape=[[1], 2])),
        document(an_input(shape=[-1, 2])), document(an_input(shape=[1, 2, 1])),
        document(an_input(shape=[0, 2], data=[])), document(an_input(shape=[9, 2], data=[1] * 18)),
        document(an_input(shape=[2**70, 2])), document(an_input(shape=[2**62, 2])),
        document(an_input(shape=[1] * 40, data=[1])), document(an_input(shape=[1, 2.0])),
        document(an_input(datatype="FP64")), document(an_input(datatype="FP33")),
        document(an_input(datatype=["FP32"])), document(an_input(datatype="BYTES")),
        document(an_input(data=[True, False])), document(an_input(data=[1, True])),
        document(an_input(data=["1", "2"])), document(an_input(data="12")),
        document(an_input(data={"1": 1, "2": 2})), document(an_input(data=[[1, 2]])),
        document(an_input(data=[[1], [2]])), document(an_input(data=[1, None])),
        document(an_input(data=[1])), document(an_input(data=[1, 2, 3])),
        document(an_input(data=[])), document(an_input(data=[1e39, 0])),
        document(an_input(data=[float("nan"), 0])), document(an_input(data=[float("inf"), 0])),
        document(an_input(data=[3.4028235677973366e38, 0])), document(an_input(data=[10**40, 0])),
        document("abcd"), document(["name", "shape", "datatype", "data"]), document(None),
        {"inputs": "x"}, {"inputs": {"x": 1}}, {"inputs": None}, {}, [], "inputs", 1, None, True,
        {"inputs": "x", "id": "y"}, document(an_input(data=7)),
    ],
)  # fmt: skip
def test_bodies_for_the_complete_decoder(request_: Any) -> None:
    assert not is_plain(ONE, request_)
    if type(request_) is dict:
        assert not is_plain(ONE, request_ | {"id": "42"} if "id" not in request_ else request_)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        (Datatype.INT8, 128), (Datatype.INT8, -129), (Datatype.UINT8, -1), (Datatype.UINT8, 256),
        (Datatype.INT16, 2**15), (Datatype.INT32, 2**31), (Datatype.UINT32, -1),
        (Datatype.INT64, 2**63), (Datatype.UINT64, -1), (Datatype.INT32, 1.0),
        (Datatype.INT64, -0.0), (Datatype.UINT64, 2**64), (Datatype.INT8, True),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit(datatype: Datatype, value: float) -> None:
    of = signature(spec(datatype=datatype))
    assert not is_plain(of, document(an_input(datatype=datatype, data=[value, 1])))
    reader = PlainJson(of, "m", "1")
    good = orjson.dumps(document(an_input(datatype=datatype)))
    assert check(reader, of, good)
    assert not check(reader, of, good.replace(b"[1,2]}]", b"[%b,2]}]" % json.dumps(value).encode()))


X = b'{"name":"x","shape":[1,2],"datatype":"FP32","data":'


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[%b[1,2]}]}' % X, b'{"id":"a","inputs":[%b[1,2]}]}' % X,
        b'{"inputs":[%b[1,2]}],"id":"a"}' % X, b'{"id":"a","id":"b","inputs":[%b[1,2]}]}' % X,
        b'{"id":"a","id":"","inputs":[%b[1,2]}]}' % X,
        b'{"id":"a?","id":"","inputs":[%b[1,2]}]}' % X,
        b'{"id":"b","id":"b?","inputs":[%b[1,2]}]}' % X,
        b'{"id":"?","id":"?","inputs":[%b[1,2]}]}' % X,
        b'{"id":"a?","id":"a?","inputs":[%b[1,2]}]}' % X,
        b'{"id":"b","id":"a","inputs":[%b[1,2]}]}' % X,
        b'{"id":7,"id":"b","inputs":[%b[1,2]}]}' % X, b'{"id":7,"inputs":[%b[1,2]}]}' % X,
        b'{"id": "a" ,"inputs":[%b[1,2]}]}' % X, b'{"id":"a\\u0062","inputs":[%b[1,2]}]}' % X,
        b'{"id":"a\x00","inputs":[%b[1,2]}]}' % X, b'{"id":"a\xff","inputs":[%b[1,2]}]}' % X,
        b'{"id":"\xed\xa0\x80","inputs":[%b[1,2]}]}' % X,
        b'{"id":"\\ud800","inputs":[%b[1,2]}]}' % X,
        b'{"id":"a', b'{"id":', b'{"id":"', b'{"id":"a","inputs":[%b' % X, b'{"inputs":[%b' % X,
        b'{"inputs":[%b]}]}' % X, b'{"inputs":[%b[1,2]}]}\n' % X, b' {"inputs":[%b[1,2]}]}' % X,
        b'{"inputs":[%b [1,2]}]}' % X, b'{"inputs":[%b[1,2] }]}' % X,
        b'{"inputs":[%b[1,2]}],"other":[{"a":[7]}]}' % X, b'{"inputs":[%b[1,2],"data":[3,4]}]}' % X,
        b'{"inputs":[%b[1,2],"shape":[2,1]}]}' % X, b'{"inputs":[%b[1,2],"name":"y"}]}' % X,
        b'{"inputs":[%b[1,2]}],"inputs":[%b[3,4]}]}' % (X, X),
        b'{"inputs":[%b[1,2]},%b[3,4]}]}' % (X, X), b'{"inputs":[%b"[1,2]}]}' % X,
        b'{"inputs":[%b[1,NaN]}]}' % X, b'{"inputs":[%b[1,Infinity]}]}' % X,
        b'{"inputs":[%b[1,1e999]}]}' % X, b'{"inputs":[%b[1,-0]}]}' % X,
        b'{"inputs":[%b[01,2]}]}' % X, b'{"inputs":[%b[1,2,]}]}' % X,
        b'{"inputs":[%b[1,tru]}]}' % X,
        b'{"inputs":[%b[1,true]}]}' % X, b'{"inputs":[%b[false,2]}]}' % X,
        b'{"inputs":[%b%b1%b}]}' % (X, b"[" * 2000, b"]" * 2000),
        b'{"inputs":[%b[1,2]}]}' % X.replace(b"data", b"d\\u0061ta"),
        b'{"inputs":[%b[true,2]}]}' % X.replace(b"data", b"d\\u0061ta"),
        b'{"inputs":[%b[1,2]}]}' % X.replace(b'"data"', b'"data":[3,4],"x\\"data"'),
        b'{"inputs":[%b[1,2]}]}' % X.replace(b'"data"', b'"data":7,"data"'),
        b'{"inputs":[%b[1,2]}]}' % X.replace(b'"shape"', b'"shape":[1,1],"shape"'),
        b'{"inputs":[%b[1,2]}]}' % X.replace(b"[1,2]", b"[1.0,2]"),
        b'{"inputs":[%b[1,2]}]}' % X.replace(b"[1,2]", b"[true,2]"),
        b'{"inputs":[%b[1,2]}]}' % X.replace(b"[1,2]", b"[1,2e0]"),
        b'{"in\\u0070uts":[%b[true,2]}]}' % X, b"\xef\xbb\xbf" + b'{"inputs":[%b[1,2]}]}' % X,
        b"", b"{}", b'"data":', b'"data":[1]}]}', b"[]", b"\xff",
    ],
)  # fmt: skip
def test_unusual_bodies(body: bytes) -> None:
    """Readers that know nothing, and readers that know a similar body."""
    check(PlainJson(ONE, "m", "1"), ONE, body)
    reader = PlainJson(ONE, "m", "1")
    for good in (b'{"inputs":[%b[5,6]}]}' % X, b'{"id":"z","inputs":[%b[5,6]}]}' % X):
        assert check(reader, ONE, good)
    for _ in range(2):
        check(reader, ONE, body)
        for id in (b"b", b"?", b"a?"):
            check(reader, ONE, body.replace(b'"id":"a"', b'"id":"%b"' % id))


@PROPERTY
@given(st.data())
def test_damaged_bodies(data: st.DataObject) -> None:
    """One reader for all, which remembers similar bodies."""
    of = data.draw(st.sampled_from((ONE, TWO)))
    reader = PlainJson(of, "m", "1")
    inputs = [an_input(), an_input(name="y", shape=[1, 2, 1], datatype="INT32")]
    given = document(*inputs[: len(of.inputs)])
    if data.draw(st.booleans()):
        given = {"id": data.draw(any_text.filter(str.isprintable))} | given
    body = json.dumps(given, separators=(",", data.draw(st.sampled_from([":", ": "])))).encode()
    check(reader, of, body)
    for _ in range(10):
        check(reader, of, data.draw(mutations(body)))


numbers = st.one_of(
    st.integers(-(2**65), 2**65), st.integers(-300, 300), st.floats(), st.floats(width=32),
    st.sampled_from([True, False, None, "1", [1], -0.0, 0, 127, 128, 255, 256]),
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def inputs(draw: st.DrawFn) -> Json:
    """Valid and almost valid inputs."""
    members: Json = {
        "name": draw(st.sampled_from("xxxxy")),
        "shape": draw(st.sampled_from([[1, 2], [2, 2], [2], [1], [1, 1, 2], [1, 2, 1], [3], []])),
        "datatype": draw(st.sampled_from([*NUMBERS, "FP32", "FP32", "BOOL", "BYTES", "FP16"])),
        "data": draw(st.lists(numbers, min_size=1, max_size=4)),
    }
    for _ in range(draw(st.sampled_from([0, 0, 1]))):
        name = draw(st.sampled_from([*members, "parameters", "other"]))
        members[name] = draw(values)
    names = draw(st.permutations(list(members)))
    return {name: members[name] for name in names}


@PROPERTY
@given(
    st.sampled_from(SIGNATURES), st.lists(inputs(), min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["id", "other", "outputs"]), any_text | values, max_size=1),
)  # fmt: skip
def test_any_document(of: Signature, items: list[Json], members: Json) -> None:
    reader = PlainJson(of, "m", "1")
    for whole in (members | {"inputs": items}, {"inputs": items} | members):
        body = json.dumps(whole).encode()  # not orjson: it would not write NaN and half surrogates
        for _ in range(2):
            check(reader, of, body)


@PROPERTY
@given(st.sampled_from(NUMBERS), st.lists(numbers, min_size=1, max_size=3), st.booleans())
def test_any_numbers(datatype: Datatype, data: list[Any], identified: bool) -> None:
    of = signature(spec(datatype=datatype, dims=(len(data),)))
    reader = PlainJson(of, "m", "1")
    id = {"id": "42"} if identified else {}
    shape = [1, len(data)]
    for content in ([1] * len(data), [1] * len(data), data):
        item = an_input(shape=shape, datatype=datatype, data=content)
        check(reader, of, json.dumps(document(item, **id), separators=(",", ":")).encode())


def test_inputs_with_different_row_counts() -> None:
    one = an_input(shape=[2, 2], data=[1, 2, 3, 4])
    assert not is_plain(TWO, document(one, an_input(name="y", shape=[1, 2, 1], datatype="INT32")))


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": {"binary_data_size": 8}}, {"parameters": {"shared_memory_region": "r"}},
        {"parameters": None}, {"other": 1}, {"data": {}, "shape": [1, 0]}, {"data": {"1": 2}},
        {"data": {}, "shape": [0, 2]}, {"data": [], "shape": [1, -0.0]}, {"data": [[], []]},
    ],
)  # fmt: skip
def test_members_in_alphabetical_order(changes: Json) -> None:
    """The shape comes last there, and looks like data."""
    of = signature(spec(dims=(-1,)))
    plain, other = (document(an_input()), document(an_input() | changes))
    reader = PlainJson(of, "m", "1")
    for _ in range(2):
        assert check(reader, of, json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
        assert not check(
            reader, of, json.dumps(other, sort_keys=True, separators=(",", ":")).encode()
        )


def test_long_bodies_are_for_the_complete_decoder() -> None:
    of = signature(spec(dims=(LONG // 2,)))
    assert not is_plain(of, document(an_input(shape=[1, LONG // 2], data=[1] * (LONG // 2))))


def test_views_of_bodies() -> None:
    reader = PlainJson(ONE, "m", "1")
    body = orjson.dumps(document(id="42"))
    for _ in range(3):
        found = reader.decode(memoryview(bytearray(body)))
        assert found is not None
        assert (found[0], found[1]["x"].array.tolist(), found[2]) == ("42", [[1, 2]], 1)


def test_varying_layouts_are_forgotten() -> None:
    """Thousands of different spaces, ids and shapes: plain bodies stay plain."""
    of = signature(spec(dims=(-1,)), max_batch_size=10_000)
    reader = PlainJson(of, "m", "1")
    for n in range(1, 3000):
        item = orjson.dumps(an_input(shape=[n, 1], data=[1] * n))
        body = b'{"id":"%d","inputs":[%b]}' % (n, b" " * (n % 1500) + item)
        assert (reader.decode(body) is not None) == (len(body) <= LONG)


# --- answers


def answered(of: Signature, arrays: list[Array], request_id: str = "") -> bytes | None:
    """Body of the plain answer, compared with the complete encoder's; None if not plain."""
    writer = PlainJson(of, 'm/"ü', "3")
    outputs = [
        Tensor(s.name, s.datatype, array) for s, array in zip(of.outputs, arrays, strict=False)
    ]
    timing = Timing(1_234_567, 500, 4)
    whole = InferResponse('m/"ü', "3", request_id, outputs, timing)
    found = None
    for _ in range(2):
        written = writer.write(outputs, 1)
        if written is not None:
            found = writer.encode(request_id, written, 0, 1)
            assert [found] == ResponseForm().encode(whole)[0]
    return found


@PROPERTY
@given(st.lists(tensors(), max_size=3), st.text(max_size=5), st.booleans())
def test_any_answer(given: list[Tensor], request_id: str, variable: bool) -> None:
    def dims(tensor: Tensor) -> tuple[int, ...]:
        return tuple(-1 if variable else size for size in tensor.array.shape)

    of = signature(
        outputs=tuple(TensorSpec(f"y{n}", t.datatype, dims(t)) for n, t in enumerate(given))
    )
    arrays: list[Any] = [tensor.array for tensor in given]
    found = answered(of, arrays, request_id)
    unwritable = (Datatype.FP16, Datatype.BF16, Datatype.BYTES)
    plain = all(t.datatype not in unwritable and np.isfinite(t.array).all() for t in given)
    assert (found is not None) == (plain and bool(given))


@pytest.mark.parametrize("datatype", [*NUMBERS, Datatype.BOOL])
def test_rows_of_a_batch(datatype: Datatype) -> None:
    of = signature(outputs=(spec("y", datatype), spec("z", datatype, (1,))))
    whole = (np.arange(12) % 100).astype(NUMPY[datatype]).reshape(6, 2)
    arrays: list[Array] = [whole[2:4], whole[2:4, :1]]
    assert answered(of, arrays, "42") is not None
    writer = PlainJson(of, "m", "3")
    tensors = [Tensor("y", datatype, whole), Tensor("z", datatype, whole[:, :1])]
    written = writer.write(tensors, 3)
    assert written is not None
    each = writer.encode_each(written, b"size ", b": ")
    for row, text in enumerate(each):
        body = writer.encode("", written, row, 1)
        assert text == b"size %d: %b" % (len(body), body)
    assert len(each) == 6
    for first, rows in ((0, 1), (1, 3), (4, 2)):
        own = [Tensor(t.name, datatype, t.array[first : first + rows]) for t in tensors]
        answer = InferResponse("m", "3", "7", own, Timing(0, 0, 6))
        assert [writer.encode("7", written, first, rows)] == ResponseForm().encode(answer)[0]


@pytest.mark.parametrize("shape", [(4, 0), (4, 2, 0), (4,), (4, 1), (4, 2, 3)])
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    of = signature(outputs=(spec("y", dims=shape[1:]),))
    writer = PlainJson(of, "m", "3")
    whole = Tensor("y", Datatype.FP32, np.arange(math.prod(shape), dtype=np.float32).reshape(shape))
    written = writer.write([whole], 4)
    assert (written is None) == (0 in shape)
    for row in range(4):
        if written is not None:
            own = Tensor("y", Datatype.FP32, whole.array[row : row + 1])
            answer = InferResponse("m", "3", "", [own], Timing(0, 0, 4))
            assert [writer.encode("", written, row, 1)] == ResponseForm().encode(answer)[0]


def test_answers_for_the_complete_encoder() -> None:
    of = signature(outputs=(spec("y"), spec("z")))
    good: Array = np.zeros((1, 2), np.float32)
    assert answered(of, [good, good]) is not None
    assert answered(of, [good]) is None
    assert answered(of, [good, good.astype(np.float64)]) is None
    assert answered(of, [good, np.full((1, 2), np.inf, np.float32)]) is None
    assert answered(of, [good, np.zeros((1, LONG), np.float32)]) is None
    assert PlainJson(signature(), "m", "1").write([], 1) is None
    other = [Tensor(name, Datatype.FP32, good) for name in "zy"]
    assert PlainJson(of, "m", "1").write(other, 1) is None


def test_unknown_inputs_are_refused_by_the_complete_decoder() -> None:
    body = orjson.dumps(document(an_input(name="z")))
    assert PlainJson(ONE, "m", "1").decode(body) is None
    with pytest.raises(InvalidRequest, match="unexpected inference input 'z'"):
        complete(ONE, body)
