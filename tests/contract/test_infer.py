"""Inference over every transport: the same request has the same answer."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidRequest, NotFound, Unsupported
from headrace.core.tensors import Array
from tests.support.client import Client, Input, Parameter, strings
from tests.support.grpc_client import GrpcClient

_TWO_ROWS = {
    "INPUT0": np.arange(32, dtype=np.int32).reshape(2, 16),
    "INPUT1": np.full((2, 16), 3, np.int32),
}


def test_simple(client: Client) -> None:
    answer = client.infer("simple", _TWO_ROWS)
    assert (answer.model_name, answer.model_version) == ("simple", "1")
    assert answer.datatypes == {"OUTPUT0": "INT32", "OUTPUT1": "INT32"}
    np.testing.assert_array_equal(answer["OUTPUT0"], _TWO_ROWS["INPUT0"] + 3)
    np.testing.assert_array_equal(answer["OUTPUT1"], _TWO_ROWS["INPUT0"] - 3)


def _values(datatype: Datatype) -> Array:
    """Two rows of three: the extremes of the datatype, and values between them."""
    dtype = NUMPY[datatype]
    if datatype is Datatype.BYTES:
        elements = [b"", b"a", '\u20ac \U0001f600 \x00 "\\\n'.encode(), b"x" * 900, b"1", b"{}"]
        return strings(elements, [2, 3])
    if datatype is Datatype.BOOL:
        return np.array([[True, False, True], [False, False, True]])
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return np.array([[low, high, 0], [1, 2, 100]], dtype)
    return np.array([[0.1, -2.5, 1e-4], [0.0, 3.0, 65504.0]], dtype)


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype(client: Client, datatype: Datatype) -> None:
    values = _values(datatype)
    model = f"identity_{datatype}"
    if not client.carries(datatype):
        with pytest.raises(InvalidRequest, match=f"receiving {datatype} data via JSON is not supp"):
            client.infer(model, {"INPUT0": values})
        return
    answer = client.infer(model, {"INPUT0": values})
    assert answer.datatypes == {"OUTPUT0": datatype.value}
    assert answer["OUTPUT0"].dtype == values.dtype
    assert answer["OUTPUT0"].shape == (2, 3)
    assert answer["OUTPUT0"].tolist() == values.tolist()


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES])
@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_no_elements(client: Client, datatype: Datatype, shape: tuple[int, int]) -> None:
    answer = client.infer(f"identity_{datatype}", {"INPUT0": np.empty(shape, NUMPY[datatype])})
    assert answer["OUTPUT0"].shape == shape


def test_nan_and_infinities(client: Client) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0]], np.float32)
    answer = client.infer("identity_FP32", {"INPUT0": values})
    np.testing.assert_array_equal(answer["OUTPUT0"], values)
    assert np.signbit(answer["OUTPUT0"]).tolist() == np.signbit(values).tolist()


def test_scalar_optional_and_reshaped_tensors(client: Client) -> None:
    answer = client.infer("scalar", {"INPUT0": np.array(-1e300)})
    assert answer["OUTPUT0"].shape == ()
    assert answer["OUTPUT0"] == -1e300
    values = np.array([1, 2], np.float32)
    assert client.infer("optional_bias", {"INPUT0": values})["OUTPUT0"].tolist() == [101, 102]
    given = {"INPUT0": values, "BIAS": np.array([5], np.float32)}
    assert client.infer("optional_bias", given)["OUTPUT0"].tolist() == [6, 7]
    rows = np.array([[1], [2], [3]], np.float32)  # without an axis in the model
    answer = client.infer("flat", {"INPUT0": rows})
    assert answer["OUTPUT0"].tolist() == rows.tolist()
    rows = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    answer = client.infer("folded", {"INPUT0": rows})
    assert answer["OUTPUT0"].tolist() == rows.reshape(2, 4, 1).tolist()


def test_outputs_of_several_datatypes(client: Client) -> None:
    answer = client.infer("convert", {"INPUT0": np.array([[1, -2, 3, 4]], np.int32)})
    assert answer["FP32"].tolist() == [[1.0, -2.0, 3.0, 4.0]]
    assert answer["INT64"].tolist() == [[1, -2, 3, 4]]
    assert answer["BYTES"].tolist() == [[b"1", b"-2", b"3", b"4"]]


@pytest.mark.parametrize("wanted", [["INT64"], ["BYTES", "FP32"], ["FP32", "INT64", "BYTES"]])
def test_only_requested_outputs_come_back(client: Client, wanted: list[str]) -> None:
    given = {"INPUT0": np.zeros((2, 4), np.int32)}
    answer = client.infer("convert", given, outputs=wanted)
    assert set(answer.outputs) == set(wanted)


@pytest.mark.parametrize(
    ("model", "version", "served"),
    [("versions_default", "", 10), ("versions_all", "1", 1), ("versions_specific", "", 3)],
)
def test_versions(client: Client, model: str, version: str, served: int) -> None:
    answer = client.infer(model, {"INPUT0": np.zeros((1, 1), np.float32)}, version=version)
    assert answer.model_version == str(served)
    assert answer["OUTPUT0"].tolist() == [[served]]


def test_a_decoupled_model_needs_a_stream(client: Client) -> None:
    door = "ModelInfer RPC" if isinstance(client, GrpcClient) else "HTTP end point"
    text = f"^{door} doesn't support models with decoupled transaction policy$"
    with pytest.raises(Unsupported, match=text):
        client.infer("decoupled", {"INPUT0": np.zeros((1, 1), np.float32)})


def test_unknown_model_and_version(client: Client) -> None:
    given = {"INPUT0": np.zeros((1, 1), np.float32)}
    with pytest.raises(NotFound, match="Request for unknown model: 'nope' is not found"):
        client.infer("nope", given)
    with pytest.raises(NotFound, match="'versions_specific' version 2 is not found"):
        client.infer("versions_specific", given, version="2")
    with pytest.raises(NotFound, match="'versions_all' version 7 is not found"):
        client.infer("versions_all", given, version="7")


def test_the_id_is_returned_and_parameters_are_accepted(client: Client) -> None:
    for id in ("", "a b", "x" * 500, "\u00fc\u20ac", '"\\'):
        assert client.infer("simple", _TWO_ROWS, id=id).id == id
    parameters: dict[str, Parameter] = {
        "text": "x", "count": -3, "share": 0.5, "flag": True, "priority": 1, "timeout": 10_000_000,
        "sequence_id": 0, "sequence_start": False, "sequence_end": False,
    }  # fmt: skip
    answer = client.infer("simple", _TWO_ROWS, parameters=parameters)
    assert answer.parameters == {}


def test_timings(client: Client) -> None:
    answer = client.infer("simple", _TWO_ROWS)
    names = [entry.partition(";")[0].strip() for entry in answer.server_timing.split(",")]
    assert names == ["queue", "compute", "batch"]
    assert answer.server_timing.endswith('batch;desc="2"')
    answer = client.infer("simple", _TWO_ROWS, parameters={"headrace_timing": True})
    assert set(answer.parameters) == {"queue_us", "compute_us", "batch_rows"}
    assert answer.parameters["batch_rows"] == 2
    assert client.infer("simple", _TWO_ROWS).parameters == {}
    with pytest.raises(NotFound) as refusal:
        client.infer("nope", _TWO_ROWS)
    assert refusal.value.spent == (0, 0, 0)


def test_classification(client: Client) -> None:
    rows = np.array([[0.5, 4.0, -1.0, 2.25], [9.0, 9.0, 0.0, 9.0]], np.float32)
    answer = client.infer("ranked", {"INPUT0": rows}, classes={"OUTPUT0": 3})
    assert answer.datatypes == {"OUTPUT0": "BYTES"}
    assert answer["OUTPUT0"].tolist() == [
        [b"4.000000:1:one", b"2.250000:3", b"0.500000:0:zero"],  # the fourth has no label
        [b"9.000000:0:zero", b"9.000000:1:one", b"9.000000:3"],
    ]
    answer = client.infer("ranked", {"INPUT0": rows}, classes={"OUTPUT0": 100})
    assert answer["OUTPUT0"].shape == (2, 4)
    given = {name: np.arange(6, dtype=np.float32).reshape(2, 3) for name in ("INPUT0", "INPUT1")}
    answer = client.infer("unbatched", given, classes={"OUTPUT0": 2})
    assert answer["OUTPUT0"].tolist() == [b"10.000000:5", b"8.000000:4"]
    assert set(answer.outputs) == {"OUTPUT0"}
    flags = {"INPUT0": _values(Datatype.BOOL)}
    text = "class result not available for output due to unsupported type 'BOOL'"
    with pytest.raises(InvalidRequest, match=text):
        client.infer("identity_BOOL", flags, classes={"OUTPUT0": 1})


@pytest.mark.slow
def test_classes_of_too_many_elements(client: Client) -> None:
    many = {"INPUT0": np.zeros((1, 1_000_001), np.float32)}
    with pytest.raises(InvalidRequest, match="classification output tensor too large"):
        client.infer("identity_FP32", many, classes={"OUTPUT0": 1})


def test_many_callers_get_their_own_rows(client: Client, pool: ThreadPoolExecutor) -> None:
    def ask(number: int) -> None:
        rows = number % 8 + 1
        values = np.full((rows, 16), number, np.int32)
        values += np.arange(rows, dtype=np.int32)[:, None] * 1000
        answer = client.infer("simple", {"INPUT0": values, "INPUT1": values}, id=str(number))
        assert answer.id == str(number)
        np.testing.assert_array_equal(answer["OUTPUT0"], values * 2)

    assert len(list(pool.map(ask, range(160)))) == 160


def test_requests_of_different_shapes_at_once(client: Client, pool: ThreadPoolExecutor) -> None:
    def ask(number: int) -> None:
        length = number % 5 + 1
        answer = client.infer("row_sum", {"INPUT0": np.full((2, length), number, np.float32)})
        assert answer["OUTPUT0"].tolist() == [[number * length]] * 2

    assert len(list(pool.map(ask, range(160)))) == 160


def test_large_tensor(client: Client) -> None:
    values = np.random.default_rng(1).random((8, 20_000), np.float32)
    answer = client.infer("identity_FP32", [Input("INPUT0", values)])
    np.testing.assert_array_equal(answer["OUTPUT0"], values)
