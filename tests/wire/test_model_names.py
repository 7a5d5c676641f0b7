"""Another name for the model in an answer that nobody reads otherwise."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.model_names import with_model_name

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text() | st.just("model_name"), inner, max_size=2)
    ),
    max_leaves=4,
)
MEMBERS = st.dictionaries(st.text().filter(lambda key: key != "model_name"), JSON, max_size=3)


@given(before=MEMBERS, after=MEMBERS, there=st.text(), here=st.text())
def test_the_name_is_another_one_and_nothing_else(
    before: Any, after: Any, there: str, here: str
) -> None:
    document = {**before, "model_name": there}
    document |= {key: value for key, value in after.items() if key not in before}
    found = with_model_name(orjson.dumps(document), here)
    assert orjson.loads(found) == {**document, "model_name": here}
    assert list(orjson.loads(found)) == list(document)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b'{"model_name"', b'{"model_name":', b'{"model_name": 3}',
        b'{"outputs": [{"model_name": "a"}]}', b'["model_name", "a"]', b'{"a": "model_name: x"}',
    ],
)  # fmt: skip
def test_what_has_no_such_name_stays(text: bytes) -> None:
    assert with_model_name(text, "other") == text


@given(st.binary())
def test_anything(data: bytes) -> None:
    with_model_name(memoryview(data), "m")


@pytest.mark.parametrize("piece", [b'\\"', b'"', b"x", b"\\", b"[", b'{"model_name":'])
def test_what_goes_on_for_ever_takes_no_longer_than_its_length(piece: bytes) -> None:
    text = b'{"a":"' + piece * 500_000
    assert with_model_name(text, "other") == text
