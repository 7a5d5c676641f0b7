"""`headrace infer`: arguments, requests and output."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Headrace

Write = Callable[[str, bytes | str], Path]

# A handwritten 3; 0 is paper, 16 is ink.
THREE = np.array([
    [0, 0, 9, 16, 10, 1, 0, 0], [0, 0, 8, 3, 16, 4, 0, 0],
    [0, 0, 0, 5, 14, 2, 0, 0], [0, 0, 2, 16, 15, 7, 0, 0],
    [0, 0, 0, 0, 3, 15, 2, 0], [0, 4, 6, 0, 0, 13, 7, 0],
    [0, 6, 13, 1, 5, 16, 3, 0], [0, 0, 10, 16, 15, 5, 0, 0],
])  # fmt: skip
FLAT = json.dumps(THREE.ravel().tolist())
ONES = json.dumps([1] * 16)


def npy(array: object) -> bytes:
    """Content of an .npy file with an array."""
    file = io.BytesIO()
    np.save(file, np.asarray(array))
    return file.getvalue()


def standard_input(content: bytes | str) -> io.TextIOWrapper:
    """Standard input with this content."""
    return io.TextIOWrapper(io.BytesIO(content if isinstance(content, bytes) else content.encode()))


def outputs(headrace: Headrace, *words: str) -> dict[str, object]:
    """Data of each output of a request."""
    ended = headrace("infer", *words, "--json")
    assert (ended.status, ended.err) == (0, "")
    return {output["name"]: output["data"] for output in ended.document["outputs"]}


def test_human_readable_output(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = headrace("infer", "digits", FLAT, "--classes=2")
    assert (ended.status, ended.err) == (0, "")
    head, *lines = ended.out.splitlines()
    assert head.startswith("digits version 2, ")
    assert [line.split() for line in lines] == [
        ["probabilities", "BYTES", "[1,2]"], ["SCORE", "CLASS", "LABEL"],
        ["0.999753", "3", "three"], ["0.000067", "9", "nine"], ["label", "INT64", "[1,1]", "3"],
    ]  # fmt: skip
    ended = headrace("infer", "simple", "--random", "--seed=1", "--rows=2")
    assert max(map(len, ended.out.splitlines())) <= 80
    assert ended.out.count("[[") == 2


def test_json_output(headrace: Headrace) -> None:
    ended = headrace("infer", "text_language", "Wann fährt der Zug?", "--id=é", "--json")
    document = ended.document
    timing = document.pop("timing")
    assert list(timing) == [
        "requests", "mean_seconds", "p50_seconds", "p90_seconds", "p99_seconds", "max_seconds",
    ]  # fmt: skip
    [language, confidence] = document.pop("outputs")
    assert document == {
        "model_name": "text_language", "model_version": "1", "id": "é", "parameters": {},
    }  # fmt: skip
    assert language == {"name": "language", "datatype": "BYTES", "shape": [1, 1], "data": ["de"]}
    assert (confidence["datatype"], confidence["shape"]) == ("FP32", [1, 1])


@pytest.mark.parametrize(("name", "content"), [
    ("x.json", FLAT), ("x.json", json.dumps({"image": THREE.tolist()})),
    ("x.npy", npy(THREE[np.newaxis])), ("x.npy", npy(THREE.astype(np.float64))),
    ("x.npy", npy(np.asfortranarray(THREE))), ("x.csv", ",".join(map(str, THREE.ravel()))),
    ("x.csv", ",".join("abcdefgh" * 8) + "\n" + ",".join(map(str, THREE.ravel())) + "\n"),
])  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "--input=image={}", "--input=image=@{}"])
def test_files(headrace: Headrace, lone_file: Write, name: str, content: str, form: str) -> None:
    word = form.format(lone_file(name, content))
    if form != "{}" and '"image"' in str(content):
        assert "expected numbers" in headrace("infer", "digits", word).err
    else:
        assert outputs(headrace, "digits", "--output=label", word) == {"label": [3]}


def test_an_image(headrace: Headrace, tmp_path: Path) -> None:
    pixels = np.repeat(np.repeat(255 - THREE * 255 // 16, 8, 0), 8, 1).astype(np.uint8)
    for name in ("x.png", "x.jpg"):
        Image.fromarray(pixels).convert("RGB").save(tmp_path / name)
        words = ("digits", str(tmp_path / name), "--scale=-16/255", "--mean=-16", "--output=label")
        assert outputs(headrace, *words) == {"label": [3]}


def test_several_inputs(headrace: Headrace, lone_file: Write) -> None:
    archive = io.BytesIO()
    np.savez(archive, INPUT0=np.arange(32).reshape(2, 16), INPUT1=np.ones((2, 16)))
    expected = {
        "OUTPUT0": [value + 1 for value in range(32)],
        "OUTPUT1": [value - 1 for value in range(32)],
    }
    assert outputs(headrace, "simple", str(lone_file("x.npz", archive.getvalue()))) == expected
    table = [",".join(["INPUT0"] * 16 + ["INPUT1"] * 16)]
    table += [",".join(map(str, [*range(row, row + 16), *[1] * 16])) for row in (0, 16)]
    assert outputs(headrace, "simple", str(lone_file("x.csv", "\n".join(table)))) == expected
    document = {"INPUT0": list(range(32)), "INPUT1": [1] * 32}
    assert outputs(headrace, "simple", json.dumps(document)) == expected
    words = [f"--input=INPUT0={list(range(32))}", f"--input=INPUT1={[1] * 32}"]
    assert outputs(headrace, "simple", *words) == expected
    assert outputs(headrace, "simple", f"{list(range(32))}", words[1]) == expected


def test_a_request_in_the_protocols_json(
    headrace: Headrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {
        "id": "7",
        "inputs": [
            {"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": THREE.tolist()}
        ],
        "outputs": [{"name": "label"}, {"name": "probabilities", "parameters": {
            "classification": 1
        }}],
        "parameters": {"headrace_timing": True, "binary_data_output": False},
    }  # fmt: skip
    monkeypatch.setattr(sys, "stdin", standard_input(json.dumps(request)))
    document = headrace("infer", "digits", "-", "--json").document
    assert (document["id"], document["parameters"]["batch_rows"]) == ("7", 1)
    assert {item["name"]: item["data"] for item in document["outputs"]} == {
        "label": [3], "probabilities": ["0.999753:3:three"],
    }  # fmt: skip


def test_texts(headrace: Headrace, lone_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def languages(*words: str) -> object:
        return outputs(headrace, "text_language", "--output=language", *words)["language"]

    german, english = "Wann fährt der nächste Zug?", "When does the next train leave?"
    assert languages(german) == ["de"]
    assert languages(json.dumps([german, english])) == ["de", "en"]
    assert languages("--input", f"text={english}") == ["en"]
    assert languages(f"@{lone_file('x.txt', german)}") == ["de"]
    assert languages(str(lone_file("x.csv", f"{german}\n{english}\n"))) == ["de", "en"]
    assert languages(str(lone_file("x.npy", npy([german, english])))) == ["de", "en"]
    assert languages(str(lone_file("x.csv", f"text\n{german}\n"))) == ["de"]
    for words in ("--input=text=-", "-"):
        monkeypatch.setattr(sys, "stdin", standard_input(f"{english}\n"))
        assert languages(words) == ["en"]


def test_made_up_inputs(headrace: Headrace) -> None:
    first, second = (outputs(headrace, "simple", "--random", "--seed=3") for _ in range(2))
    assert first == second
    given = outputs(headrace, "simple", "--random", "--seed=3", f"--input=INPUT0={ONES}")
    assert given != first
    shaped = headrace(
        "infer", "simple_identity", "--random", "--shape=INPUT0=2,16", "--json"
    ).document
    assert shaped["outputs"][0]["shape"] == [2, 16]


def test_many_requests(headrace: Headrace) -> None:
    ended = headrace("infer", "simple", "--random", "--repeat=5")
    assert ended.out.startswith("simple version 1, 5 requests: mean ")
    document = headrace("infer", "simple", "--random", "--repeat=3", "--json").document
    assert document["timing"]["requests"] == 3
    document = headrace("infer", "digits", FLAT, "--version=1", "--json").document
    assert document["model_version"] == "1"


def test_more_rows_than_a_batch(headrace: Headrace, lone_file: Write) -> None:
    """Sent in parts, of which the last is not full."""
    rows = np.arange(19 * 16, dtype=np.int32).reshape(19, 16)
    path = lone_file("left.npy", npy(rows))
    words = ("infer", "simple", f"--input=INPUT0={path}", f"--input=INPUT1={path}", "--json")
    ended = headrace(*words)
    assert (ended.status, ended.err) == (0, "asked in 3 requests: simple takes 8 rows at a time\n")
    [total, difference] = ended.document["outputs"]
    assert total["shape"] == difference["shape"] == [19, 16]
    assert total["data"] == (2 * rows).ravel().tolist()
    ended = headrace("infer", "digits", "--random", "--rows=70", "--classes=1", "--json")
    assert [output["shape"] for output in ended.document["outputs"]] == [[70, 1], [70, 1]]


def test_saving(headrace: Headrace, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    ended = headrace("infer", "digits", FLAT, f"--save={folder}")
    assert ended.err == f"wrote {folder}/probabilities.npy\nwrote {folder}/label.npy\n"
    assert np.load(folder / "label.npy").tolist() == [[3]]
    assert np.load(folder / "probabilities.npy").dtype == np.float32
    headrace("infer", "text_language", "Hallo Welt, wie geht es?", f"--save={folder}")
    assert np.load(folder / "language.npy").tolist() == [[b"de"]]


def test_a_stream(headrace: Headrace) -> None:
    words = ("infer", "storyteller", "--input=text_input=The miller", "--input=max_tokens=3")
    ended = headrace(*words)
    assert (ended.status, ended.out) == (0, " never ground two\n")
    assert ended.err.startswith("3 responses, ")
    ended = headrace(*words, "--json")
    assert [json.loads(line)["text_output"] for line in ended.out.splitlines()] == [
        " never", " ground", " two"
    ]  # fmt: skip
    assert ended.err == ""
    given = [f"--input=INPUT{number}={ONES}" for number in range(2)]
    ended = headrace("infer", "simple", *given, "--stream", "--output=OUTPUT0")
    assert json.loads(ended.out) == {"OUTPUT0": [2] * 16}  # of a model that answers once


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["digts"], "unknown model: 'digts' is not found; did you mean 'digits'?\n"),
        (["digits", "--version=9", "1"], "version 9 is not found\n"),
        (["digits"], "nothing is given for image FP32 [-1,8,8]; --input image=VALUE gives it,"),
        (["digits", "--input=imag=1"], "digits has no input 'imag'; did you mean 'image'?\n"),
        (["digits", '{"zzz": 1}'], "digits has no input 'zzz'; it has image\n"),
        (["digits", "--random", "--shape=zzz=1"], "digits has no input 'zzz'"),
        (["digits", "[1, 2]"], "'image': expected shape [-1,8,8] (-1 is any number), got [2]"),
        (["digits", "[[1], 2]"], "input 'image': the arrays in it differ in length"),
        (["digits", "three"], "'three' is neither a file nor a number or array in JSON; expected"),
        (["digits", '["a"]'], "input 'image': expected numbers for FP32"),
        (["digits", "{"], "the JSON on the command line: not JSON: "),
        (["digits", "no.npy"], "no.npy: No such file or directory\n"),
        (["digits", "no.png"], "no.png: No such file or directory\n"),
        (["digits", "@no.dat"], "no.dat: what it holds is told by its suffix; known are .json "),
        (["digits", "1", f"--input=image={FLAT}"], "every input is given by --input: there is"),
        (["simple", "1"], "simple has 2 inputs to be given (INPUT0, INPUT1): --input NAME=VALUE"),
        (["simple", "--random", "--input=INPUT0=1.5"], "expected whole numbers for INT32"),
        (["simple", "--random", "--output=zzz"], "unexpected inference output 'zzz'"),
        (["simple", "--random", "--classes=2"], "simple has no outputs of floats"),
        (["simple", '{"inputs": [{"name": "INPUT0"}]}'], "not an inference request: no 'data'"),
        (
            ["simple", '{"inputs": [{"name": "a", "datatype": "X", "shape": [1], "data": [1]}]}'],
            "input 'a': there is no datatype 'X'",
        ),
        (
            ["simple", '{"inputs": [{"name": "a", "datatype": "INT8", "shape": [2], "data": [1]}]}',
             "--random"],
            "input 'a': shape [2] has 2 elements, there are 1",
        ),
        (["simple", "--random",
      '{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}'],
     "data-type is 'FP32', but model 'simple' expects 'INT32'"),
    (["storyteller", "--random", "--save=x"], "--save is not for streams, and storyteller ans"),
        (["simple", "--random", "--stream", "--classes=1"], "--classes is not for streams\n"),
    ],
)  # fmt: skip
def test_failures(headrace: Headrace, words: list[str], text: str) -> None:
    ended = headrace("infer", *words)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("headrace infer: ")
    assert text in ended.err


@pytest.mark.parametrize(("name", "content", "text"), [
    ("x.npy", b"no", "not an array that can be read"),
    ("x.npz", b"no", "not an archive that can be read"), ("x.json", b"{", "not JSON"),
    ("x.csv", "", "it is empty"), ("x.csv", "1,2\n3\n", "Expected 2 columns, got 1: 3"),
    ("x.csv", "1,2\n3,a\n", "column '1': expected numbers for FP32"),
    ("x.png", b"no", "not an image that Pillow can read"),
])  # fmt: skip
def test_unreadable_files(
    headrace: Headrace, lone_file: Write, name: str, content: bytes | str, text: str
) -> None:
    file = lone_file(name, content)
    ended = headrace("infer", "digits", str(file))
    assert (ended.status, ended.out) == (1, "")
    assert f"{file}: " in ended.err
    assert text in ended.err


@pytest.mark.parametrize(("words", "text"), [
    (["m", "--input=x"], "--input: expected NAME=VALUE, got 'x'"),
    (["m", "--parameter=x"], "--parameter: expected NAME=VALUE, got 'x'"),
    (["m", "--shape=x=a"], "--shape: expected NAME=N,N,..., got 'x=a'"),
    (["m", "--classes=0"], "--classes: expected a whole number above 0, got '0'"),
    (["m", "--scale=1/0"], "--scale: expected a number, got '1/0'"),
    (["m", "--std=1,0"], "--std: expected numbers other than 0, got '1,0'"),
    (["m", "--layout=CWH"], "--layout: invalid choice: 'CWH'"),
    (["m", "--randm"], "unknown option '--randm'; did you mean '--random'?"),
    ([], "the following arguments are required: MODEL"),
])  # fmt: skip
def test_wrong_usage(command: Headrace, words: list[str], text: str) -> None:
    ended = command("infer", *words)
    assert (ended.status, ended.out) == (2, "")
    assert text in ended.err
