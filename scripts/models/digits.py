"""The model `digits`: two classifiers of handwritten digits, 8 by 8 pixels of 0 to 16.

Data: scikit-learn's `load_digits` (the test set of UCI's "Optical Recognition of Handwritten
Digits", CC BY 4.0), three quarters for training, one quarter held out. The settings were chosen by
cross-validation inside the training part.

Version 1 is multinomial logistic regression on the pixels. Version 2 is ridge regression on the
one-hot classes in the space of a Gaussian kernel: a pixel grid is compared with every training
image, and each casts a weighted vote.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from scripts.models.onnx_file import BATCH, run, save

NAMES = ("digits",)
PIXELS, CLASSES = 64, 10
BRIGHTEST = 16.0

INVERSE_PENALTY = 10.0  # version 1
KERNEL_WIDTH = 0.25  # version 2: exp(-KERNEL_WIDTH * squared distance), pixels scaled to 0..1
RIDGE = 0.1
SHARPNESS = 12.0  # factor from votes, near 0 and 1, to the logits of the softmax


@dataclass(frozen=True, slots=True)
class Split:
    """Images are float32[n, 8, 8] with values 0 to 16, labels int64[n]."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def split() -> Split:
    data = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        data.images.astype(np.float32),
        data.target.astype(np.int64),
        test_size=0.25,
        random_state=0,
        stratify=data.target,
    )
    return Split(train_images, train_labels, test_images, test_labels)


def build(repository: Path) -> None:
    data = split()
    folder = repository / "digits"
    _build_linear(folder / "1" / "model.onnx", data)
    _build_kernel(folder / "2" / "model.onnx", data)


def _build_linear(path: Path, data: Split) -> None:
    # Double precision, to the end: the result must not depend on the number of threads.
    pixels = data.train_images.reshape(-1, PIXELS).astype(np.float64) / BRIGHTEST
    model = LogisticRegression(C=INVERSE_PENALTY, solver="newton-cholesky", tol=1e-10)
    model.fit(pixels, data.train_labels)
    nodes = [
        helper.make_node("MatMul", ["pixels", "weights"], ["weighted"]),
        helper.make_node("Add", ["weighted", "bias"], ["logits"]),
    ]
    constants = {
        "weights": model.coef_.T.astype(np.float32),
        "bias": model.intercept_.astype(np.float32),
    }
    _save(path, nodes, constants)


def _build_kernel(path: Path, data: Split) -> None:
    references = data.train_images.reshape(-1, PIXELS)
    scaled = references.astype(np.float64) / BRIGHTEST
    lengths = np.square(scaled).sum(axis=1)
    distances = lengths[:, None] + lengths - 2 * scaled @ scaled.T
    kernel = np.exp(-KERNEL_WIDTH * distances) + RIDGE * np.eye(len(scaled))
    votes = np.linalg.solve(kernel, np.eye(CLASSES)[data.train_labels])

    # squared distance = |pixels|² + |reference|² - 2 pixels · reference
    nodes = [
        helper.make_node("Cast", ["references"], ["reference_levels"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["reference_levels", "brightest"], ["reference_pixels"]),
        helper.make_node("Transpose", ["reference_pixels"], ["reference_columns"], perm=[1, 0]),
        helper.make_node("MatMul", ["pixels", "reference_columns"], ["products"]),
        helper.make_node("Mul", ["products", "minus_two"], ["cross_terms"]),
        helper.make_node("ReduceSumSquare", ["pixels"], ["length"], axes=[1], keepdims=1),
        helper.make_node("Add", ["cross_terms", "length"], ["partial_distances"]),
        helper.make_node("Add", ["partial_distances", "reference_lengths"], ["distances"]),
        helper.make_node("Mul", ["distances", "minus_width"], ["exponents"]),
        helper.make_node("Exp", ["exponents"], ["similarities"]),
        helper.make_node("MatMul", ["similarities", "votes"], ["logits"]),
    ]
    constants = {
        "references": references.astype(np.uint8),  # exact: a pixel has 17 levels
        "reference_lengths": lengths.astype(np.float32),
        "minus_two": np.array(-2, np.float32),
        "minus_width": np.array(-KERNEL_WIDTH, np.float32),
        "votes": (SHARPNESS * votes).astype(np.float32),
    }
    _save(path, nodes, constants)


def _save(path: Path, middle: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> None:
    nodes = [
        helper.make_node("Flatten", ["image"], ["levels"], axis=1),
        helper.make_node("Div", ["levels", "brightest"], ["pixels"]),
        *middle,
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=1),
    ]
    save(
        path,
        nodes,
        {"image": (TensorProto.FLOAT, (BATCH, 8, 8))},
        {
            "probabilities": (TensorProto.FLOAT, (BATCH, CLASSES)),
            "label": (TensorProto.INT64, (BATCH, 1)),
        },
        {"brightest": np.array(BRIGHTEST, np.float32), **constants},
    )


def probes() -> dict[str, dict[str, np.ndarray]]:
    """Inputs on which two builds of a model can be compared, by model name."""
    return {"digits": {"image": split().test_images}}


def report(repository: Path) -> list[str]:
    """The held-out accuracy of each version in `repository`."""
    data = split()
    lines = []
    for version in ("1", "2"):
        outputs = run(repository / "digits" / version / "model.onnx", {"image": data.test_images})
        hits = int((outputs["label"][:, 0] == data.test_labels).sum())
        count = len(data.test_labels)
        lines.append(f"digits/{version}: {hits} of {count} held-out images, {hits / count:.2%}")
    return lines
