"""The interface between inboxes and brokers, and the table of brokers by the scheme of addresses.

All methods are called on the event loop, `fetch` and `hold` never at the same time. An error of a
broker is whatever its library raises: the caller logs it, opens the inbox or outbox again, and goes
on.
"""

from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from headrace.plugins.inboxes.ledger import Committable, Message


class InvalidInbox(Exception):
    """An inbox is declared wrongly, or needs a library that is not installed."""


class RecordRefused(Exception):
    """One of the records will never be taken as it is: it is too large, or no message there."""


class BrokerAddress(NamedTuple):
    """A place for messages: `scheme://[user:password@]hosts/name?options`."""

    scheme: str
    hosts: str  # with the user, as in the text
    name: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.scheme}://{self.hosts.rpartition('@')[2]}/{self.name}"  # without a password

    @property
    def server(self) -> str:
        """The broker's own address."""
        return f"{self.scheme}://{self.hosts}"


class Record(NamedTuple):
    """A message to publish."""

    key: bytes | None
    headers: Mapping[str, bytes]
    body: bytes


class Delivery(NamedTuple):
    """An outcome: the records for each outbox, and the message that they answer."""

    message: Message
    answers: Sequence[Record] = ()
    failure: Record | None = None


class Inbox(Protocol):
    """A source of messages: a consumer of a group."""

    async def open(self) -> None:
        """Connect and join the group."""

    async def fetch(self, most: int) -> Sequence[Message]:
        """Up to so many messages, `most` > 0; waits a fraction of a second for the first one."""

    async def hold(self, held: Sequence[Message]) -> None:
        """Stay in the group and keep the messages under way; called about once a second."""

    async def acknowledge(self, progress: Committable) -> None:
        """Commit delivered messages."""

    async def release(self, messages: Sequence[Message]) -> None:
        """Give messages back to the group, at the end."""

    async def lag(self) -> int:
        """Messages in the broker that no consumer of the group has taken yet."""

    async def close(self) -> None:
        """Commit what was acknowledged, and leave the group. Never raises."""


class Outbox(Protocol):
    """A destination of answers."""

    async def open(self) -> None:
        """Connect."""

    def publish(self, records: Sequence[tuple[str, Record]]) -> AsyncIterator[int]:
        """Publish records in this order, each with a name that is the same when it is repeated.

        Yields, perhaps several times, how many of the first ones the broker has acknowledged; in
        the end all of them. Raises `RecordRefused`; others may have been published then.
        """

    async def close(self) -> None:
        """Disconnect. Never raises."""


class Exactly(Protocol):
    """Delivers answers and commits their messages in one step, as of a transaction.

    Opened after its inbox, and after each time that this is opened.
    """

    async def open(self) -> None:
        """Connect."""

    async def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Publish and commit all of these, in this order, or nothing; raises `RecordRefused`."""

    async def close(self) -> None:
        """Disconnect. Never raises."""


class ConsumerOptions(NamedTuple):
    """Settings of a consumer beside its address."""

    in_flight: int  # the most messages at once
    name: str  # of this consumer in its group, "" for any
    lost: Callable[[Hashable], None]  # called for a source whose messages others get


class Broker(Protocol):
    """A broker's module.

    `exactly` delivers exactly once from an inbox to outboxes of the same broker; None if it cannot,
    for these addresses.
    """

    whole_order: bool  # True if `exactly` delivers the messages of a source in their order
    inbox_options: frozenset[str] | None  # of addresses; None: the library checks them
    outbox_options: frozenset[str] | None

    def inbox(self, address: BrokerAddress, options: ConsumerOptions) -> Inbox:
        """An inbox; raises `ImportError` without the library."""

    def outbox(self, address: BrokerAddress) -> Outbox:
        """An outbox; raises `ImportError` without the library."""

    def exactly(self, inbox: Inbox, to: BrokerAddress, failed: BrokerAddress) -> Exactly | None:
        """Exactly-once delivery between these addresses, or None."""


_MODULES = {
    "kafka": "kafka",
    "nats": "nats",
    "tls": "nats",
    "redis": "redis",
    "rediss": "redis",
    "amqp": "amqp",
    "amqps": "amqp",
}


def read_address(text: str, where: str) -> BrokerAddress:
    """Parse an address; `where` names it in the `InvalidInbox` that this raises."""
    parts = urlsplit(text)
    name = unquote(parts.path.strip("/"))
    if parts.scheme not in _MODULES:
        known = ", ".join(_MODULES)
        raise InvalidInbox(f"{where}: the scheme must be one of {known}, got {text!r}")
    if not parts.netloc.rpartition("@")[2] or not name:
        given = BrokerAddress(parts.scheme, parts.netloc, name, {})
        raise InvalidInbox(
            f"{where} must be {parts.scheme}://HOST:PORT/NAME?OPTIONS, where NAME is a topic,"
            f" subject, stream or queue; got '{given}'"
        )
    return BrokerAddress(parts.scheme, parts.netloc, name, dict(parse_qsl(parts.query)))


def broker_of(address: BrokerAddress, where: str) -> Broker:
    """The broker of an address, with its library; raises `InvalidInbox` without it."""
    extra = _MODULES[address.scheme]
    try:
        # Imported when needed: each library is an extra.
        module = import_module(f"headrace.plugins.inboxes.{extra}")
    except ImportError as error:
        raise InvalidInbox(
            f"{where}: {address.scheme}:// needs the library {error.name}: pip install"
            f" 'headrace[{extra}]'"
        ) from None
    broker: Broker = module.BROKER
    return broker


def check_options(address: BrokerAddress, known: frozenset[str] | None, where: str) -> None:
    """Raise `InvalidInbox` for an option of an address that is not known; None: all may be."""
    if known is not None and (wrong := [name for name in address.options if name not in known]):
        raise InvalidInbox(
            f"{where}: unknown option '{wrong[0]}', expected one of"
            f" {', '.join(sorted(known)) or 'none'}"
        )
