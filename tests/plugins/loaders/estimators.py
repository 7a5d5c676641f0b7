"""Parts of scikit-learn that the tests' models have, and one of our own."""

from typing import Any

from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import DBSCAN
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

__all__ = [
    "DBSCAN", "JOBS", "CalibratedClassifierCV", "ColumnTransformer", "CountVectorizer",
    "FunctionTransformer", "LinearRegression", "LogisticRegression", "OneHotEncoder",
    "SimpleImputer", "StandardScaler", "TfidfVectorizer", "Watched", "make_pipeline", "make_union",
]  # fmt: skip

JOBS: list[int] = []


class Watched(RandomForestClassifier):  # type: ignore[misc]
    """A forest that notes with how many threads it predicts."""

    def predict(self, X: Any) -> Any:
        JOBS.append(self.n_jobs)
        return super().predict(X)
