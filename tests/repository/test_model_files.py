"""Which files a single file is made of."""

from pathlib import Path

import pytest

from headrace.repository.model_files import parts
from tests.models import onnx_graphs


def project(root: Path, **files: str) -> Path:
    """Files by their paths with __ for a slash, all Python; `model.py` among them."""
    for name, text in files.items():
        path = root / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "model.py"


def found(file: Path) -> list[str]:
    """What belongs to a file."""
    return sorted(str(path.relative_to(file.parent)) for path in parts(file))


def test_requirements_are_not_read_for_a_file_by_itself(tmp_path: Path) -> None:
    assert tmp_path / "requirements.txt" not in parts(tmp_path / "model.py")


@pytest.mark.parametrize(("text", "others"), [
    ("", []), ("import one", ["one.py"]), ("import one as uno, os, numpy", ["numpy.py", "one.py"]),
    ("from one import thing", ["one.py"]), ("def f():\n    import one", ["one.py"]),
    ("import two", ["one.py", "two.py"]), ("import nowhere", ["nowhere.py"]),  # it may still come
    ("import nowhere.more, os.path", ["nowhere.py"]), ("from . import one", ["one.py"]),
    ("import model", []),
    ("import package.inner", ["package/init.py", "package/inner.py", "package/side.py"]),
    ("from package import inner", ["package/init.py", "package/inner.py", "package/side.py"]),
    ("from plain import far", ["plain/far.py"]), ("from .. import one", []),
    ("import one.more", ["one.py"]),
])  # fmt: skip
def test_what_a_python_file_imports_from_its_directory(
    tmp_path: Path, text: str, others: list[str]
) -> None:
    file = project(
        tmp_path, model=text, one="", two="import one\nimport two", plain__far="", unused="",
        package__inner="from . import side", package__side="", package__unused="",
    )  # fmt: skip
    (tmp_path / "package" / "__init__.py").write_text("")
    assert [name.replace("__init__", "init") for name in found(file)] == sorted(
        ["model.py", *others]
    )


@pytest.mark.parametrize("text", ["def f(:", "\0", "(" * 10_000, "x = 1 +"])
def test_a_file_that_cannot_be_parsed_is_itself(tmp_path: Path, text: str) -> None:
    assert found(project(tmp_path, model=text)) == ["model.py"]


def test_a_file_that_is_not_there_is_itself(tmp_path: Path) -> None:
    assert found(tmp_path / "model.py") == ["model.py"]
    assert found(tmp_path / "model.onnx") == ["model.onnx"]
    assert found(tmp_path / "model.other") == ["model.other"]


def test_the_weights_of_an_onnx_model(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(onnx_graphs.external_weight("weights.bin"))
    assert found(file) == ["model.onnx", "weights.bin"]
    for elsewhere in ("/etc/passwd", "../weights.bin"):
        file.write_bytes(onnx_graphs.external_weight(elsewhere))
        assert found(file) == ["model.onnx"]
    file.write_bytes(b"nothing")
    assert found(file) == ["model.onnx"]
