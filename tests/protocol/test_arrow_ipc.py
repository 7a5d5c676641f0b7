"""Arrow IPC streams: what damage to them may raise, decoded here, where many are tried."""

import random

import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, PayloadTooLarge
from headrace.core.limits import uncharged
from headrace.core.signature import Signature, TensorSpec
from headrace.protocol.arrow_ipc import decode_stream, limited

pa = pytest.importorskip("pyarrow")


def stream(column: object, compression: str | None = None) -> bytes:
    batch, sink = pa.record_batch({"INPUT0": column}), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def decoded(body: bytes, datatype: Datatype) -> None:
    signature = Signature("m", 64, (TensorSpec("INPUT0", datatype, (-1,)),), ())
    decode_stream(signature, "m", "", body, limited(uncharged, 1 << 20))


def of_months(body: bytes) -> bytes:
    """The stream with intervals of months alone, a type that pyarrow writes no stream of."""
    for place in range(len(body)):
        other = body[:place] + b"\x00" + body[place + 1 :]
        try:
            schema = pa.ipc.open_stream(other).schema
        except (pa.ArrowException, ValueError, OSError):
            continue
        if "month_interval" in str(schema):
            return other
    raise AssertionError("no byte of the stream is the interval's unit")


@pytest.mark.parametrize("nested", [False, True])
def test_a_type_without_arrays_is_refused(nested: bool) -> None:
    kind = pa.month_day_nano_interval()
    column = pa.array([[None]], pa.list_(kind)) if nested else pa.array([None], kind)
    with pytest.raises(InvalidRequest, match="'INPUT0' has the type month_interval, which no"):
        decoded(of_months(stream(column)), Datatype.FP32)


def test_damage_is_an_invalid_request_or_has_no_effect() -> None:
    texts, interval = pa.array(["a", "bb", "", "d"]), pa.month_day_nano_interval()
    columns = [texts, texts.dictionary_encode(), texts.cast(pa.string_view())]
    columns += [pa.array([[1], [2]]), pa.array([0.5, 1.5]), pa.array([[[1.0], [2.0]]])]
    columns += [pa.array([None], interval), pa.array([[(1, 2, 3)]], pa.list_(interval))]
    bodies = [stream(column, name) for column in columns for name in (None, "lz4", "zstd")]
    rng = random.Random(1)
    refused = 0
    for _ in range(20_000):
        damaged = bytearray(rng.choice(bodies))
        for _ in range(rng.randint(1, 4)):
            value = rng.choice([0, 1, 127, 128, 255, rng.randrange(32), rng.randrange(256)])
            damaged[rng.randrange(len(damaged))] = value
        try:
            decoded(bytes(damaged), rng.choice([Datatype.BYTES, Datatype.FP32]))
        except (InvalidRequest, PayloadTooLarge):
            refused += 1
    assert refused > 10_000
