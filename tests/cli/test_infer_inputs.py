"""Any command line becomes valid inputs, or an error message."""

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.commands.infer_inputs import Random, Reader, random
from headrace.cli.remote import CommandFailed
from headrace.client.values import Declared
from headrace.core.datatypes import NUMPY, Datatype
from tests.protocol.strategies import PROPERTY

INPUTS = {
    "number": Declared("number", Datatype.INT8, (-1, 2), True),
    "text": Declared("text", Datatype.BYTES, (-1, 1), True),
    "also": Declared("also", Datatype.FP16, (-1, -1), True, optional=True),
}
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_NAMES = st.sampled_from([
    *INPUTS, "inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id"
])  # fmt: skip
_DOCUMENTS = st.recursive(
    _LEAVES | st.sampled_from(["INT8", "text", [1, 2]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
)


@PROPERTY
@given(
    st.sampled_from(list(INPUTS)),
    (st.text(alphabet=st.characters(exclude_characters="-@")) | _DOCUMENTS.map(json.dumps)).filter(
        lambda text: text != "-" and not text.startswith("@")
    ),
)
def test_one_input(name: str, text: str) -> None:
    with suppress(CommandFailed):
        found = Reader("m", INPUTS).read(None, [(name, text)], Random())
        array = found.tensors[name].array
        assert array.dtype == NUMPY[INPUTS[name].datatype]
        assert array.ndim == 2


@PROPERTY
@given(_DOCUMENTS.map(json.dumps))
def test_all_inputs(text: str) -> None:
    with suppress(CommandFailed):
        for tensor in Reader("m", INPUTS).read(text, [], Random()).tensors.values():
            assert isinstance(tensor.array, np.ndarray)


def test_texts_are_sent_unchanged() -> None:
    for text in ("42", "a=b", "null", "true", " a ", "1,2", "{no json"):
        found = Reader("m", {"text": INPUTS["text"]}).read(None, [("text", text)])
        assert found.tensors["text"].array.tolist() == [[text.encode()]]


@pytest.mark.parametrize("datatype", Datatype)
def test_made_up_values(datatype: Datatype) -> None:
    declared = Declared("x", datatype, (-1, 3, -1), True)
    array = random(declared, np.random.default_rng(1), 2, None)
    again = random(declared, np.random.default_rng(1), 2, None)
    assert (array.shape, array.dtype) == ((2, 3, 1), NUMPY[datatype])
    assert array.tolist() == again.tolist()
    assert random(declared, np.random.default_rng(1), 2, (1, 3, 4)).shape == (1, 3, 4)
    alone = Declared("x", datatype, (-1, 3))
    assert random(alone, np.random.default_rng(1), 2, None).shape == (1, 3)
