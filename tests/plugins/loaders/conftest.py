"""Libraries of the formats, imported for the first test that uses them: some take a second."""

from importlib import import_module
from typing import Any

import pytest


def imported(*names: str) -> Any:
    """The last of these modules; the test is skipped if one is missing."""
    return [pytest.importorskip(name, reason=f"{name} is not installed") for name in names][-1]


@pytest.fixture(scope="session")
def pd() -> Any:
    return imported("pandas")


@pytest.fixture(scope="session")
def sk() -> Any:
    """Parts of scikit-learn."""
    imported("joblib", "sklearn", "skops.io")
    return import_module("tests.plugins.loaders.estimators")


@pytest.fixture(scope="session")
def cat() -> Any:
    return imported("catboost")


@pytest.fixture(scope="session")
def xgb() -> Any:
    return imported("xgboost")
