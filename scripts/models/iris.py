"""The model `iris`: species of irises by the sizes of their leaves, with LightGBM.

Data: scikit-learn's `load_iris` (R. A. Fisher, 1936), two thirds for training, one third held out.
"""

from dataclasses import dataclass
from pathlib import Path

import lightgbm
import numpy as np
from sklearn.datasets import load_iris
from sklearn.model_selection import train_test_split

from scripts.models.artefact_file import run

FILE = "model.txt"
COLUMNS = ["sepal_length", "sepal_width", "petal_length", "petal_width"]
ROUNDS = 30
SETTINGS = {
    "objective": "multiclass", "num_class": 3, "num_leaves": 4, "min_data_in_leaf": 5,
    "learning_rate": 0.1, "deterministic": True, "force_row_wise": True, "num_threads": 1,
    "seed": 0, "verbose": -1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Split:
    """Sizes in cm, float32[n, 4]; kinds are 0 setosa, 1 versicolor, 2 virginica."""

    train: np.ndarray
    train_kinds: np.ndarray
    test: np.ndarray
    test_kinds: np.ndarray


def split() -> Split:
    sizes, kinds = load_iris(return_X_y=True)
    train, test, train_kinds, test_kinds = train_test_split(
        sizes.astype(np.float32), kinds, test_size=1 / 3, random_state=0, stratify=kinds
    )
    return Split(train, train_kinds, test, test_kinds)


def build(repository: Path) -> None:
    data = split()
    training = lightgbm.Dataset(data.train, data.train_kinds, feature_name=COLUMNS)
    booster = lightgbm.train(SETTINGS, training, ROUNDS)
    path = repository / "iris" / "1" / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    booster.save_model(path)


def probes() -> dict[str, dict[str, np.ndarray]]:
    """Inputs on which two builds of a model can be compared, by model name."""
    return {"iris": {"flower": split().test}}


def report(repository: Path) -> list[str]:
    """The held-out accuracy."""
    data = split()
    found = run(repository / "iris" / "1" / FILE, {"flower": data.test})["predict"]
    hits, count = int((found.argmax(axis=1) == data.test_kinds).sum()), len(data.test_kinds)
    return [f"iris: {hits} of {count} held-out flowers, {hits / count:.2%}"]
