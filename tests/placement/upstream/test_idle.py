"""Parameters that mean something, but not beside the others."""

import pytest

from headrace.placement.upstream.options import idle_parameters


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        ({"endpoints": "grpc://a", "tls_root_cert": "x"}, ["tls_root_cert"]),
        ({"endpoints": "grpc://a,https://b", "tls_root_cert": "x"}, []),
        ({"endpoints": "grpc://a", "fail_over": "grpcs://b", "tls_cert": "x", "tls_key": "y"}, []),
        ({"endpoints": "grpc://a", "http_tensors": "json"}, ["http_tensors"]),
        ({"endpoints": "https://a", "http_tensors": "json"}, []),
        ({"endpoints": "grpc://a", "forward": "batched"}, []),
        ({"endpoints": "grpc://a", "forward": "transparent"}, ["forward"]),
        ({"endpoints": "grpc://a", "hedge_percent": "5"}, ["hedge_percent"]),
        ({"endpoints": "grpc://a", "hedge_percent": "5", "hedge_after": "p95"}, ["hedge_after"]),
    ],
)
def test_which(given: dict[str, str], idle: list[str]) -> None:
    assert [name for name, _ in idle_parameters(given)] == idle
