"""An instance on upstreams, as seen by the scheduler and the response counters."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.core.errors import InvalidRequest, Unavailable
from headrace.placement.placement import Surroundings
from headrace.placement.upstream.attempt import Policy
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.pool import UpstreamInstance
from headrace.placement.upstream.requests import Forwarding
from headrace.protocol.status import Failure, Fate
from tests.engine.counted import Counted
from tests.placement.upstream.fakes import Loop, Server
from tests.scheduling.fakes import Bench, request, signature, submitted


class Pool:
    """A pool of reachable upstreams."""

    def rest(self, instance: object) -> None:
        pass


@pytest.mark.parametrize(
    "failure",
    [
        Failure(Fate.ANSWERED, InvalidRequest("of what it takes")),
        Failure(Fate.REFUSED, Unavailable("too much to do")),
    ],
)
def test_a_stream_that_fails_is_counted_as_a_failed_response(failure: Failure) -> None:
    shape, server, host = replace(signature(), decoupled=True), Server(), cast(Any, None)
    counted = Counted(Bench(instances=0, shape=shape))
    batcher, loop = counted.bench.batcher, cast(asyncio.AbstractEventLoop, Loop())
    version = Surroundings(shape, batcher, host, loop, lambda: None)
    options = RemoteOptions.of({"endpoints": "grpc://127.0.0.1"}, "m", 0, Path())
    policy = Policy("m", lambda tried: None if tried else cast(Any, server), loop)
    batcher.add_instance(UpstreamInstance(cast(Any, Pool()), policy, Forwarding(options), version))
    submitted(counted.submit, request("a", 1), counted.call, 1)
    counted.bench.clock.settle()
    server.streams[0].end(failure)
    counted.bench.clock.settle()
    assert counted.call.errors == [failure.error]
    # A request that no model has begun has no response that could have failed.
    begun = failure.fate is not Fate.REFUSED
    failed = [ordinal.fail.count for ordinal in counted.responses.ordinals.values()]
    assert failed == ([1] if begun else [])
    assert counted.call.started is begun
