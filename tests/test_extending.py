"""Names for plugins that are more than another module's."""

import pytest

from headrace.core.errors import InvalidRequest, Unavailable
from headrace.core.signature import Signature, TensorSpec
from headrace.extending import Datatype, decode_flat

KNOWN = Signature("m", 0, (TensorSpec("x", Datatype.FP32, (2,)),), ())


def test_flat_inputs_of_a_model_that_is_loaded_and_of_one_that_is_not() -> None:
    assert decode_flat(KNOWN, "m", "1", b'{"x": [1, 2]}').inputs["x"].array.tolist() == [1, 2]
    with pytest.raises(InvalidRequest):
        decode_flat(KNOWN, "m", "1", b"[1]")
    with pytest.raises(Unavailable, match="model 'm' is being loaded"):
        decode_flat(None, "m", "1", b'{"x": [1, 2]}')
