"""One hostile use of the server, as a value: what is sent, how often, in which frames.

A case is small whatever it sends: contents are a text and a number of repetitions. Its `repr` is
Python that makes it again, so that a finding can be kept as a line of `benchmarks.hostile.found`.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

HTTP, GRPC = "http", "grpc"
WHOLE, CUT, HALF, ABORT = "whole", "cut", "half", "abort"


@dataclass(frozen=True, slots=True, repr=False)
class Change:
    """A departure from a valid request in one field.

    `field` is a path of names, such as `inputs.shape`; `kind` is one of those in
    `benchmarks.hostile.grammar`, where the meaning of `content` and `amount` is.
    """

    field: str
    kind: str
    content: str = ""
    amount: int = 1

    def __repr__(self) -> str:
        return _written(self)


@dataclass(frozen=True, slots=True, repr=False)
class Case:
    """Requests of one operation, alike, over one door.

    `route` is an index of the operation's HTTP routes. Each of `connections` sends `requests`: one
    behind the other without waiting over HTTP, on a stream each over gRPC, with `messages`
    messages. Writes have at most `write` bytes, with `pause` seconds between them; DATA frames and
    chunks `frame` bytes; 0 is no limit. `ending` is what follows the last byte: an answer is
    awaited (`whole`), the last bytes are kept back (`cut`), the sending side is closed (`half`), or
    the connection is (`abort`). Answers are read unless `unread`. The server
    lets clients load models if it is `explicit`.
    """

    door: str
    operation: str
    changes: tuple[Change, ...] = ()
    route: int = 0
    model: str = "mlp"
    connections: int = 1
    requests: int = 1
    messages: int = 1
    compression: str = ""
    write: int = 0
    pause: float = 0.0
    frame: int = 0
    ending: str = WHOLE
    unread: bool = False
    explicit: bool = False

    def __repr__(self) -> str:
        return _written(self)

    @property
    def title(self) -> str:
        """The operation, its door and the changed fields, as a table shows them."""
        changed = (
            ", ".join(f"{each.field} {each.kind}" for each in self.changes) or "as it should be"
        )
        return f"{self.operation} over {self.door}: {changed}"


def to_json(case: Case) -> str:
    """The case as JSON, for `from_json`."""
    return json.dumps(asdict(case))


def from_json(text: str) -> Case:
    """The case that `to_json` has written."""
    document = json.loads(text)
    changes = tuple(Change(**each) for each in document.pop("changes"))
    return Case(changes=changes, **document)


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one respect, the simplest first."""
    if len(case.changes) > 1:
        for index in range(len(case.changes)):
            yield replace(case, changes=case.changes[:index] + case.changes[index + 1 :])
    for each in fields(case):
        now = getattr(case, each.name)
        if each.default is MISSING or now == each.default or each.name in ("changes", "route"):
            continue
        yield _with(case, each.name, each.default)
        if isinstance(now, int) and now > 3:
            yield _with(case, each.name, now // 4)
            yield _with(case, each.name, now // 2)
    for index, change in enumerate(case.changes):
        if change.amount > 1:
            for amount in (1, change.amount // 8, change.amount // 2):
                if amount:
                    less = replace(change, amount=amount)
                    yield replace(
                        case, changes=(*case.changes[:index], less, *case.changes[index + 1 :])
                    )


def _with(case: Case, name: str, value: Any) -> Case:
    return replace(case, **{name: value})


def _written(value: Any) -> str:
    """A dataclass as a call of its constructor, without arguments that have their default."""
    given = [
        f"{each.name}={getattr(value, each.name)!r}"
        for each in fields(value)
        if each.default is MISSING or getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"
