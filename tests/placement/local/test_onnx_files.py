"""External tensor data: found wherever a model names it, within its directory only."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.core.tensors import Array
from headrace.placement.local.onnx import OnnxBackend
from headrace.placement.local.onnx_files import check_locations, read_contents
from tests.models import onnx_graphs
from tests.support.busy_model import NAME, write_busy_model

GRAPHS = [
    onnx_graphs.external_weight, onnx_graphs.external_weight_in_branch,
    onnx_graphs.external_weight_in_attribute, onnx_graphs.external_weight_in_function,
]  # fmt: skip
every_place = pytest.mark.parametrize("graph", GRAPHS)
Graph = Callable[[str], bytes]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model's directory; in and beside it are files that must not be read."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    for file in (tmp_path / "secret.bin", tmp_path / "m" / "shared.bin"):
        file.write_bytes(np.array([10, 20], np.float32).tobytes())
    return tmp_path / "m"


def write(root: Path, model: bytes) -> Path:
    path = root / "1" / "model.onnx"
    path.write_bytes(model)
    return path


def refused(root: Path, model: bytes) -> bool:
    """True if the backend refuses `model` because of its tensor's location."""
    path = write(root, model)
    with pytest.raises(LoadFailed, match="outside of the directory of the model file"):
        check_locations(read_contents(path).locations, path, root)
    with pytest.raises(LoadFailed, match="outside of the directory of the model file"):
        OnnxBackend().load(LoadSpec("m", path, root))
    return True


def test_a_model_without_external_files(root: Path) -> None:
    assert read_contents(write(root, onnx_graphs.heavy(16, 2))).locations == []


def test_a_graph_with_a_loop_is_recognized(root: Path) -> None:
    write_busy_model(root)
    loops = root / NAME / "1" / "model.onnx"
    assert read_contents(loops).loops
    loaded = OnnxBackend().load(LoadSpec(NAME, loops, root / NAME))
    assert loaded.traits.loops
    assert loaded.traits.file_bytes == loops.stat().st_size
    assert not read_contents(write(root, onnx_graphs.heavy(16, 2))).loops


@every_place
def test_files_are_found(root: Path, graph: Graph) -> None:
    assert read_contents(write(root, graph("some/weights.bin"))).locations == ["some/weights.bin"]


@pytest.mark.parametrize(
    "graph", [onnx_graphs.external_weight, onnx_graphs.external_weight_in_branch]
)
@pytest.mark.parametrize("location", ["weights.bin", "./weights.bin", "deeper/weights.bin"])
def test_a_file_beside_the_model_is_read(root: Path, graph: Graph, location: str) -> None:
    path = write(root, graph(location))
    target = path.parent / location
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(np.array([10, 20], np.float32).tobytes())
    model = OnnxBackend().load(LoadSpec("m", path, root))
    inputs: dict[str, Array] = {
        "INPUT0": np.array([[1, 2]], np.float32),
        "FLAG": np.array([True]),
    }
    named = {info.name: inputs[info.name] for info in model.inputs}
    (result,) = model.infer(named, ["OUTPUT0"])
    assert result.tolist() == [[11, 22]]


@every_place
def test_a_missing_file_fails_to_load(root: Path, graph: Graph) -> None:
    path = write(root, graph("missing.bin"))
    check_locations(read_contents(path).locations, path, root)
    with pytest.raises(LoadFailed, match=r"cannot load m/1/model\.onnx"):
        OnnxBackend().load(LoadSpec("m", path, root))


@every_place
@pytest.mark.parametrize(
    "location",
    [
        "../../secret.bin", "./../../secret.bin", "deeper/../../../secret.bin", "../shared.bin",
        "../../m-other/secret.bin", "/etc/hostname", "", "a\0b", "*/_ORT_MEM_ADDR_/*",
    ],
)  # fmt: skip
def test_a_file_that_is_not_beside_the_model_is_refused(
    root: Path, graph: Graph, location: str
) -> None:
    if location:
        assert refused(root, graph(location))
    else:  # the directory itself, which cannot be read as a file
        with pytest.raises(LoadFailed):
            OnnxBackend().load(LoadSpec("m", write(root, graph(location)), root))


@every_place
def test_an_absolute_path_is_refused_also_if_it_leads_inside(root: Path, graph: Graph) -> None:
    assert refused(root, graph(str(root / "1" / "weights.bin")))


@every_place
def test_a_link_that_leads_outside_is_refused(root: Path, graph: Graph) -> None:
    (root / "1" / "weights.bin").symlink_to(root.parent / "secret.bin")
    assert refused(root, graph("weights.bin"))


def test_a_model_file_that_is_a_link_has_its_data_beside_its_target_too(root: Path) -> None:
    """Downloads may be in a cache of blobs: both files are links, to one directory."""
    blobs = root / "blobs"
    blobs.mkdir()
    (blobs / "one").write_bytes(onnx_graphs.external_weight("weights.bin"))
    (blobs / "two").write_bytes(np.array([10, 20], np.float32).tobytes())
    path = root / "1" / "model.onnx"
    path.symlink_to(blobs / "one")
    (root / "1" / "weights.bin").symlink_to(blobs / "two")
    OnnxBackend().load(LoadSpec("m", path, root)).close()
    (root / "1" / "weights.bin").unlink()
    (root / "1" / "weights.bin").symlink_to(root / "shared.bin")
    with pytest.raises(LoadFailed, match="outside of the directory of the model file"):
        OnnxBackend().load(LoadSpec("m", path, root))


def test_a_linked_directory_that_leads_outside_is_refused(root: Path) -> None:
    (root / "1" / "weights").symlink_to(root.parent)
    assert refused(root, onnx_graphs.external_weight("weights/secret.bin"))


def test_a_circular_link_or_too_long_a_name_fails_to_load(root: Path) -> None:
    (root / "1" / "a").symlink_to("b")
    (root / "1" / "b").symlink_to("a")
    path = write(root, onnx_graphs.external_weight("a/weights.bin"))
    with pytest.raises(LoadFailed):
        OnnxBackend().load(LoadSpec("m", path, root))
    path = write(root, onnx_graphs.external_weight("x" * 5_000))
    with pytest.raises(LoadFailed):
        OnnxBackend().load(LoadSpec("m", path, root))


def test_a_linked_repository_stays_confined(root: Path, tmp_path: Path) -> None:
    path = write(root, onnx_graphs.external_weight("weights.bin"))
    (path.parent / "weights.bin").write_bytes(bytes(8))
    linked = tmp_path / "linked"
    linked.symlink_to(root)
    OnnxBackend().load(LoadSpec("m", linked / "1" / "model.onnx", linked)).close()


def test_a_name_that_is_not_utf_8_is_found(root: Path) -> None:
    model = onnx_graphs.external_weight("../../@@@@").replace(b"@@@@", b"\xff\xfe/x")
    assert read_contents(write(root, model)).locations == [os.fsdecode(b"../../\xff\xfe/x")]
    assert refused(root, model)


def test_a_field_number_that_other_parsers_would_cut_is_refused(root: Path) -> None:
    """Some parsers cut a tag to 32 bits, and then see another field."""
    graph = onnx_graphs.external_weight("../../secret.bin")
    tag, size = graph.index(b"\x6a"), 1  # 13 << 3 | 2: TensorProto.external_data
    while graph[tag + 2 : tag + 12] != b"\x0a\x08location":
        tag = graph.index(b"\x6a", tag + 1)
    hidden = graph[:tag] + b"\xea\x80\x80\x80\x10" + graph[tag + size :]
    path = root / "1" / "model.onnx"
    path.write_bytes(_grown(graph, hidden))
    with pytest.raises(LoadFailed, match="a field number is too large"):
        read_contents(path)


def _grown(before: bytes, after: bytes) -> bytes:
    """`after` as the only tensor of a graph, so that no enclosing length changes."""
    start = before.index(b"\x08\x02\x10\x01")  # dims 2, FLOAT: where the tensor begins
    end = before.index(b"secret.bin") + len(b"secret.bin")
    tensor = after[start : end + len(after) - len(before)]
    graph = b"\x2a" + _varint(len(tensor)) + tensor
    return b"\x3a" + _varint(len(graph)) + graph


def _varint(value: int) -> bytes:
    low, high = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


def test_a_file_of_zeros_is_refused_at_once(root: Path) -> None:
    """Read as protobuf, two zeros are a field: a file of 47 MB was walked for a minute."""
    file = root / "model.onnx"
    file.write_bytes(bytes(1_000))
    with pytest.raises(LoadFailed, match="a field has the number 0"):
        read_contents(file)


def test_deeply_nested_graphs_are_refused(root: Path) -> None:
    message = b""
    for _ in range(30):  # graph → node → attribute → graph …
        for tag in (0x32, 0x2A, 0x0A):
            message = bytes([tag]) + _varint(len(message)) + message
    path = write(root, b"\x3a" + _varint(len(message)) + message)
    with pytest.raises(LoadFailed, match="nested too deeply"):
        read_contents(path)


def test_a_git_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(LoadFailed, match="pointer of Git LFS"):
        read_contents(file)
