"""Header blocks that are written, as the peer decodes them."""

from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.http2.headers import BlockWriter, RepeatedFields, literal

FIELDS = st.tuples(
    st.sampled_from([b":path", b"a", b"authorization", b"x-long"]),
    st.sampled_from([b"", b"1", b"/a/b", b"y" * 200, b"z" * 3000]),
)
HEADS = st.lists(st.lists(FIELDS, max_size=6).map(RepeatedFields), min_size=1, max_size=5)


@given(HEADS, st.data())
def test_any_order_of_heads_and_limits(heads: list[RepeatedFields], data: st.DataObject) -> None:
    blocks, decoder = BlockWriter(), Decoder()
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.integers(0, 4)) == 0:
            size = data.draw(st.sampled_from([0, 50, 300, 4096, 10_000]))
            blocks.limit_table(size)
            decoder.max_allowed_table_size = size
        if data.draw(st.booleans()):
            found = decoder.decode(blocks.literals([(b":status", b"200"), (b"b", b"2")]), raw=True)
            assert [tuple(field) for field in found] == [(b":status", b"200"), (b"b", b"2")]
        head = data.draw(st.sampled_from(heads))
        own = literal(b"grpc-timeout", b"1S")
        block = blocks.block(head)
        found = decoder.decode(block + own, raw=True)
        assert [tuple(field) for field in found] == [*head.fields, (b"grpc-timeout", b"1S")]
        assert decoder.header_table_size <= 4096
        if head in blocks.short:
            assert blocks.short[head] == block
            assert len(block) == len(head.fields)
