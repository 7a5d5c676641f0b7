"""Header blocks of requests, as the peer decodes them."""

from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.http2.request_blocks import RequestBlocks, RequestHead
from headrace.wire.http2.response_headers import literal

FIELDS = st.tuples(
    st.sampled_from([b":path", b"a", b"authorization", b"x-long"]),
    st.sampled_from([b"", b"1", b"/a/b", b"y" * 200, b"z" * 3000]),
)
HEADS = st.lists(st.lists(FIELDS, max_size=6).map(RequestHead), min_size=1, max_size=5)


@given(HEADS, st.data())
def test_any_order_of_heads_and_limits(heads: list[RequestHead], data: st.DataObject) -> None:
    blocks, decoder = RequestBlocks(), Decoder()
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.integers(0, 4)) == 0:
            size = data.draw(st.sampled_from([0, 50, 300, 4096, 10_000]))
            blocks.limit_table(size)
            decoder.max_allowed_table_size = size
        head = data.draw(st.sampled_from(heads))
        own = literal(b"grpc-timeout", b"1S")
        found = decoder.decode(blocks.block(head) + own, raw=True)
        assert [tuple(field) for field in found] == [*head.fields, (b"grpc-timeout", b"1S")]
        assert decoder.header_table_size <= 4096
