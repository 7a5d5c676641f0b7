"""A PMML file by sklearn2pmml, of a tree over numbers and cities, in a server and in a loader.

Buys: with an income above 42 outside Bern, and everybody above 66. A tree that meets a missing
value gives no result.
"""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.loaders.conftest import imported
from tests.plugins.loaders.served import Served
from tests.support.server_process import ServerProcess

MODELS = Path(__file__).with_name("models")
FILE = MODELS / "offer" / "1" / "model.pmml"


@pytest.fixture(scope="module", autouse=True)
def _java() -> None:
    imported("jpype", "pandas", "jpmml_evaluator")
    if shutil.which("java") is None:
        pytest.skip("PMML needs Java")


@pytest.fixture(scope="module")
def served() -> Served:
    return Served("pmml", FILE)


def rows(*people: tuple[float, float, str]) -> dict[str, Any]:
    age, income, city = zip(*people, strict=True)
    return {
        "age": np.array(age, np.float32).reshape(-1, 1),
        "income": np.array(income, np.float32).reshape(-1, 1),
        "city": np.array([[name.encode()] for name in city], object),
    }


def test_the_signature_is_the_files(served: Served) -> None:
    assert served.signature() == {
        "age": ("FP32", [1]), "income": ("FP32", [1]), "city": ("STRING", [1]),
        "buys": ("STRING", [1]), "probability(no)": ("FP64", [1]),
        "probability(yes)": ("FP64", [1]),
    }  # fmt: skip


def test_rows_and_missing_values(served: Served) -> None:
    people = [(30, 50, "Genève"), (30, 20, "Bern"), (70, np.nan, "Bern"), (20, 50, "")]
    found = served.ask(rows(*people))
    assert found["buys"].ravel().tolist() == ["yes", "no", "yes", ""]
    expected = [1, 0, 1, np.nan]
    np.testing.assert_array_equal(found["probability(yes)"].ravel(), expected)


def test_an_unknown_city_fails_its_request(served: Served) -> None:
    error = served.ask(rows((30, 50, "Paris")))["error"]
    assert error == 'row 0: Field "city" cannot accept invalid value "Paris"'


@pytest.mark.parametrize("text", ["<nope/>", '<!DOCTYPE P [<!ENTITY x SYSTEM "{}">]><P>&x;</P>'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.pmml"
    path.write_text(text.format(FILE.as_uri()))
    with pytest.raises(ValueError, match=r"model\.pmml cannot be loaded as a PMML model"):
        Served("pmml", path)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(MODELS) as started:
        yield started
        assert started.stop() == 0


def _infer(server: ServerProcess, city: str) -> Any:
    tensors = [
        ("age", "FP32", [30, 70]),
        ("income", "FP32", [50, 50]),
        ("city", "BYTES", [city] * 2),
    ]
    inputs = [
        {"name": name, "datatype": datatype, "shape": [2, 1], "data": data}
        for name, datatype, data in tensors
    ]
    document = json.dumps({"inputs": inputs, "outputs": [{"name": "buys"}]}).encode()
    url = f"http://{server.http}/v2/models/offer/infer"
    with urllib.request.urlopen(urllib.request.Request(url, document), timeout=30) as response:
        return json.load(response)


def test_a_server_runs_it_without_configuration(server: ServerProcess) -> None:
    (output,) = _infer(server, "Bern")["outputs"]
    assert output == {"name": "buys", "datatype": "BYTES", "shape": [2, 1], "data": ["no", "yes"]}


def test_a_server_names_the_refused_value(server: ServerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError) as found:
        _infer(server, "Paris")
    assert found.value.code == 400
    assert "Paris" in json.load(found.value)["error"]
