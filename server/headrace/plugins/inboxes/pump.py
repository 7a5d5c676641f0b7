"""One inbox at work: its broker's messages through the engine, and their outcomes to outboxes.

Three tasks: one fetches and submits, as long as there is room in the inbox, in the account and in
the model; one delivers, everything that is ready at once; one asks for the lag. Neither stops for
an error of a broker: it is logged, and tried again. `Ledger` decides what is delivered when, and
`Dispatch` does it.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Hashable
from time import monotonic
from typing import Any

from headrace.api.gate import Gate
from headrace.core.call import Computed, InferResponse
from headrace.core.errors import (
    AlreadyExists,
    ExecutionFailed,
    InvalidRequest,
    NotFound,
    Quarantined,
    RemoteUnavailable,
    Restricted,
    ServerError,
    Unavailable,
    Unsupported,
)
from headrace.core.identity import ANYONE
from headrace.doors.door import DoorCall
from headrace.engine.admission import Account
from headrace.engine.entrance import Direct, Entrance
from headrace.observability.statistics import AnswerCounters, Family
from headrace.plugins.inboxes.bodies import (
    Encode,
    Most,
    answer,
    decode,
    form_of,
    plain_answer,
    slow,
    v2_encoder,
)
from headrace.plugins.inboxes.broker import ConsumerOptions, Record, broker_of, check_options
from headrace.plugins.inboxes.config import InboxConfig
from headrace.plugins.inboxes.dispatch import Dispatch
from headrace.plugins.inboxes.ledger import Taken
from headrace.protocol.plain_json import PlainJson
from headrace.protocol.status import INTERNAL_TEXT
from headrace.protocol.v2_json import JSON_SIZE, ResponseForm

log = logging.getLogger(__name__)

DOOR = "inboxes"
_HOLD_SECS = 1.0
_LAG_SECS = 5.0
_ABSENT_SECS = 0.2  # between looks for a model that is not there
_FIRST_WAIT, _MOST_WAIT = 0.1, 5.0  # seconds until a broker is tried again
_MOST_DELIVERED = 4096  # messages at once
_MOST_SUBMITTED = 64  # messages in one turn of the event loop
_ENCODE = v2_encoder(ResponseForm())
# Errors that the same message would meet again.
_FINAL = (InvalidRequest, Unsupported, Restricted, Quarantined, AlreadyExists)


class InboxCall(DoorCall):
    """One message on its way through the engine."""

    door = DOOR.upper()

    def __init__(self, pump: "Pump", entry: Taken) -> None:
        super().__init__(pump.account, pump.answers, pump.gate)
        self.pump = pump
        self.entry = entry
        self.records: list[Record] = []
        self.error: ServerError | None = None
        self.encode: Encode = _ENCODE
        self.json: PlainJson | None = None  # decoded the body, and may encode the answer

    def header(self, name: str) -> str:
        """Implements `Call.header`."""
        return self.entry.message.headers.get(name, b"").decode("latin-1")

    def write(self, response: InferResponse) -> None:
        """Implements `DoorCall.write`."""
        self.records.append(answer(self.entry.message, response, self.encode))

    def write_error(self, error: ServerError) -> None:
        """Implements `DoorCall.write_error`."""
        self.error = error

    def start_plain(self, found: Any) -> bool:
        """Submit plain V2 JSON to what is known of the model; False if one of them is not so.

        The fast path, as for requests over HTTP; raises `ServerError`.
        """
        direct: Direct | None = found.direct if found is not None and found.ready else None
        message, config = self.entry.message, self.pump.config
        if direct is None or JSON_SIZE in message.headers:
            return False
        json = direct.codecs.get(PlainJson) or direct.codec(PlainJson)
        if (plain := json.decode(message.body)) is None:
            return False
        self.charge_to(ANYONE, config.model, len(message.body))
        request_id, inputs, self.rows = plain
        self.ask(config.model, config.version, request_id, inputs, nbytes=self.nbytes)
        self.json = json
        self.account.take_rows(self.rows)
        direct.submit(self)
        return True

    def respond_from(self, batch: Computed) -> None:
        """Implements `Call.respond_from`: plain calls of all doors share what is encoded."""
        if (json := self.json) is not None:
            encoded = batch.encoded.get(json)  # rows, and bodies with heads of HTTP
            if encoded is None:
                encoded = batch.encoded[json] = json.write(batch.tensors, len(batch.calls)), ()
            if texts := encoded[0]:
                body = json.encode(self.id, texts, self.first, self.rows)
                self.records.append(plain_answer(self.entry.message, body))
                self.finish()
                return
        super().respond_from(batch)

    def respond(self, response: InferResponse, final: bool) -> None:
        """Implements `Call.respond`."""
        super().respond(response, final)
        if final and self.error is None:
            self.pump.answered(self)

    def finish(self) -> None:
        """Implements `Call.finish`."""
        super().finish()
        self.pump.answered(self)

    def fail(self, error: ServerError) -> None:
        """Implements `Call.fail`."""
        super().fail(error)
        self.pump.failed(self, error)


class Pump:
    """One inbox of a process. Owned by the event loop."""

    def __init__(
        self, engine: Entrance, config: InboxConfig, account: Account, answers: AnswerCounters,
        where: str,
    ) -> None:  # fmt: skip
        """`where` names the inbox in the `InvalidInbox` that this raises."""
        self.config = config
        self.account = account
        self.answers = answers
        self.gate = Gate()  # which is open: the operator declares whose messages are taken
        self.lag: int | None = None
        self.retries = 0
        self.troubles: Counter[str] = Counter()
        self._engine = engine
        self._key = config.model, config.version
        self._draining = False
        self._stirred = asyncio.Event()  # something may be submitted or fetched
        self._ready = asyncio.Event()  # something may be delivered
        self._pending: deque[Taken] = deque()
        broker = broker_of(config.source, f"{where}: 'from'")
        check_options(config.source, broker.inbox_options, f"{where}: 'from'")
        options = ConsumerOptions(config.in_flight, config.name, self._lost)
        self._inbox = broker.inbox(config.source, options)
        self.dispatch = Dispatch(config, self._inbox, self._trouble, where)
        self._ledger = self.dispatch.ledger

    def __str__(self) -> str:
        return f"inbox {self.config.source}"

    @property
    def in_flight(self) -> int:
        """Messages that were taken and are not delivered."""
        return len(self._ledger)

    @property
    def oldest_secs(self) -> float:
        """The age of the first message in flight, in seconds since it was taken."""
        taken = self._ledger.oldest()
        return 0.0 if taken is None else monotonic() - taken

    async def run(self) -> None:
        """Work until `drain`, and then until all messages taken are delivered."""
        await self._open()
        asking = asyncio.ensure_future(self._ask_lag())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._fetch())
                tasks.create_task(self._deliver())
        finally:
            asking.cancel()

    def drain(self) -> None:
        """Fetch nothing more, and end `run` when what was taken is delivered."""
        self._draining = True
        self._stir()

    async def close(self) -> None:
        """Leave the group and disconnect; what was not delivered is for other consumers."""
        await self.dispatch.close()
        await self._inbox.close()

    # --- outcomes

    def answered(self, call: InboxCall) -> None:
        """Note the answers of a call."""
        self._ledger.answered(call.entry, tuple(call.records))
        self._stir()

    def failed(self, call: InboxCall, error: ServerError) -> None:
        """Note a call's error: a try in vain, unless its model was not available."""
        now, entry = monotonic(), call.entry
        absent = isinstance(error, (Unavailable, NotFound)) and not call.started
        if absent or isinstance(error, RemoteUnavailable):
            self._ledger.postpone(entry, now)
        else:
            final = isinstance(error, _FINAL)
            if not self._ledger.failed(entry, type(error).__name__, str(error), final, now):
                self.retries += 1
        self._stir()

    def _lost(self, source: Hashable) -> None:
        self._ledger.forget(source)
        self._stir()

    def _stir(self) -> None:
        self._stirred.set()
        self._ready.set()

    # --- from the broker to the engine

    async def _fetch(self) -> None:
        ledger, most, held = self._ledger, self.config.in_flight, monotonic()
        while True:
            self._stirred.clear()
            now = monotonic()
            self._pending.extend(ledger.due(now))
            await self._submit()
            if self._draining:
                await self._guarded(self._inbox.release(ledger.drop_waiting()))
                self._ready.set()
                if not len(ledger):
                    return
            if now - held >= _HOLD_SECS:
                held = now
                await self._guarded(self._inbox.hold(list(ledger)))
            # Few messages at a time would cost as much as many.
            full = len(ledger) > most * 3 // 4
            absent = not (full or self._available())
            if self._draining or self._pending or full or absent:
                await self._wait(_ABSENT_SECS if absent else _HOLD_SECS)
                continue
            try:
                fetched = await self._inbox.fetch(most - len(ledger))
            except Exception as error:
                self._trouble("cannot fetch messages", error)
                await self._inbox.close()
                await self._open()
                continue
            for message in fetched:
                if (entry := ledger.take(message, monotonic())) is not None:
                    self._pending.append(entry)
                else:
                    self._ready.set()  # it may be a failure

    async def _submit(self) -> None:
        """Submit what is pending, as far as there is room in the account."""
        submitted = 0
        while self._pending and not self.account.full(len(self._pending[0].message.body)):
            entry = self._pending.popleft()
            if not entry.forgotten:
                await self._run(entry)
            submitted += 1
            if submitted % _MOST_SUBMITTED == 0:
                await asyncio.sleep(0)  # other doors have a turn

    async def _run(self, entry: Taken) -> None:
        """Submit one message, once it is decoded if that takes long."""
        config, message = self.config, entry.message
        call, form = InboxCall(self, entry), form_of(message, config.body)
        try:
            if form == "v2" and call.start_plain(self._engine.known.get(self._key)):
                return
            server, found = self.account.server, None
            most = Most(server.max_request_bytes, server.max_object_bytes)
            target = self._engine.find(config.model, config.version)
            if slow(message, form, target):
                found = await asyncio.to_thread(decode, message, form, target, most)
            decoded = found or decode(message, form, target, most)
            call.encode = decoded.encode
            call.start(
                self._engine, config.model, len(message.body), lambda _: decoded.call,
                config.version,
            )  # fmt: skip
        except ServerError as error:
            call.fail(error)
        except Exception:
            log.exception("bug in a message of %s", self)
            call.fail(ExecutionFailed(INTERNAL_TEXT))

    def _available(self) -> bool:
        try:
            self._engine.find(self.config.model, self.config.version)
        except (Unavailable, NotFound):
            return False
        return True

    async def _wait(self, seconds: float) -> None:
        """Wait for a change, or the time at which something is due."""
        due = self._ledger.next_due()
        seconds = min(seconds, _HOLD_SECS if due is None else max(due - monotonic(), 0.0))
        if self._pending:
            self.account.server.when_next_changed(self._stirred.set)
        try:
            async with asyncio.timeout(seconds):
                await self._stirred.wait()
        except TimeoutError:
            pass

    # --- from the engine to the outboxes

    async def _deliver(self) -> None:
        ledger = self._ledger
        while True:
            self._ready.clear()
            entries = ledger.deliverable()
            for first in range(0, len(entries), _MOST_DELIVERED):
                await self.dispatch.send(entries[first : first + _MOST_DELIVERED])
            if entries:
                self._stirred.set()
            elif self._draining and not len(ledger):
                return
            else:
                await self._ready.wait()

    # --- the broker

    async def _open(self) -> None:
        """Open the inbox and the outboxes, however often it takes."""
        wait = _FIRST_WAIT
        while not self._draining:
            try:
                await self._inbox.open()
                await self.dispatch.open()
                return
            except Exception as error:
                self._trouble("cannot connect", error)
                await self._inbox.close()
                await asyncio.sleep(wait)
                wait = min(2 * wait, _MOST_WAIT)

    async def _ask_lag(self) -> None:
        while True:
            try:
                self.lag = await self._inbox.lag()
            except Exception as error:
                self.lag = None
                self._trouble("cannot ask for the lag", error)
            await asyncio.sleep(_LAG_SECS)

    async def _guarded(self, doing: Awaitable[None]) -> None:
        try:
            await doing
        except Exception as error:
            self._trouble("cannot keep messages", error)

    def _trouble(self, what: str, error: Exception) -> None:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        kind = type(error).__name__
        log.warning("%s: %s: %s: %s", self, what, kind, error)
        log.debug("%s: where it failed", self, exc_info=error)
        self.troubles[kind] += 1


FAMILIES: tuple[Family[Pump], ...] = (
    Family("headrace_inbox_lag", "gauge", lambda p: p.lag,
           "Messages at the broker that the inbox's group has not taken"),
    Family("headrace_inbox_in_flight", "gauge", lambda p: p.in_flight,
           "Messages taken, and not delivered yet"),
    Family("headrace_inbox_oldest_seconds", "gauge", lambda p: p.oldest_secs,
           "Seconds since the first message in flight was taken"),
    Family("headrace_inbox_delivered_total", "counter", lambda p: p.dispatch.delivered,
           "Messages whose outcome, an answer or a failure, was delivered"),
    Family("headrace_inbox_retries_total", "counter", lambda p: p.retries,
           "Failed tries of messages that are tried again"),
    Family("headrace_inbox_failures_total", "counter", lambda p: p.dispatch.failures,
           "Messages that went to the outbox for failures", ("reason",)),
    Family("headrace_inbox_broker_errors_total", "counter", lambda p: p.troubles,
           "Errors of the broker, after which it is tried again", ("error",)),
)  # fmt: skip
