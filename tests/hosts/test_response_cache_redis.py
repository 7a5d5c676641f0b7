"""The response cache on a real Redis: shared by servers with the same model, and dispensable."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.models.onnx_graphs import add_sub, write_model
from tests.support.brokers import RedisProcess, started
from tests.support.client import Client
from tests.support.http_client import HttpClient
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server

CACHED = "response_cache { enable: true }\n"
PREFIX = b"headrace:answer:1:"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with started("redis", tmp_path) as broker:
        assert isinstance(broker, RedisProcess)
        yield broker


def options(redis: RedisProcess, *more: str) -> list[str]:
    given = ("host=127.0.0.1", f"port={redis.port}", "timeout_ms=10000", *more)
    return [f"--cache-config=redis,{setting}" for setting in given]


def models(folder: Path, graph: bytes) -> Path:
    folder.mkdir()
    write_model(folder, "sum", graph, CACHED)
    return folder


def ask(client: Client, value: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    row = np.full((1, 4), value, np.float32)
    answer = client.infer("sum", {"INPUT0": row, "INPUT1": row})
    np.testing.assert_array_equal(answer["OUTPUT1"], 0 * row)
    return answer["OUTPUT0"]


def hits(client: Client) -> tuple[int, int]:
    stats = client.statistics("sum")[0].inference_stats
    return stats.cache_hit.count, stats.cache_miss.count


@contextmanager
def served(root: Path, redis: RedisProcess, *more: str) -> Iterator[tuple[ServerProcess, Client]]:
    with (
        clean_server(root, options=[*options(redis), *more]) as server,
        HttpClient(server.url, binary=False) as client,
    ):
        yield server, client


def failures(server: ServerProcess) -> float:
    with Scraper(server.metrics) as scraper:
        return scraper.now().value("headrace_response_cache_redis_failures_total")


def written(redis: RedisProcess, count: int) -> list[bytes]:
    until(lambda: len(redis.client.keys(PREFIX + b"*")) == count, f"{count} answers")
    return sorted(redis.client.keys(PREFIX + b"*"))


def test_servers_with_the_same_model_share_answers(redis: RedisProcess, tmp_path: Path) -> None:
    one, copy = (models(tmp_path / name, add_sub()) for name in ("one", "copy"))
    with (
        clean_server(one, options=options(redis, "ttl_secs=1000")) as first,
        clean_server(copy, options=[*options(redis), "--frontends=1"]) as second,
        HttpClient(first.url, binary=False) as client,
        HttpClient(second.url, binary=True) as other,
    ):
        assert ask(client, 3)[0, 0] == 6
        [key] = written(redis, 1)
        assert 0 < redis.client.ttl(key) <= 1000
        assert ask(other, 3)[0, 0] == 6
        assert ask(client, 3)[0, 0] == 6
        assert (hits(client), hits(other)) == ((1, 1), (1, 0))
        assert ask(other, 4)[0, 0] == 8
        written(redis, 2)


def test_another_configuration_has_other_answers(redis: RedisProcess, tmp_path: Path) -> None:
    root = models(tmp_path / "models", add_sub())
    config = root / "sum" / "config.pbtxt"
    for answers in (1, 2):
        with served(root, redis) as (_, client):
            ask(client, 1)
            written(redis, answers)
        config.write_text(config.read_text() + "max_batch_size: 2\n")


def test_answers_in_memory_are_not_asked_for(redis: RedisProcess, tmp_path: Path) -> None:
    root = models(tmp_path / "models", add_sub())
    with served(root, redis, "--response-cache-byte-size=1000000") as (_, client):
        ask(client, 1)
        [key] = written(redis, 1)
        redis.client.delete(key)
        ask(client, 1)
        assert hits(client) == (1, 1)


def test_malformed_answers_are_computed_again(redis: RedisProcess, tmp_path: Path) -> None:
    with served(models(tmp_path / "models", add_sub()), redis) as (server, client):
        ask(client, 1)
        [key] = written(redis, 1)
        whole = redis.client.get(key)
        redis.client.set(key, whole[:-1])
        assert ask(client, 1)[0, 0] == 2
        assert failures(server) == 1
        until(lambda: redis.client.get(key) == whole, "the whole answer")
        assert ask(client, 1)[0, 0] == 2
        assert hits(client) == (1, 2)


def test_a_server_goes_on_without_redis(redis: RedisProcess, tmp_path: Path) -> None:
    with served(models(tmp_path / "models", add_sub()), redis) as (server, client):
        ask(client, 1)
        written(redis, 1)
        redis.kill()
        assert [ask(client, value)[0, 0] for value in (1, 2, 2)] == [2, 4, 4]
        server.await_logged(f"the response cache cannot use Redis at 127.0.0.1:{redis.port}")
        assert failures(server) >= 1
        assert hits(client) == (0, 4)
        redis.start()

        def found() -> bool:
            ask(client, 1)
            return hits(client)[0] > 0

        until(found, "an answer of the new Redis")
        server.await_logged("the response cache uses Redis again")
