"""Outcomes of one inbox to its outboxes, and acknowledgements of their messages to its broker.

A group at a time, in order: with transactions a group is one; without, messages are acknowledged as
soon as the outbox has acknowledged their answers and those before them, so that few are delivered
again when something ends in the middle. An error of a broker is told, and what is not delivered yet
is tried again for as long as it takes. A group with a record that its broker refuses is divided
until that one is alone, and becomes a failure.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from headrace.plugins.inboxes.bodies import failure
from headrace.plugins.inboxes.broker import (
    BrokerAddress,
    Delivery,
    Exactly,
    Inbox,
    InvalidInbox,
    Outbox,
    Record,
    RecordRefused,
    broker_of,
    check_options,
)
from headrace.plugins.inboxes.config import InboxConfig
from headrace.plugins.inboxes.ledger import Committable, GivenUp, Ledger, Taken

log = logging.getLogger(__name__)

_FIRST_WAIT, _MOST_WAIT = 0.1, 5.0  # seconds until a broker is tried again
_ACKNOWLEDGE_TRIES = 5


class Dispatch:
    """Delivery of one inbox. Owned by the event loop, and by one task of it."""

    def __init__(
        self, config: InboxConfig, inbox: Inbox, trouble: Callable[[str, Exception], None],
        where: str,
    ) -> None:  # fmt: skip
        """`where` names the inbox in the `InvalidInbox` that this raises."""
        self.delivered = 0
        self.failures: Counter[str] = Counter()
        self._source = config.source
        self._inbox = inbox
        self._trouble = trouble
        broker = broker_of(config.source, f"{where}: 'from'")
        self._exactly: Exactly | None = None
        if config.exactly_once is not False:
            self._exactly = broker.exactly(inbox, config.to, config.failed)
        if config.exactly_once and self._exactly is None:
            raise InvalidInbox(
                f"{where}: 'exactly_once' needs 'from', 'to' and 'failed' at one broker that can,"
                " which are kafka and redis"
            )
        to, failed = (
            _outbox(address, f"{where}: '{name}'", made=self._exactly is None)
            for name, address in (("to", config.to), ("failed", config.failed))
        )
        self._to, self._failed = to, failed
        self.ledger = Ledger(
            config.tries, config.retry_secs, config.deliveries,
            whole=self._exactly is not None and broker.whole_order,
        )  # fmt: skip

    async def open(self) -> None:
        """Connect, or connect again, to the outboxes."""
        for each in self._places():
            await each.close()
            await each.open()

    async def close(self) -> None:
        """Disconnect."""
        for each in self._places():
            await each.close()

    async def send(self, entries: Sequence[Taken]) -> None:
        """Deliver outcomes and acknowledge their messages, however often it takes."""
        wait, again = _FIRST_WAIT, False
        groups = [entries]  # the last one is next
        while groups:
            group = [each for each in groups.pop() if not (each.forgotten or each.delivered)]
            if not group:
                continue
            try:
                if again:
                    await self.open()
                    again = False
                await self._deliver(group)
                wait = _FIRST_WAIT
            except Exception as error:
                if isinstance(error, RecordRefused) and (parts := _instead(group, str(error))):
                    groups += parts
                    continue
                self._trouble("cannot deliver answers", error)
                again = True
                groups.append(group)
                await asyncio.sleep(wait)
                wait = min(2 * wait, _MOST_WAIT)

    async def _deliver(self, entries: Sequence[Taken]) -> None:
        if self._exactly is None:
            await self._publish(entries)
        else:
            await self._exactly.deliver([_delivery(entry) for entry in entries])
            self._settle(entries)

    async def _publish(self, entries: Sequence[Taken]) -> None:
        """Publish what belongs to messages, and acknowledge those of which all is published."""
        failures, answers = list[tuple[str, Record]](), list[tuple[str, Record]]()
        owners = list[int]()  # of answers: the places of their entries
        group = self._source.options.get("group", "")  # others answer the same messages
        for at, entry in enumerate(entries):
            message, records, failed = _delivery(entry)
            name = f"{self._source.name}:{group}:{message.source}:{message.position}"
            answers += [(f"{name}:{number}", record) for number, record in enumerate(records)]
            owners += [at] * len(records)
            if failed is not None:
                failures.append((name, failed))
        if failures and self._failed is not None:
            async for _ in self._failed.publish(failures):
                pass
        done = 0
        if answers and self._to is not None:
            async for count in self._to.publish(answers):
                whole = owners[count] if count < len(owners) else len(entries)
                await self._acknowledge(self._settle(entries[done:whole]))
                done = whole
        await self._acknowledge(self._settle(entries[done:]))

    def _settle(self, entries: Sequence[Taken]) -> Committable:
        """Note that outcomes were delivered; returns what may be committed by that."""
        for entry in entries:
            if isinstance(entry.outcome, GivenUp) and not entry.forgotten:
                failed = entry.outcome
                self.failures[failed.kind] += 1
                log.warning(
                    "inbox %s: message %s failed after %d tries: %s", self._source,
                    entry.message.position, failed.tries, failed.reason,
                )  # fmt: skip
        progress = self.ledger.delivered(entries)
        self.delivered += len(progress.each)
        return progress

    async def _acknowledge(self, progress: Committable) -> None:
        wait = _FIRST_WAIT
        for _ in range(_ACKNOWLEDGE_TRIES if progress.each else 0):
            try:
                await self._inbox.acknowledge(progress)
                return
            except Exception as error:
                self._trouble("cannot commit messages, which may be delivered again", error)
                await asyncio.sleep(wait)
                wait *= 2

    def _places(self) -> list[Outbox | Exactly]:
        return [each for each in (self._to, self._failed, self._exactly) if each is not None]


def _outbox(address: BrokerAddress, where: str, made: bool) -> Outbox | None:
    """An outbox, if one is `made`; raises `InvalidInbox` for an address that is wrong anyhow."""
    broker = broker_of(address, where)
    check_options(address, broker.outbox_options, where)
    return broker.outbox(address) if made else None


def _instead(group: Sequence[Taken], reason: str) -> list[Sequence[Taken]]:
    """The groups, last one first, for one with a record that is refused; none: nothing helps.

    Halves, or a failure for an answer, which for a failure is sent without its message.
    """
    if len(group) > 1:
        middle = len(group) // 2
        return [group[middle:], group[:middle]]
    [entry] = group
    if not isinstance(entry.outcome, GivenUp):
        entry.tries += 1
        entry.outcome = GivenUp("AnswerRefused", reason, entry.tries)
    elif not entry.outcome.bare:
        entry.outcome = entry.outcome._replace(bare=True)
    else:
        return []
    return [group]


def _delivery(entry: Taken) -> Delivery:
    message = entry.message
    if isinstance(entry.outcome, GivenUp):
        return Delivery(message, (), failure(message, entry.outcome))
    return Delivery(message, entry.outcome)
