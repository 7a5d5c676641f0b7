"""A repository of the models that runners are tested with."""

from pathlib import Path

import pytest

from headrace.core.datatypes import Datatype
from tests.models.onnx_graphs import add_sub, identity, write_model

PEOPLE = """
from typing import TypedDict
from headrace import Frame, model

class Person(TypedDict):
    name: str
    age: int | None

class Judged(TypedDict):
    name: str
    adult: bool | None

@model(max_batch_size=4)
def people(frame: Frame[Person]) -> Frame[Judged]:
    frame["adult"] = frame["age"] >= 18
    return frame
"""
TRAINED = (
    'parameters { key: "columns" value { string_value: "{\\"INPUT0\\": [\\"a\\", \\"b\\"]}" } }'
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Identities of each datatype, of a matrix and of lists, two inputs, and a frame's function."""
    root = tmp_path_factory.mktemp("runner")
    for datatype in Datatype:
        write_model(root, f"one_{datatype}", identity(datatype, ["rows", 1]), "max_batch_size: 8")
    write_model(root, "matrix", identity(dims=["rows", 2]), "max_batch_size: 8")
    write_model(root, "trained", identity(dims=["rows", 2]), f"max_batch_size: 8 {TRAINED}")
    write_model(root, "any_length", identity(dims=["rows", "n"]), "max_batch_size: 8")
    write_model(root, "images", identity(dims=["rows", 2, 2]), "max_batch_size: 8")
    write_model(root, "add_sub", add_sub(Datatype.INT32, 1), "max_batch_size: 8")
    write_model(root, "unbatched", identity(dims=["rows", 2]))
    (root / "people" / "1").mkdir(parents=True)
    (root / "people" / "1" / "model.py").write_text(PEOPLE)
    return root
