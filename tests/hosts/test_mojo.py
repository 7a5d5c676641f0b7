"""A MOJO by H2O 3.46.0.7, of gradient boosted trees over numbers and cities, with H2O's answers."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.plugins.loaders.conftest import imported
from tests.plugins.loaders.served import Served

FILE = Path(__file__).with_name("mojos") / "offer" / "1" / "model.zip"


@pytest.fixture(scope="module")
def served() -> Served:
    imported("jpype", "h2o")
    if shutil.which("java") is None:
        pytest.skip("MOJOs need Java")
    return Served("mojo", FILE)


def test_the_signature_is_the_files(served: Served) -> None:
    assert served.signature() == {
        "age": ("FP64", [1]), "income": ("FP64", [1]), "city": ("STRING", [1]),
        "predict": ("STRING", [1]), "predict_proba": ("FP64", [2]),
    }  # fmt: skip


def test_answers_are_h2os(served: Served) -> None:
    answer = served.ask(
        {
            "age": np.array([[47], [np.nan], [64], [76]], float),
            "income": np.array([[56.64], [42.52], [48.23], [24.02]]),
            "city": np.array([[b"Bern"], ["Genève".encode()], [b""], [b"Bern"]], object),
        }
    )
    yes = [0.2834795666, 0.6876680532, 0.6876680532, 0.6876680532]
    np.testing.assert_allclose(answer["predict_proba"][:, 1], yes, rtol=1e-8)
    assert answer["predict"].ravel().tolist() == ["no"] * 4  # below the file's threshold
    assert answer["predict_proba"].sum(axis=1) == pytest.approx(np.ones(4))


def test_another_zip_file_is_refused(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "model.zip"
    path.write_bytes(b"PK\5\6" + bytes(18))
    with pytest.raises(ValueError, match=r"model\.zip cannot be loaded as an H2O MOJO"):
        Served("mojo", path)
