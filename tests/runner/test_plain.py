"""Plain calls of a program, held against the complete way, mixed in one batch."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import AsyncEngine, Engine, Float32, N
from headrace.client import TimedOut
from headrace.client.transport import Result
from tests.models.onnx_graphs import identity, lookup, write_model
from tests.support.scrape import until

ONE = np.ones((1, 1), np.float32)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    write_model(root, "same", identity(dims=["rows", 1]), "max_batch_size: 8")
    write_model(root, "free", identity(dims=["rows", "length"]))
    return root


def inputs(random: Random) -> dict[str, Any]:
    """Arrays as the model takes them, mostly, and others."""
    rows, width = random.randrange(1, 11), random.choice((1, 1, 1, 2))
    values = np.array([random.random() for _ in range(rows * width)], np.float32)
    forms: list[Callable[[], Any]] = [
        *[lambda: values.reshape(rows, width)] * 6,
        lambda: values,
        lambda: values.reshape(rows, width).astype(np.float64),
        lambda: values.reshape(rows, width).astype(">f4"),
        lambda: np.repeat(values, 2).reshape(rows, 2 * width)[:, ::2],
        lambda: values.reshape(rows, width).tolist(),
        lambda: np.array([["text"]], object),
        lambda: np.ma.MaskedArray(values.reshape(rows, width), values.reshape(rows, width) > 2),
        lambda: np.ones((0, 1), np.float32),
        lambda: None,
    ]
    found = {"INPUT0": random.choice(forms)()}
    return found | {"MORE": ONE} if random.random() < 0.05 else found


def told(found: object) -> object:
    """A result or an error, to be compared."""
    if isinstance(found, Result):
        arrays = {name: found[name].tolist() for name in found}
        response = found.response
        declared = [(one.name, one.datatype, one.array.tolist()) for one in response.outputs]
        assert min(response.timing) >= 0
        return found.model, found.version, found.id, found.parameters, arrays, declared
    return type(found), str(found)


async def test_plain_calls_are_answered_like_others(repository: Path) -> None:
    random = Random(7)
    async with AsyncEngine(repository) as engine:
        for name in ("same", "free"):
            model = engine.model(name)
            await model(INPUT0=ONE)
            for _ in range(40):
                given = [inputs(random) for _ in range(12)]
                short = [model(**each) for each in given]
                complete = [model.infer(each) for each in given]
                found = await asyncio.gather(*short, *complete, return_exceptions=True)
                assert list(map(told, found[:12])) == list(map(told, found[12:]))


def test_plain_calls_of_threads_are_answered_like_others(repository: Path) -> None:
    def outcome(call: Callable[..., Any], *given: Any, **named: Any) -> object:
        try:
            return told(call(*given, **named))
        except Exception as error:
            return told(error)

    with Engine(repository) as engine, ThreadPoolExecutor(8) as pool:
        model = engine.model("same")
        model(INPUT0=ONE)

        def compare(seed: int) -> None:
            random = Random(seed)
            for _ in range(30):
                given = inputs(random)
                assert outcome(model, **given) == outcome(model.infer, given)

        list(pool.map(compare, range(8)))


@headrace.model
def waits(x: Float32[N]) -> Float32[N]:
    while x[0]:
        time.sleep(0.01)
    return x


def test_a_plain_call_ends_in_time() -> None:
    """And leaves nothing charged."""
    with Engine(waits, timeout=0.3, exit_timeout_secs=1) as engine:
        # The first call may last longer: it is given its own time.
        first = engine.infer("waits", {"x": np.zeros(1, np.float32)}, timeout=30)
        assert first.array.tolist() == [0]
        model = engine.model("waits")
        with pytest.raises(TimedOut, match=r"no answer of waits within 0\.3 s"):
            model(x=np.ones(1, np.float32))
        until(lambda: b"\nheadrace_admitted_bytes 0" in engine.metrics(), "nothing charged")


def test_a_plain_call_without_any_time() -> None:
    none = np.zeros(1, np.float32)
    with Engine(waits, timeout=1e-9, exit_timeout_secs=1) as engine:
        engine.infer("waits", {"x": none}, timeout=30)
        for _ in range(20):
            with pytest.raises(TimedOut, match="no answer of waits"):
                engine.model("waits")(x=none)


async def test_a_plain_call_can_be_cancelled() -> None:
    async with AsyncEngine(waits, exit_timeout_secs=1) as engine:
        model = engine.model("waits")
        await model(x=np.zeros(1, np.float32))
        asked = asyncio.ensure_future(model(x=np.ones(1, np.float32)))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_plain_calls_follow_a_model_that_is_loaded_anew(repository: Path) -> None:
    async with AsyncEngine(repository, model_control_mode="explicit", load_model="same") as engine:
        model = engine.model("same")
        for _ in range(3):
            assert (await model(INPUT0=ONE)).array.tolist() == [[1]]
            await engine.unload("same")
            with pytest.raises(headrace.ClientError):
                await model(INPUT0=ONE)
            await engine.load("same")


def test_an_engine_that_is_closed_meanwhile() -> None:
    with ThreadPoolExecutor(1) as pool:
        engine = Engine(waits, exit_timeout_secs=1)
        model = engine.model("waits")
        model(x=np.zeros(1, np.float32))
        asked = pool.submit(model, x=np.ones(1, np.float32))
        until(lambda: asked.running(), "a call")
        engine.close()
        assert isinstance(asked.exception(30), (headrace.ClientError, RuntimeError))
        with pytest.raises(RuntimeError, match="closed"):
            model(x=np.zeros(1, np.float32))


# --- threads that run their calls themselves


@pytest.fixture
def lookups(tmp_path: Path) -> Path:
    """A model that fails for indices from 10 on."""
    root = tmp_path / "lookups"
    write_model(root, "lookup", lookup(), "max_batch_size: 8")
    return root


def at(*places: int) -> Any:
    return np.array([places], np.int64).reshape(-1, 1)


def test_threads_run_their_calls_and_all_are_counted(lookups: Path) -> None:
    with Engine(lookups) as engine, ThreadPoolExecutor(8) as pool:
        model = engine.model("lookup")
        expected = {place: model(INPUT0=at(place)).array.tolist() for place in range(10)}

        def ask(seed: int) -> None:
            random = Random(seed)
            for _ in range(100):
                place = random.randrange(10)
                assert model(INPUT0=at(place)).array.tolist() == expected[place]

        list(pool.map(ask, range(8)))
        [told] = engine.statistics("lookup")["model_stats"]
        assert (
            int(told["inference_stats"]["success"]["count"]) == int(told["inference_count"]) == 810
        )
        batches = sum(int(batch["compute_infer"]["count"]) for batch in told["batch_stats"])
        assert batches == int(told["execution_count"]) <= 810


def test_a_failing_call_of_a_thread_hurts_no_other(lookups: Path) -> None:
    with Engine(lookups) as engine, ThreadPoolExecutor(8) as pool:
        model = engine.model("lookup")
        model(INPUT0=at(0))

        def ask(seed: int) -> int:
            random, failed = Random(seed), 0
            for _ in range(50):
                place = random.choice((1, 2, 99))
                if place == 99:
                    with pytest.raises(headrace.ClientError, match="failed to execute"):
                        model(INPUT0=at(place))
                    failed += 1
                else:
                    model(INPUT0=at(place))
            return failed

        failures = sum(pool.map(ask, range(8)))
        [told] = engine.statistics("lookup")["model_stats"]
        assert int(told["inference_stats"]["fail"]["count"]) == failures
        assert int(told["inference_stats"]["success"]["count"]) == 401 - failures


def test_calls_of_the_event_loop_get_an_instance_that_threads_use(lookups: Path) -> None:
    with Engine(lookups) as engine, ThreadPoolExecutor(4) as pool:
        model = engine.model("lookup")
        model(INPUT0=at(0))
        over = threading.Event()

        def ask(_: int) -> None:
            while not over.is_set():
                model(INPUT0=at(1))

        asked = [pool.submit(ask, number) for number in range(3)]
        try:
            for _ in range(50):
                model.infer({"INPUT0": at(2)})
        finally:
            over.set()
        for each in asked:
            each.result(30)


def test_a_model_is_unloaded_while_threads_call_it(lookups: Path) -> None:
    options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": "lookup"}
    with Engine(lookups, **options) as engine, ThreadPoolExecutor(3) as pool:
        model = engine.model("lookup")
        model(INPUT0=at(0))
        over = threading.Event()
        answered = [0, 0, 0]

        def ask(number: int) -> None:
            while not over.is_set():
                with suppress(headrace.ClientError):
                    answered[number] += len(model(INPUT0=at(1)))

        asked = [pool.submit(ask, number) for number in range(3)]
        try:
            until(lambda: all(answered), "an answer to each")
            for _ in range(10):
                engine.unload("lookup")
                assert not model.ready()
                engine.load("lookup")
        finally:
            over.set()
        for each in asked:
            each.result(30)


async def test_a_caller_of_quick_calls_leaves_the_loop_to_others(lookups: Path) -> None:
    async with AsyncEngine(lookups) as engine:
        model = engine.model("lookup")
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        await model(INPUT0=at(0))
        other = asyncio.ensure_future(others())
        for _ in range(1000):
            await model(INPUT0=at(1))
        other.cancel()
        assert turns > 10
        told = (await engine.statistics("lookup"))["model_stats"][0]
        assert int(told["inference_stats"]["success"]["count"]) == 1001


# --- coroutines whose calls run together at the end of a tick


async def test_calls_of_one_tick_run_together_and_fail_alone(lookups: Path) -> None:
    async with AsyncEngine(lookups) as engine:
        model = engine.model("lookup")
        expected = {place: (await model(INPUT0=at(place))).array.tolist() for place in range(10)}
        random = Random(3)
        failures = 0
        for _ in range(20):
            places = [random.choice((*range(10), 99)) for _ in range(12)]
            found = await asyncio.gather(
                *(model(INPUT0=at(place)) for place in places), return_exceptions=True
            )
            failures += places.count(99)
            for place, one in zip(places, found, strict=True):
                if place == 99:
                    assert isinstance(one, headrace.ClientError)
                    assert "failed to execute" in str(one)
                else:
                    assert isinstance(one, Result)
                    assert one.array.tolist() == expected[place]
        [counted] = (await engine.statistics("lookup"))["model_stats"]
        assert int(counted["inference_stats"]["fail"]["count"]) == failures
        assert int(counted["inference_stats"]["success"]["count"]) == 10 + 240 - failures
        assert int(counted["execution_count"]) < 240


async def test_a_call_of_a_tick_that_is_cancelled_leaves_the_others(lookups: Path) -> None:
    async with AsyncEngine(lookups) as engine:
        model = engine.model("lookup")
        [expected] = [(await model(INPUT0=at(1))).array.tolist()]
        asked = [asyncio.ensure_future(model(INPUT0=at(1))) for _ in range(200)]
        await asyncio.sleep(0)
        for each in asked[::3]:
            each.cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        # Some have run at once, but not for long.
        assert any(isinstance(one, asyncio.CancelledError) for one in found)
        for number, one in enumerate(found):
            if number % 3:
                assert isinstance(one, Result)
                assert one.array.tolist() == expected


async def test_calls_of_a_tick_in_which_the_model_is_unloaded(lookups: Path) -> None:
    options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": "lookup"}
    async with AsyncEngine(lookups, **options) as engine:
        model = engine.model("lookup")
        for _ in range(5):
            await model(INPUT0=at(0))
            asked = [asyncio.ensure_future(model(INPUT0=at(1))) for _ in range(20)]
            await asyncio.sleep(0)
            await engine.unload("lookup")
            for one in await asyncio.gather(*asked):
                assert len(one) == 1
            await engine.load("lookup")


# --- requests with more rows than a batch


async def test_rows_of_many_batches_are_answered_in_order(repository: Path) -> None:
    async with AsyncEngine(repository) as engine:
        for rows in (8, 9, 4003):
            values = np.arange(rows, dtype=np.float32).reshape(-1, 1)
            found, other = await asyncio.gather(
                engine.infer("same", {"INPUT0": values}), engine.model("same")(INPUT0=ONE)
            )
            np.testing.assert_array_equal(found.array, values)
            assert other.array.tolist() == [[1]]
        [counted] = (await engine.statistics("same"))["model_stats"]
        assert int(counted["inference_count"]) == 8 + 9 + 4003 + 3
        # An answer is a table of its own, which may be written.
        assert not np.may_share_memory(found.array, values)


async def test_a_row_that_fails_among_many_batches(lookups: Path) -> None:
    async with AsyncEngine(lookups) as engine:
        places = np.zeros((2000, 1), np.int64)
        places[1500] = 99
        with pytest.raises(headrace.ClientError, match="failed to execute"):
            await engine.infer("lookup", {"INPUT0": places})
        places[1500] = 9
        assert len((await engine.infer("lookup", {"INPUT0": places})).array) == 2000


async def test_many_batches_leave_the_loop_to_others_and_can_be_cancelled(lookups: Path) -> None:
    options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": "lookup"}
    async with AsyncEngine(lookups, **options) as engine:
        places = np.zeros((400_000, 1), np.int64)
        asked = asyncio.ensure_future(engine.infer("lookup", {"INPUT0": places}))
        for _ in range(100):
            assert not asked.done()
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert len(await engine.model("lookup")(INPUT0=at(1))) == 1
        await engine.unload("lookup")
