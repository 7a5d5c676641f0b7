"""Shutdown of backends."""

import asyncio
import logging

import pytest

from headrace.placement.backend import Backend, close_backends, stop_backends


class Broken(Backend):
    """Fails at shutdown, as a third-party plugin may."""

    def stop(self) -> None:
        raise RuntimeError("no stop")

    async def close(self) -> None:
        raise RuntimeError("no close")


class Recorded(Backend):
    """Records its shutdown."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def stop(self) -> None:
        self.calls.append("stop")

    async def close(self) -> None:
        self.calls.append("close")


def test_a_backend_that_fails_to_close_is_named_and_the_others_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded = Recorded()
    backends = {"broken": Broken(), "recorded": recorded}
    with caplog.at_level(logging.ERROR):
        stop_backends(backends)
        asyncio.run(close_backends(backends))
    assert recorded.calls == ["stop", "close"]
    assert [record.getMessage() for record in caplog.records] == [
        "bug while stopping the backend broken",
        "bug while closing the backend broken",
    ]
    assert "RuntimeError: no stop" in caplog.text
    assert "RuntimeError: no close" in caplog.text
