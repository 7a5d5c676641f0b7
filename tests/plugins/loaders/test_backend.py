"""Refusal of files that are programs, before any worker is started."""

import re
from pathlib import Path

import pytest

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.placement.backend import BACKENDS
from headrace.plugins.loaders.backend import FORMATS, ArtefactBackend
from tests.plugins.loaders.served import Served

# The error of a worker that cannot start shows that a file was not refused.
NOWHERE = "/no/python"
PROGRAMS = [
    ("sklearn", "model.joblib"), ("sklearn", "model.pkl"), ("sklearn", "model.bin"),
    ("mlflow", "MLmodel"), ("pytorch", "model.pt"),
    ("pytorch", "model.pt2"),
]  # fmt: skip
DATA = [
    ("sklearn", "model.skops"), ("xgboost", "model.json"), ("xgboost", "model.ubj"),
    ("xgboost", "model.bin"), ("lightgbm", "model.txt"), ("catboost", "model.cbm"),
]  # fmt: skip


def spec(root: Path, name: str, **parameters: str) -> LoadSpec:
    path = root / "m" / "1" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    return LoadSpec("m", path, root / "m", {"python": NOWHERE, **parameters}, version=1)


@pytest.mark.parametrize(("backend", "name"), PROGRAMS)
def test_a_program_needs_trust(tmp_path: Path, backend: str, name: str) -> None:
    given = spec(tmp_path, name)
    with pytest.raises(LoadFailed, match=r"can run code of its author's when it is loaded\. If"):
        ArtefactBackend(backend).load(given)
    with pytest.raises(LoadFailed, match=NOWHERE):
        ArtefactBackend(backend, trusted=True).load(given)


@pytest.mark.parametrize(("backend", "name"), PROGRAMS)
def test_a_configuration_can_trust(tmp_path: Path, backend: str, name: str) -> None:
    with pytest.raises(LoadFailed, match=NOWHERE):
        ArtefactBackend(backend).load(spec(tmp_path, name, trust_model_code="true"))


@pytest.mark.parametrize(("backend", "name"), DATA)
def test_data_files_need_no_trust(tmp_path: Path, backend: str, name: str) -> None:
    with pytest.raises(LoadFailed, match=NOWHERE):
        ArtefactBackend(backend).load(spec(tmp_path, name))


@pytest.mark.parametrize("text", ["yes", "True", ""])
def test_trust_is_true_or_false(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidOption, match="expected true or false"):
        ArtefactBackend("xgboost").load(spec(tmp_path, "model.json", trust_model_code=text))


def test_parameters_of_loaders() -> None:
    backends = {name: ArtefactBackend(name) for name in FORMATS}
    assert BACKENDS.own().keys() > FORMATS.keys()
    assert all(backend.reads_parameter("trust_model_code") for backend in backends.values())
    assert backends["sklearn"].reads_parameter("skops_trusted_types")
    assert not backends["xgboost"].reads_parameter("skops_trusted_types")


def test_every_format_has_a_loader() -> None:
    folder = Path(__file__).parents[3] / "server/headrace/plugins/loaders"
    assert all((folder / f"{name}.py").is_file() for name in FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "package", "name", "library"),
    [
        ("catboost", "catboost", "model.cbm", "a CatBoost"),
        ("lightgbm", "lightgbm", "model.txt", "a LightGBM"),
        ("sklearn", "skops.io", "model.skops", "a scikit-learn"),
        ("sklearn", "joblib", "model.joblib", "a scikit-learn"),
        ("xgboost", "xgboost", "model.json", "an XGBoost"),
    ],
)
def test_a_missing_file(tmp_path: Path, loader: str, package: str, name: str, library: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / name).write_text('{"learner": 3}')
    says = rf"^{re.escape(name)} cannot be loaded as {library} model: "
    with pytest.raises(ValueError, match=says) as refused:
        Served(loader, tmp_path / name, trusted=True)
    assert str(tmp_path) not in str(refused.value)
