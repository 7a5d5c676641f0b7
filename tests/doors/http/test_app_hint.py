"""Suggestions of paths in the text of a 404."""

import pytest

from headrace.doors.http.app import hint


@pytest.mark.parametrize(("path", "near"), [
    ("/v1/models/simple:predict", "/v2/models/simple/infer"),
    ("/models/simple/infer", "/v2/models/simple/infer"),
    ("/V2/Model/simple/infer", "/v2/models/simple/infer"),
    ("/v2//models/simple/inferr/", "/v2/models/simple/infer"),
    ("/v2/models/x/versions/3/infr", "/v2/models/x/versions/3/infer"),
    ("/v2/models/x/version/3/", "/v2/models/x/versions/3"),
    ("/v2/models/a b/predict", "/v2/models/a%20b/infer"),
    ("/v2/models/m/stat", "/v2/models/m/stats"),
    ("/v2/modles/simple/infer", "/v2/models/NAME/infer"), ("/v2/models", "/v2/models/stats"),
    ("/predict", "/v2/models/NAME/infer"), ("/health", "/v2/health/live"),
    ("/health/ready", "/v2/health/ready"), ("/ready", "/v2/health/ready"), ("/v3", "/v2"),
])  # fmt: skip
def test_the_nearest_path(path: str, near: str) -> None:
    assert hint(path) == f"; did you mean {near}?"


def test_metrics_have_their_own_port() -> None:
    assert "--metrics-port" in hint("/metrics")


@pytest.mark.parametrize(
    "path",
    ["/favicon.ico", "/zzz", "/wp-admin/setup.php", "/v2/models/simple/nothing",
     "/v2/models/simple/versions/abc", "/v2/models/" + "x" * 200, "/v2/models/m/infer"],
)  # fmt: skip
def test_paths_without_a_near_route(path: str) -> None:
    assert hint(path) == ""
