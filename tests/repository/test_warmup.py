"""The samples of a configuration: what is read of them, and what is said of wrong ones."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.errors import InvalidConfig
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import raw_bytes
from headrace.placement.warming import Sample
from headrace.repository.config import parse_config
from headrace.repository.reading import read_samples

FP32 = TensorSpec("x", Datatype.FP32, (2,))
TEXT = TensorSpec("t", Datatype.BYTES, (-1,))


def read(
    root: Path, config: str, *inputs: TensorSpec, max_batch_size: int = 4
) -> tuple[Sample, ...]:
    """The samples of a configuration with these inputs."""
    signature = Signature("m", max_batch_size, inputs or (FP32,), ())
    file = parse_config(config, "m/config.pbtxt")
    return read_samples(file, file.config, signature, root)


def value(data: str, kind: str = "FP32", dims: str = "dims: 2", name: str = "x") -> str:
    """One input of a sample."""
    return f'inputs {{ key: "{name}" value {{ data_type: TYPE_{kind} {dims}\n {data} }} }}'


def write(root: Path, name: str, content: bytes) -> None:
    """A file in the directory of warm-up data."""
    path = root / "warmup" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def arrays(sample: Sample, name: str = "x") -> list[list[object]]:
    """The input of each request."""
    return [request.inputs[name].array.tolist() for request in sample.requests("m", "1")]


def test_none(tmp_path: Path) -> None:
    assert read(tmp_path, "") == ()
    assert read(tmp_path, "model_warmup { batch_size: 0 inputs { key: 'nonsense' } }") == ()


def test_zeros(tmp_path: Path) -> None:
    [sample] = read(
        tmp_path, "model_warmup { name: 'a' batch_size: 2 " + value("zero_data: true") + "}"
    )
    assert (sample.name, sample.batch_size, sample.count) == ("a", 2, 1)
    assert arrays(sample) == [[[0, 0]], [[0, 0]]]


@pytest.mark.parametrize("datatype", Datatype)
def test_zeros_and_random_data_of_every_datatype(tmp_path: Path, datatype: Datatype) -> None:
    kind = "STRING" if datatype is Datatype.BYTES else datatype.value
    spec = TensorSpec("x", datatype, (3, 2))
    for data in ("zero_data: true", "random_data: true"):
        told = value(data, kind, "dims: [ 3, 2 ]")
        [sample] = read(tmp_path, f"model_warmup {{ batch_size: 2 count: 5 {told} }}", spec)
        assert sample.count == 5
        first, second = sample.requests("m", "1")
        signature = Signature("m", 4, (spec,), ())
        assert signature.check(first) == signature.check(second) == 1
        array = np.asarray(first.inputs["x"].array)
        assert array.dtype == NUMPY[datatype]
        again = sample.requests("m", "1")[0].inputs["x"].array
        assert again.tolist() == array.tolist()  # whatever a load does, the next does, too
        if data == "zero_data: true":
            assert not array.any()
        elif datatype is not Datatype.BOOL:
            assert array.any()
            assert array.tolist() != second.inputs["x"].array.tolist()


def test_a_model_that_does_not_batch_has_no_rows(tmp_path: Path) -> None:
    config = "model_warmup { batch_size: 1 " + value("zero_data: true") + "}"
    [sample] = read(tmp_path, config, max_batch_size=0)
    assert arrays(sample) == [[0, 0]]


def test_a_file_is_for_each_request_or_for_all_of_them(tmp_path: Path) -> None:
    write(tmp_path, "one", np.array([1, 2], "<f4").tobytes())
    write(tmp_path, "all", np.array([1, 2, 3, 4], "<f4").tobytes())
    one, each = read(
        tmp_path,
        "model_warmup { batch_size: 2 " + value("input_data_file: 'one'") + "}"
        "model_warmup { batch_size: 2 " + value("input_data_file: 'all'") + "}",
    )
    assert arrays(one) == [[[1, 2]], [[1, 2]]]
    assert arrays(each) == [[[1, 2]], [[3, 4]]]


@given(st.lists(st.binary(max_size=9), min_size=4, max_size=4))
def test_texts_have_their_lengths_before_them(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes]
) -> None:
    root = tmp_path_factory.mktemp("texts")
    write(root, "texts", bytes(raw_bytes(np.array(texts, object))))
    told = value("input_data_file: 'texts'", "STRING", "dims: 2", "t")
    [sample] = read(root, f"model_warmup {{ batch_size: 2 {told} }}", TEXT)
    assert arrays(sample, "t") == [[texts[:2]], [texts[2:]]]
    told = told.replace("dims: 2", "dims: 4")
    [sample] = read(root, f"model_warmup {{ batch_size: 2 {told} }}", TEXT)
    assert arrays(sample, "t") == [[texts], [texts]]


def test_an_optional_input_may_be_left_out(tmp_path: Path) -> None:
    extra = TensorSpec("y", Datatype.FP32, (2,), optional=True)
    config = "model_warmup { batch_size: 1 " + value("zero_data: true") + "}"
    [sample] = read(tmp_path, config, FP32, extra)
    assert list(sample.inputs) == ["x"]


@pytest.mark.parametrize(("config", "told"), [
    ("model_warmup {\n batch_size: 5 " + value("zero_data: true") + "}",
     "m/config.pbtxt:2: model_warmup[0].batch_size: must be at most 4, as max_batch_size has"
     " it, got 5"),
    ("model_warmup {\n batch_size: 1\n " + value("zero_data: true", name="z") + "}",
     "m/config.pbtxt:3: model_warmup[0].inputs['z']: the model has no such input, it has"
     " ['x']\nm/config.pbtxt:3: model_warmup[0].inputs: the model also needs ['x']"),
    ("model_warmup { batch_size: 1 " + value("zero_data: true", "INT32") + "}",
     "m/config.pbtxt:1: model_warmup[0].inputs['x'].value.data_type: must be that of the"
     " input, FP32; got INT32"),
    ("model_warmup { batch_size: 1\ninputs { key: 'x'\n value { dims: 2 zero_data: true } } }",
     "m/config.pbtxt:3: model_warmup[0].inputs['x'].value.data_type: must be that of the"
     " input, FP32; it is missing"),
    ("model_warmup { batch_size: 1 " + value("zero_data: true", dims="dims: -1") + "}",
     "m/config.pbtxt:1: model_warmup[0].inputs['x'].value.dims: every dimension must be"
     " given, got [-1]"),
    ("model_warmup { batch_size: 1 " + value("zero_data: true", dims="dims: [4, 2]") + "}",
     "m/config.pbtxt:1: model_warmup[0].inputs['x'].value.dims: [4,2] do not fit: those of"
     " the input are [2], without that of the batch"),
    ("model_warmup { batch_size: 1 " + value("") + "}",
     "m/config.pbtxt:1: model_warmup[0].inputs['x'].value: one of zero_data, random_data and"
     " input_data_file must be set"),
    ("model_warmup { batch_size: 1 " + value("input_data_file: 'short'") + "}",
     "m/config.pbtxt:2: model_warmup[0].inputs['x'].value.input_data_file: 'short': FP32 of"
     " shape [1,2] takes 8 bytes, the file has 3"),
    ("model_warmup { batch_size: 2 " + value("input_data_file: 'short'") + "}",
     "m/config.pbtxt:2: model_warmup[0].inputs['x'].value.input_data_file: 'short': FP32 of"
     " shape [1,2] takes 8 bytes (or 16 for 2 requests), the file has 3"),
    ("model_warmup { batch_size: 1 " + value("input_data_file: 'none'") + "}",
     "m/config.pbtxt:2: model_warmup[0].inputs['x'].value.input_data_file: 'none' cannot be"
     " read: No such file or directory"),
])  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, config: str, told: str) -> None:
    write(tmp_path, "short", b"123")
    with pytest.raises(InvalidConfig) as caught:
        read(tmp_path, config)
    assert str(caught.value) == told


@pytest.mark.parametrize("name", ["../secret", "link", "linked/secret", "", ".", "a\\0b"])
def test_nothing_outside_of_the_directory_is_read(tmp_path: Path, name: str) -> None:
    root = tmp_path / "m"
    (root / "warmup").mkdir(parents=True)
    (root / "secret").write_bytes(bytes(8))
    (root / "warmup" / "link").symlink_to(root / "secret")
    (root / "warmup" / "linked").symlink_to(root)
    config = "model_warmup { batch_size: 1 " + value(f"input_data_file: '{name}'") + "}"
    with pytest.raises(InvalidConfig, match="cannot be read: ") as caught:
        read(root, config)
    assert str(tmp_path) not in str(caught.value)


def test_texts_that_are_cut_off(tmp_path: Path) -> None:
    write(tmp_path, "texts", b"\x05\x00\x00\x00ab")
    told = value("input_data_file: 'texts'", "STRING", "dims: 1", "t")
    with pytest.raises(InvalidConfig, match="'texts': incomplete string data: element 0 claims 5"):
        read(tmp_path, f"model_warmup {{ batch_size: 1 {told} }}", TEXT)
