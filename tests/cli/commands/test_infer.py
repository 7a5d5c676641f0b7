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
from tests.models.python_models import tensors, write_python_model
from tests.support.server_process import clean_server

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
SIMILAR = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor(name, np.array([number])) for number, name in enumerate(NAMES)
                ])
                for _ in requests
            ]
"""


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
        ["probabilities", "BYTES", "[1,2]", "[['0.999753:3:three'", "'0.000067:9:nine']]"],
        ["label", "INT64", "[1,1]", "3"],
    ]  # fmt: skip
    ended = headrace("infer", "simple", "--random", "--seed=1", "--rows=2")
    assert ended.out.count("[[") == 2
    assert "\n   [" in ended.out  # the second row below the first


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
    ("x.npy", npy(THREE[np.newaxis])), ("x.csv", ",".join(map(str, THREE.ravel()))),
])  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "--input=image={}", "--input=image=@{}"])
def test_files(headrace: Headrace, lone_file: Write, name: str, content: str, form: str) -> None:
    word = form.format(lone_file(name, content))
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
    path = lone_file("x.npz", archive.getvalue())
    assert outputs(headrace, "simple", str(path)) == expected
    words = [f"--input=INPUT{number}={path}" for number in range(2)]
    assert outputs(headrace, "simple", *words) == expected
    document = {"INPUT0": list(range(32)), "INPUT1": [1] * 32}
    assert outputs(headrace, "simple", json.dumps(document)) == expected
    words = [f"--input=INPUT0={list(range(32))}", f"--input=INPUT1={[1] * 32}"]
    assert outputs(headrace, "simple", *words) == expected
    assert outputs(headrace, "simple", f"{list(range(32))}", words[1]) == expected


def test_standard_input(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (json.dumps({"image": THREE.tolist()}), FLAT, FLAT.strip("[]")):
        monkeypatch.setattr(sys, "stdin", standard_input(content))
        assert outputs(headrace, "digits", "-", "--output=label") == {"label": [3]}


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
    monkeypatch.setattr(sys, "stdin", standard_input(json.dumps([german, english])))
    assert languages("-") == ["de", "en"]
    for words in ("--input=text=-", "-"):
        monkeypatch.setattr(sys, "stdin", standard_input(f"{english}\n"))
        assert languages(words) == ["en"]


def test_random_inputs_beside_given_ones(headrace: Headrace) -> None:
    first = outputs(headrace, "simple", "--random", "--seed=3")
    given = outputs(headrace, "simple", "--random", "--seed=3", f"--input=INPUT0={ONES}")
    assert given != first


def test_many_requests(headrace: Headrace) -> None:
    ended = headrace("infer", "simple", "--random", "--repeat=5")
    assert ended.out.startswith("simple version 1, 5 requests: mean ")
    assert ", p99 " in ended.out
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
    assert (ended.status, ended.err) == (0, "")
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
    ended = headrace("infer", "simple_identity", '["a", "b\\u0000"]', f"--save={folder}")
    assert ended.err.endswith("output 'OUTPUT0' has texts that end with zero bytes\n")


def test_outputs_with_similar_names_have_files_of_their_own(
    command: Headrace, tmp_path: Path
) -> None:
    names = ["a/b", "a:b", "a_b", "a_b-2", ".a_b", "ü"]
    source = SIMILAR.replace("NAMES", repr(names))
    config = tensors("input", ("X", "INT64", "1"))
    config += "".join(tensors("output", (name, "INT64", "1")) for name in names)
    write_python_model(tmp_path / "models", "similar", source, config)
    with clean_server(tmp_path / "models") as server:
        ended = command("infer", "similar", "1", f"--save={tmp_path}/to", f"--url={server.url}")
    assert ended.status == 0, ended.err
    stems = ["a_b-3", "a_b-4", "a_b", "a_b-2", "a_b-5", "ü"]
    assert [np.load(tmp_path / "to" / f"{stem}.npy").tolist() for stem in stems] == [
        [number] for number in range(len(names))
    ]


def test_a_stream(headrace: Headrace) -> None:
    words = ("infer", "storyteller", "--input=text_input=The miller", "--input=max_tokens=3")
    ended = headrace(*words)
    assert (ended.status, ended.out, ended.err) == (0, " never ground two\n", "")
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
        (["digits"], "model 'digits' needs the input image FP32 [-1,8,8]\n"),
        (["digits", "--input=imag=@no.png"], "model 'digits' has no input 'imag', only image\n"),
        (["digits", '{"zzz": 1}'], "model 'digits' has no input 'zzz', only image\n"),
        (["digits", "[1, 2]"], ": expected shape [-1,8,8] (-1 is any number), got [2]"),
        (["digits", "[[1], 2]"], "the arrays in it differ in length"),
        (["digits", "three"], "'three', which is no file: not JSON: "),
        (["digits", "no.npy"], "no.npy: No such file or directory\n"),
        (["digits", "no.png"], "no.png: No such file or directory\n"),
        (["digits", "1", f"--input=image={FLAT}"], "every input is given by --input: there is"),
        (["simple", "1"], "its inputs: INPUT0 INT32 [-1,16], INPUT1 INT32 [-1,16]\n"),
        (["simple", "--random", "--output=zzz"], "unexpected inference output 'zzz'"),
        (["storyteller", "--random", "--save=x"], "--classes and --save are not for streams"),
        (["simple", "--random", "--stream", "--classes=1"], "are not for streams"),
    ],
)  # fmt: skip
def test_failures(headrace: Headrace, words: list[str], text: str) -> None:
    ended = headrace("infer", *words)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith("headrace infer: ")
    assert text in ended.err


@pytest.mark.parametrize(("name", "content", "text"), [
    ("x.npy", b"no", "pickle"), ("x.npz", b"no", "pickle"), ("x.json", b"{", "Expecting property"),
    ("x.csv", "", "Empty CSV"), ("x.csv", "\n", "Empty CSV"),
    ("x.csv", "1,2\n3\n", "Expected 2 columns, got 1: 3"),
    ("x.csv", "a" * 200_000 + "\nb\n", "field larger than field limit"),
    ("x.parquet", b"no", "arquet"), ("x.png", b"no", "cannot identify image file"),
])  # fmt: skip
def test_unreadable_files(
    headrace: Headrace, lone_file: Write, name: str, content: bytes | str, text: str
) -> None:
    file = lone_file(name, content)
    ended = headrace("infer", "digits", str(file))
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.startswith(f"headrace infer: {file}: cannot be read: ")
    assert text in ended.err


@pytest.mark.parametrize(("words", "text"), [
    (["m", "--input=x"], "--input: expected NAME=VALUE, got 'x'"),
    (["m", "--parameter=x"], "--parameter: expected NAME=VALUE, got 'x'"),
    (["m", "--classes=0"], "--classes: expected a whole number above 0, got '0'"),
    (["m", "--scale=1/0"], "--scale: expected a number, got '1/0'"),
    (["m", "--layout=CWH"], "--layout: invalid choice: 'CWH'"),
    (["m", "--randm"], "unknown option '--randm'; did you mean '--random'?"),
    ([], "the following arguments are required: MODEL"),
])  # fmt: skip
def test_wrong_usage(command: Headrace, words: list[str], text: str) -> None:
    ended = command("infer", *words)
    assert (ended.status, ended.out) == (2, "")
    assert text in ended.err
