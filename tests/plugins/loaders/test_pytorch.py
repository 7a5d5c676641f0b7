"""PyTorch programs: TorchScript and exported ones; skipped without PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.plugins.loaders.pytorch import moved_program
from tests.plugins.loaders.served import Served

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's own

NUMBERS = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)


class Scorer(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Returns scores and the index of the best."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: Any, scale: Any) -> Any:
        scores = self.layer(x) * scale
        return scores, scores.argmax(1)


class Ranged(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Creates a tensor of its own."""

    def forward(self, x: Any) -> Any:
        return x + torch.arange(4, device=x.device)


class InPlace(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Writes to its input."""

    def forward(self, x: Any) -> Any:
        return x.add_(1)


SCALES = np.full((6, 1), 2, np.float32)
MODEL = Scorer()
TENSORS = torch.from_numpy(NUMBERS), torch.from_numpy(SCALES)
EXPECTED = [tensor.detach().numpy() for tensor in MODEL(*TENSORS)]
OUTPUTS = [
    {"name": "OUTPUT__0", "data_type": "TYPE_FP32", "dims": [3]},
    {"name": "OUTPUT__1", "data_type": "TYPE_INT64", "dims": [1]},
]


def script(folder: Path, module: Any = MODEL, *examples: Any) -> Path:
    torch.jit.save(torch.jit.trace(module, examples or TENSORS), folder / "model.pt")
    return folder / "model.pt"


def export(folder: Path, **options: Any) -> Path:
    program = torch.export.export(MODEL, TENSORS, **options)
    torch.export.save(program, folder / "model.pt2")
    return folder / "model.pt2"


def floats(name: str, dims: int) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": [dims]}


@pytest.mark.parametrize(
    "names", [("INPUT__0", "INPUT__1"), ("scale", "x"), ("first", "second"), ("b__1", "a__0")]
)
def test_torchscript(tmp_path: Path, names: tuple[str, str]) -> None:
    swapped = names[0] in ("scale", "b__1")
    sizes = (1, 4) if swapped else (4, 1)
    inputs = [floats(name, size) for name, size in zip(names, sizes, strict=True)]
    given = {"max_batch_size": 8, "input": inputs, "output": OUTPUTS}
    served = Served("pytorch", script(tmp_path), given, trusted=True)
    arrays = (SCALES, NUMBERS) if swapped else (NUMBERS, SCALES)
    row = dict(zip(names, arrays, strict=True))
    parts = [{n: a[:2] for n, a in row.items()}, {n: a[2:] for n, a in row.items()}]
    answers = served.ask_all(parts)
    np.testing.assert_allclose(answers[1]["OUTPUT__0"], EXPECTED[0][2:], rtol=1e-5)
    assert answers[0]["OUTPUT__1"][:, 0].tolist() == EXPECTED[1][:2].tolist()


def test_a_program_may_write_to_its_input(tmp_path: Path) -> None:
    path = script(tmp_path, InPlace(), torch.zeros(2, 4))
    given = {"max_batch_size": 8, "input": [floats("x", 4)], "output": [floats("y", 4)]}
    served = Served("pytorch", path, given, trusted=True)
    np.testing.assert_allclose(served.ask({"x": NUMBERS})["y"], NUMBERS + 1)


def test_torchscript_needs_a_declared_signature(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"declare input in config\.pbtxt \(.* are x, scale\)"):
        Served("pytorch", script(tmp_path), trusted=True)


def test_an_exported_program(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", max=32)
    path = export(tmp_path, dynamic_shapes={"x": {0: rows}, "scale": {0: rows}})
    served = Served("pytorch", path, trusted=True)
    assert served.config["max_batch_size"] == 32
    assert served.signature() == {
        "INPUT__0": ("FP32", [4]), "INPUT__1": ("FP32", [1]), "OUTPUT__0": ("FP32", [3]),
        "OUTPUT__1": ("INT64", [1]),
    }  # fmt: skip
    answer = served.ask({"INPUT__0": NUMBERS, "INPUT__1": SCALES})
    np.testing.assert_allclose(answer["OUTPUT__0"], EXPECTED[0], rtol=1e-5)
    inputs = [{"name": "scale"}, {"name": "x"}]
    named = Served("pytorch", path, {"max_batch_size": 4, "input": inputs}, trusted=True)
    assert named.signature()["x"] == ("FP32", [4])
    answer = named.ask({"x": NUMBERS[:1], "scale": SCALES[:1]}, "OUTPUT__0")
    np.testing.assert_allclose(answer["OUTPUT__0"], EXPECTED[0][:1], rtol=1e-5)


def test_an_exported_program_for_any_number_of_rows(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows")
    path = export(tmp_path, dynamic_shapes={"x": {0: rows}, "scale": {0: rows}})
    served = Served("pytorch", path, trusted=True)
    assert served.config["max_batch_size"] == 64
    answer = served.ask({"INPUT__0": NUMBERS, "INPUT__1": SCALES})
    np.testing.assert_allclose(answer["OUTPUT__0"], EXPECTED[0], rtol=1e-5)


def test_an_exported_program_with_arguments_by_name(tmp_path: Path) -> None:
    program = torch.export.export(MODEL, TENSORS[:1], {"scale": TENSORS[1]})
    torch.export.save(program, tmp_path / "model.pt2")
    inputs = [{"name": "scale"}, {"name": "x"}]
    served = Served("pytorch", tmp_path / "model.pt2", {"input": inputs}, trusted=True)
    assert served.signature()["scale"] == ("FP32", [6, 1])
    answer = served.ask({"x": NUMBERS, "scale": SCALES})
    np.testing.assert_allclose(answer["OUTPUT__0"], EXPECTED[0], rtol=1e-5)


def test_an_exported_program_for_fixed_shapes(tmp_path: Path) -> None:
    path = export(tmp_path)
    served = Served("pytorch", path, trusted=True)
    assert not served.config.get("max_batch_size")
    assert served.signature() == {
        "INPUT__0": ("FP32", [6, 4]), "INPUT__1": ("FP32", [6, 1]), "OUTPUT__0": ("FP32", [6, 3]),
        "OUTPUT__1": ("INT64", [6]),
    }  # fmt: skip
    answer = served.ask({"INPUT__0": NUMBERS, "INPUT__1": SCALES})
    assert answer["OUTPUT__1"].tolist() == EXPECTED[1].tolist()
    with pytest.raises(ValueError, match="first dimension of the program's tensors does not vary"):
        Served("pytorch", path, {"max_batch_size": 8}, trusted=True)


@pytest.mark.parametrize("name", ["model.pt", "model.pt2"])
def test_a_program_is_not_loaded_without_trust(tmp_path: Path, name: str) -> None:
    with pytest.raises(PermissionError, match="not trusted"):
        Served("pytorch", tmp_path / name)
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=f"^{name} cannot be loaded as a PyTorch program: "):
        Served("pytorch", tmp_path / name, trusted=True)


# --- on a GPU


def one_of(folder: Path, name: str) -> Path:
    """A program in one of the two forms. A traced one would name the device of its own tensor."""
    if name == "model.pt":
        return script(folder, InPlace(), torch.zeros(2, 4))
    torch.export.save(torch.export.export(Ranged(), (torch.zeros(6, 4),)), folder / name)
    return folder / name


def on_gpu(path: Path, gpu: int) -> Served:
    tensors = [{"name": "x", "data_type": "TYPE_FP32", "dims": [6, 4]}]
    config = {"input": tensors, "output": [{**tensors[0], "name": "y"}]}
    return Served("pytorch", path, config, trusted=True, default_rows=0, gpu=gpu)


FORMS = pytest.mark.parametrize("name", ["model.pt", "model.pt2"])


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
@FORMS
def test_a_pytorch_without_cuda_says_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"asks for GPU 3, but PyTorch .* is built without CUDA"):
        on_gpu(one_of(tmp_path, name), 3)


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch has no CUDA")
@FORMS
def test_a_gpu_that_pytorch_does_not_see(tmp_path: Path, name: str) -> None:
    there = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"asks for GPU {there}, .* can use {there} GPUs"):
        on_gpu(one_of(tmp_path, name), there)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch has no GPU here")
@FORMS
def test_a_program_on_a_gpu(tmp_path: Path, name: str) -> None:
    before = torch.cuda.memory_allocated(0)
    served = on_gpu(one_of(tmp_path, name), 0)
    added = 1 if name == "model.pt" else np.arange(4)
    np.testing.assert_allclose(served.ask({"x": NUMBERS})["y"], NUMBERS + added, rtol=1e-5)
    assert torch.cuda.max_memory_allocated(0) > before


def test_an_exported_program_names_its_device_nowhere_else(tmp_path: Path) -> None:
    """With a device that computes nothing, which exists without a GPU."""
    program = torch.export.load(one_of(tmp_path, "model.pt2"))
    moved = moved_program(program, "meta")
    devices = {
        str(node.kwargs["device"]) for node in moved.graph.nodes if node.kwargs.get("device")
    }
    assert devices == {"meta"}
