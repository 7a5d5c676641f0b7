"""The slots of a pool, of the kind that its model needs."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from headrace.core.signature import Signature
from headrace.execution.remote.errand import Errand, ErrandMaker
from headrace.execution.remote.sequences import SequenceCalls
from headrace.execution.remote.slot import Pool, Slot
from headrace.execution.remote.stream_errand import StreamErrand, StreamErrandMaker
from headrace.execution.remote.stream_slot import Give, StreamSlot
from headrace.scheduling.sequences import SequenceTable

if TYPE_CHECKING:
    from headrace.execution.remote.model import RemoteModel


def make_slots(
    pool: Pool,
    model: "RemoteModel",
    signature: Signature,
    table: SequenceTable | None,
    loop: asyncio.AbstractEventLoop,
    give: Give,
) -> Sequence[Slot]:
    """As many as calls may be under way. `table` has the model's sequences, if it has any.

    `give` takes what comes for a request that is answered any number of times.
    """
    count, name = range(model.max_in_flight), signature.model
    calls = None if table is None else SequenceCalls(name, table)
    if not signature.decoupled:
        errands: ErrandMaker = Errand if calls is None else calls.errand
        return [Slot(pool, signature, model.forwarding, loop, errands) for _ in count]
    streams: StreamErrandMaker = partial(
        StreamErrand, model=name, loop=loop, silence=model.options.timeout
    )
    if calls is not None:
        streams = calls.streams(streams)
    return [StreamSlot(pool, signature, model.forwarding, loop, streams, give) for _ in count]
