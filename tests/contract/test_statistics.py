"""What is counted, over every transport. Tests compare counters before and after."""

import time

import numpy as np
import pytest

from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.tensors import Array
from headrace.protocol.pb.grpc_service_pb2 import ModelStatistics
from tests.support.client import Client
from tests.support.scrape import Scraper


def _of(client: Client, model: str, version: str = "") -> ModelStatistics:
    [found] = client.statistics(model, version)
    return found


def _batches(model: ModelStatistics) -> dict[int, int]:
    return {entry.batch_size: entry.compute_infer.count for entry in model.batch_stats}


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


def test_executions_by_batch_size(client: Client) -> None:
    before = _batches(_of(client, "row_sum"))
    for rows in (2, 5, 5):
        client.infer("row_sum", {"INPUT0": np.zeros((rows, 2), np.float32)})
    entries = _of(client, "row_sum").batch_stats
    after = _batches(_of(client, "row_sum"))
    assert list(after) == sorted(after)
    assert after[2] - before.get(2, 0) == 1
    assert after[5] - before.get(5, 0) == 2
    for entry in entries:
        assert entry.compute_input.count == entry.compute_infer.count == entry.compute_output.count


def test_a_model_without_batches_counts_requests(client: Client) -> None:
    before = _of(client, "unbatched")
    zeros = np.zeros((2, 3), np.float32)
    client.infer("unbatched", {"INPUT0": zeros, "INPUT1": zeros})
    after = _of(client, "unbatched")
    assert after.inference_count - before.inference_count == 1
    assert set(_batches(after)) == {1}


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


def test_a_refusal_is_not_counted(client: Client) -> None:
    before = _of(client, "row_sum")
    with pytest.raises(InvalidRequest):
        client.infer("row_sum", {"WRONG": np.zeros((1, 1), np.float32)})
    assert _of(client, "row_sum") == before


def test_versions_are_counted_apart(client: Client) -> None:
    before = {v: _of(client, "versions_all", v).inference_count for v in ("1", "10")}
    zero: dict[str, Array] = {"INPUT0": np.zeros((1, 1), np.float32)}
    client.infer("versions_all", zero, version="1")
    client.infer("versions_all", zero, version="1")
    client.infer("versions_all", zero)
    after = {v: _of(client, "versions_all", v).inference_count for v in ("1", "10")}
    assert (after["1"] - before["1"], after["10"] - before["10"]) == (2, 1)


def test_which_versions_are_shown(caller: Client) -> None:
    versions = [m.version for m in caller.statistics("versions_latest")]
    assert versions == ["3", "10"]
    everything = [(m.name, m.version) for m in caller.statistics()]
    index = [(m.name, m.version) for m in caller.index().models]
    assert everything == index
