"""Statistics over every transport; tests compare counters before and after."""

import time

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed
from headrace.core.tensors import Array
from headrace.protocol.pb.grpc_service_pb2 import ModelStatistics
from tests.support.client import Client
from tests.support.scrape import Scraper


def _of(client: Client, model: str, version: str = "") -> ModelStatistics:
    [found] = client.statistics(model, version)
    return found


def test_a_success_is_counted_once_everywhere(client: Client) -> None:
    begun = time.time()
    before = _of(client, "row_sum")
    client.infer("row_sum", {"INPUT0": np.zeros((3, 2), np.float32)})
    after = _of(client, "row_sum")
    assert (after.name, after.version) == ("row_sum", "1")
    assert after.inference_count - before.inference_count == 3  # rows
    assert after.execution_count - before.execution_count == 1
    assert after.last_inference >= int(begun * 1000)
    old, new = before.inference_stats, after.inference_stats
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert getattr(new, name).count - getattr(old, name).count == 1, name
        assert getattr(new, name).ns > getattr(old, name).ns, name
    assert new.fail == old.fail
    assert (new.cache_hit.count, new.cache_miss.count) == (0, 0)
    parts = new.queue.ns + new.compute_input.ns + new.compute_infer.ns + new.compute_output.ns
    assert parts == new.success.ns


def test_a_failure_is_counted_as_such(client: Client, metrics: Scraper) -> None:
    def of_backend() -> float:
        name = "nv_inference_request_failure"
        return metrics.now().value(name, model="lookup", reason="BACKEND")

    client.infer("lookup", {"INPUT0": np.array([[0]])})
    before, failures = _of(client, "lookup"), of_backend()
    with pytest.raises(ExecutionFailed):
        client.infer("lookup", {"INPUT0": np.array([[99]])})
    after = _of(client, "lookup")
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
    assert after.inference_stats.fail.ns > before.inference_stats.fail.ns
    assert after.inference_stats.success == before.inference_stats.success
    assert after.inference_count == before.inference_count
    assert after.execution_count == before.execution_count
    assert of_backend() - failures == 1


def test_versions_are_counted_apart(client: Client) -> None:
    before = {v: _of(client, "versions_all", v).inference_count for v in ("1", "10")}
    zero: dict[str, Array] = {"INPUT0": np.zeros((1, 1), np.float32)}
    client.infer("versions_all", zero, version="1")
    client.infer("versions_all", zero, version="1")
    client.infer("versions_all", zero)
    after = {v: _of(client, "versions_all", v).inference_count for v in ("1", "10")}
    assert (after["1"] - before["1"], after["10"] - before["10"]) == (2, 1)


def test_versions_in_statistics(caller: Client) -> None:
    versions = [m.version for m in caller.statistics("versions_latest")]
    assert versions == ["3", "10"]
    everything = [(m.name, m.version) for m in caller.statistics()]
    index = [(m.name, m.version) for m in caller.index().models]
    assert everything == index
