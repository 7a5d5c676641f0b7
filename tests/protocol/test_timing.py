"""How long a request may wait by its headers."""

import pytest

from headrace.core.errors import InvalidRequest
from headrace.protocol.parameters import parse_grpc_timeout, timeout_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2H", 7200), ("3M", 180), ("4S", 4), ("50m", 0.05), ("60u", 6e-5), ("70n", 7e-8),
        ("0S", 0), ("99999999H", 99_999_999 * 3600),
        ("", None), ("5", None), ("m", None), ("5ms", None), ("-5m", None), ("123456789m", None),
        ("5 m", None), ("\u0665m", None),
    ],
)  # fmt: skip
def test_what_grpc_writes(text: str, seconds: float | None) -> None:
    assert parse_grpc_timeout(text) == seconds


@pytest.mark.parametrize(("grpc", "envoy", "microseconds"), [
    (None, None, 0), ("50m", None, 50_000), (" 50m ", None, 50_000),
    ("1n", None, 1),  # over, but not without a limit
    ("0S", None, 1), (None, "15000", 15_000_000), (None, "0", 0),  # Envoy never gives up
    ("50m", "0", 50_000), ("50m", "20", 20_000), ("50m", "80", 50_000),
])  # fmt: skip
def test_the_shortest_counts(grpc: str | None, envoy: str | None, microseconds: int) -> None:
    given = {b"grpc-timeout": grpc, b"x-envoy-expected-rq-timeout-ms": envoy}
    assert timeout_of({name: text for name, text in given.items() if text is not None}) == (
        microseconds
    )


@pytest.mark.parametrize("name", [b"grpc-timeout", b"x-envoy-expected-rq-timeout-ms"])
@pytest.mark.parametrize("text", ["", "soon", "1e3", "9" * 16])
def test_what_says_nothing(name: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name.decode()} must be"):
        timeout_of({name: text})
