"""Inputs of `headrace infer`: texts, JSON, arrays, tables, images and random values."""

import io
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace.cli.command import CommandParser
from headrace.cli.commands.infer import FORMATS, INFER
from headrace.cli.commands.infer_inputs import TABLES, read_inputs
from headrace.cli.remote import CommandFailed
from headrace.client import InputError
from headrace.client.values import Declared, ModelSignature
from headrace.core.datatypes import NUMPY, Datatype
from headrace.core.tensors import Array
from tests.protocol.strategies import PROPERTY

Write = Callable[[str, bytes | str], Path]

INPUTS = (
    Declared("number", Datatype.INT8, (-1, 2), True),
    Declared("text", Datatype.BYTES, (-1, 1), True),
    Declared("also", Datatype.FP16, (-1, -1), True, optional=True),
)
DATATYPES = {one.name: one.datatype for one in INPUTS}
MATRIX = Declared("x", Datatype.FP32, (-1, 3), True, False, ("a b", "b", "c"))
PICTURE = Declared("x", Datatype.FP32, (-1, 3, 2, 4), True)
PEOPLE = (
    Declared("name", Datatype.BYTES, (-1, 1), True),
    Declared("age", Datatype.INT64, (-1, 1), True),
    Declared("age.null", Datatype.BOOL, (-1, 1), True, True),
    Declared("size", Datatype.FP64, (-1, 1), True),
)
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_NAMES = st.sampled_from([*DATATYPES, "zzz"])
_DOCUMENTS = st.recursive(
    _LEAVES | st.sampled_from(["INT8", "text", [1, 2]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
)
_WORDS = st.text().filter(lambda text: text[:1] not in ("-", "@"))


def parsed(*words: str) -> Namespace:
    """The options of a command line for the model m."""
    parser = CommandParser("headrace")
    INFER(parser.add_subparsers())
    return parser.parse_args(["infer", "m", *words])


def sent(inputs: tuple[Declared, ...], *words: str) -> dict[str, Array]:
    """The tensors that are sent to a model with these inputs."""
    known = ModelSignature({one.name: one for one in inputs}, {})
    tensors = known.tensors("m", read_inputs(parsed(*words), known))
    return {name: np.asarray(array) for name, _, array in tensors}


@PROPERTY
@given(st.sampled_from(INPUTS), _WORDS | _DOCUMENTS.map(json.dumps))
def test_one_input(declared: Declared, text: str) -> None:
    with suppress(CommandFailed, InputError):
        for name, array in sent(INPUTS, "--random", f"--input={declared.name}={text}").items():
            assert array.dtype == NUMPY[DATATYPES[name]]
            assert array.ndim == 2


@PROPERTY
@given(_DOCUMENTS.map(json.dumps).filter(lambda text: not text.startswith("-")))
def test_all_inputs(text: str) -> None:
    with suppress(CommandFailed, InputError):
        assert all(
            isinstance(array, np.ndarray) for array in sent(INPUTS, "--random", text).values()
        )


def test_texts_are_sent_unchanged() -> None:
    for text in ("42", "a=b", "null", "true", " a ", "1,2", "{no json", '{"a": 1}', "[INST] a\n"):
        assert sent((INPUTS[1],), f"--input=text={text}")["text"].tolist() == [[text.encode()]]


def test_random_values() -> None:
    inputs = tuple(Declared(datatype, datatype, (-1, 3, -1), True) for datatype in Datatype)
    found = sent(inputs, "--random", "--rows=2")
    assert {name: array.shape for name, array in found.items()} == dict.fromkeys(
        Datatype, (2, 3, 1)
    )
    again, others = sent(inputs, "--random", "--rows=2"), sent(inputs, "--random", "--seed=1")
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in again.items()
    }
    assert found["INT8"][:1].tolist() != others["INT8"].tolist()
    alone = Declared("x", Datatype.FP32, (-1, 3))
    assert sent((alone,), "--random", "--rows=2")["x"].shape == (1, 3)


# --- tables


def test_a_matrix_in_the_order_of_the_training(lone_file: Write) -> None:
    for form in ("{}", "--input=x={}", "--input=x=@{}"):
        for text in ("c,a_b,b\n3,1,2\n6,4,5\n", "b, c ,a b\n2,3,1\n5,6,4\n", "1,2,3\n4,5,6"):
            word = form.format(lone_file("x.csv", text))
            assert sent((MATRIX,), word)["x"].tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(InputError, match="lacks column 'a b' and has the further column 'd'"):
        sent((MATRIX,), str(lone_file("x.csv", "b,c,d\n1,2,3\n")))


def test_a_first_row_with_values_that_are_names_too(lone_file: Write) -> None:
    model = Declared("x", Datatype.FP32, (-1, 3), True, False, ("0", "1", "2"))
    for text, rows in (
        ("1,5,0\n3,4,5\n", [[1, 5, 0], [3, 4, 5]]), ("2,1,0\n3,4,5\n", [[5, 4, 3]]),
        ("1,,0\nNaN,4,5\n", [[1, np.nan, 0], [np.nan, 4, 5]]),
        ("NaN,NaN,NaN\n3,4,5\n", [[np.nan] * 3, [3, 4, 5]]),
    ):  # fmt: skip
        np.testing.assert_array_equal(sent((model,), str(lone_file("x.csv", text)))["x"], rows)


def test_integers_keep_their_digits(lone_file: Write) -> None:
    path = str(lone_file("x.csv", "18446744073709551615\n9223372036854775809\n"))
    most = Declared("x", Datatype.UINT64, (-1, 1), True)
    assert sent((most,), path)["x"].tolist() == [[2**64 - 1], [2**63 + 1]]
    with pytest.raises(InputError, match=r"expected numbers from .* for INT64"):
        sent((Declared("x", Datatype.INT64, (-1, 1), True),), path)


def test_columns_as_inputs(lone_file: Write) -> None:
    rows = 'size,name,age\n1.5,007,36\n,"a,\nb",\n2,é,9007199254740993\n'
    found = sent(PEOPLE, str(lone_file("x.csv", rows)))
    assert found["name"].tolist() == [[b"007"], [b"a,\nb"], ["é".encode()]]
    assert np.isnan(found["size"][1])
    assert found["age"][::2].tolist() == [[36], [9007199254740993]]
    assert found["age.null"].tolist() == [[False], [True], [False]]
    with pytest.raises(InputError, match="'m' has no input 'years'"):
        sent(PEOPLE, str(lone_file("x.csv", "size,name,years\n1,a,2\n")))


def written(kind: str) -> bytes:
    """A table of three columns in a file of this kind."""
    arrow = import_module("pyarrow")
    table = arrow.table({"c": [3.0, 6.0], "a b": [1.0, 4.0], "b": [2, 5]})
    if kind == "jsonl":
        return b'{"c": 3, "a b": 1, "b": 2}\n{"c": 6, "a b": 4, "b": 5}\n'
    file = io.BytesIO()
    if kind in ("csv", "tsv"):
        option = import_module("pyarrow.csv").WriteOptions(delimiter="\t" if kind == "tsv" else ",")
        import_module("pyarrow.csv").write_csv(table, file, option)
    elif kind == "parquet":
        import_module("pyarrow.parquet").write_table(table, file)
    elif kind == "orc":
        import_module("pyarrow.orc").write_table(table, file)
    else:
        import_module("pyarrow.feather").write_feather(table, file)
    return file.getvalue()


def test_the_option_has_all_kinds_of_tables() -> None:
    assert FORMATS == TABLES


@pytest.mark.parametrize("kind", TABLES)
def test_kinds_of_tables(kind: str, lone_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(kind)
    path, plain = lone_file(f"table.{kind}", content), lone_file("table", content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    for words in ([str(path)], [f"@{plain}", f"--format={kind}"], ["-", f"--format={kind}"]):
        assert sent((MATRIX,), *words)["x"].tolist() == [[1, 2, 3], [4, 5, 6]]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CommandFailed, match=rf"{path}: .*pip install 'headrace\[tables\]'"):
        sent((MATRIX,), str(path))


# --- images


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """4 wide, 2 high; red on the left, blue on the right."""
    pixels = np.zeros((2, 4, 3), np.uint8)
    pixels[:, :2, 0] = pixels[:, 2:, 2] = 255
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(("declared", "rows", "layout", "expected"), [
    ((-1, 3, 2, 4), True, "", (1, 3, 2, 4)), ((-1, 2, 4, 3), True, "", (1, 2, 4, 3)),
    ((-1, 3, -1, -1), True, "", (1, 3, 2, 4)), ((-1, 3, 10, 20), True, "", (1, 3, 10, 20)),
    ((-1, -1, -1, -1), True, "", (1, 3, 2, 4)), ((-1, -1, -1, -1), True, "HWC", (1, 2, 4, 3)),
    ((3, 5, 3), False, "HWC", (3, 5, 3)),
    ((-1, 3, 8, 8), False, "", (1, 3, 8, 8)),  # rows that are not declared as such
    ((1, 2, 4), False, "", (1, 2, 4)), ((2, 4, 1), False, "", (2, 4, 1)),
    ((2, 4, 4), False, "", (2, 4, 4)), ((4, 2, 8), False, "", (4, 2, 8)),
    ((-1, 2, 4), True, "", (1, 2, 4)),
])  # fmt: skip
def test_shapes_of_images(
    picture: Path, declared: tuple[int, ...], rows: bool, layout: str, expected: tuple[int, ...]
) -> None:
    words = [f"--layout={layout}"] if layout else []
    array = sent((Declared("x", Datatype.FP32, declared, rows),), str(picture), *words)["x"]
    assert array.shape == expected
    assert 0 < array.max() <= 1


def test_values_of_images(picture: Path) -> None:
    array = sent((PICTURE,), str(picture))["x"]
    assert array[0, 0].tolist() == array[0, 2, :, ::-1].tolist() == [[1, 1, 0, 0]] * 2
    words = ("--scale=1", "--mean=255,0,55", "--std=1,1,100")
    array = sent((PICTURE,), str(picture), *words)["x"]
    assert array[0, :, 0, 0].tolist() == [0, 0, pytest.approx(-0.55)]
    array = sent((Declared("x", Datatype.UINT8, (2, 4, 3)),), str(picture))["x"]
    assert array[0, 0].tolist() == [255, 0, 0]
    array = sent((Declared("x", Datatype.UINT8, (2, 4)),), str(picture), "--scale=1/3")["x"]
    assert array[0].tolist() == [25, 25, 10, 10]  # grey, rounded


def test_a_rotated_picture(picture: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture.with_suffix(".jpg")
    Image.open(picture).save(turned, exif=exif)
    declared = Declared("x", Datatype.UINT8, (-1, -1, 3))
    assert sent((declared,), str(turned))["x"].shape == (4, 2, 3)


def test_an_image_for_a_model_of_bytes(picture: Path) -> None:
    assert sent((INPUTS[1],), str(picture))["text"].tolist() == [[picture.read_bytes()]]


@pytest.mark.parametrize(("declared", "words", "text"), [
    ((-1, 10), (), r"\[-1,10\] is not plainly an image; --layout names its axes"),
    ((-1, 7, 8, 8), (), "is not plainly an image"),
    ((-1, 3, 8, 8), ("--layout=HW",), "is not plainly an image"),
    ((-1, 3, 8, 8), ("--mean=1,2",), "could not be broadcast"),
    ((-1, 8, 8), ("--mean=1,2,3",), "cannot be read"),
])  # fmt: skip
def test_files_that_are_not_images(
    picture: Path, declared: tuple[int, ...], words: tuple[str, ...], text: str
) -> None:
    with pytest.raises(CommandFailed, match=text):
        sent((Declared("x", Datatype.FP32, declared, True),), str(picture), *words)


def test_without_pillow(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(CommandFailed, match=r"needs Pillow: pip install 'headrace\[cli\]'"):
        sent((PICTURE,), str(picture))
