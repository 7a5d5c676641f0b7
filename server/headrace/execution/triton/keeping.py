"""Having servers serve a model as it is wanted: loaded there, and loaded again when it is not.

For threads that may wait.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import monotonic
from typing import Protocol

from headrace.core.errors import LoadFailed
from headrace.execution.remote.connection import CallFailed, RemoteDescription, Visit
from headrace.execution.remote.options import Endpoint
from headrace.execution.triton.groups import agree, described
from headrace.execution.triton.uses import Uses
from headrace.execution.triton.visits import Visits
from headrace.wire.documents import to_json
from headrace.wire.pb.model_config_pb2 import ModelInstanceGroup
from headrace.wire.remote_status import Fate

log = logging.getLogger(__name__)

_ASK_SECS = 10.0
LOAD_SECS = 900.0  # that loading may take where nobody has set a limit
_AT_ONCE = 16  # servers that are asked at a time


class Keeper(Protocol):
    """Has servers serve one model; each method blocks."""

    def ensure(self, endpoint: Endpoint, seconds: float) -> None:
        """Have one server serve it as wanted; raises `LoadFailed`."""

    def release(self) -> None:
        """It is not needed any more."""


class RepositoryKeeper:
    """Has servers that others have started load a model, with the instance groups wanted.

    What else its configuration says is theirs. Empty `groups` are whatever the servers have.
    """

    def __init__(
        self,
        visits: Visits,
        groups: Sequence[ModelInstanceGroup],
        uses: Uses | None,
    ) -> None:
        """`uses` is None if the model stays loaded at the end."""
        self._visit = visits.to
        self._model = visits.options.model
        self._groups = list(groups)
        self._uses = uses
        self._lock = Lock()
        self._taken: set[Endpoint] = set()
        self._released = False

    def ensure(self, endpoint: Endpoint, seconds: float) -> None:
        """Have one server serve it as wanted; raises `LoadFailed`."""
        self._take(endpoint)
        with self._visit(endpoint) as connection:
            try:
                self._ensure(connection, endpoint, seconds)
            except CallFailed as failed:
                raise LoadFailed(f"{endpoint.name}: {failed.text}") from None
        if self._uses is not None and self._is_released():  # meanwhile
            self._uses.take((self._model, endpoint))
            self._give_back([endpoint])

    def release(self) -> None:
        """Have the servers unload it, if that is wanted and nobody here needs it any more."""
        with self._lock:
            self._released = True
            taken, self._taken = self._taken, set()
        self._give_back(taken)

    def _is_released(self) -> bool:
        with self._lock:
            return self._released

    def _give_back(self, taken: Iterable[Endpoint]) -> None:
        uses = self._uses
        if uses is None:
            return
        last = [endpoint for endpoint in taken if uses.give_back((self._model, endpoint))]
        for problem in each(last, self._unload):
            log.warning("model %s is not unloaded: %s", self._model, problem)

    def _take(self, endpoint: Endpoint) -> None:
        with self._lock:
            if self._released:
                raise LoadFailed("it is being unloaded")
            if self._uses is not None and endpoint not in self._taken:
                self._uses.take((self._model, endpoint))
                self._taken.add(endpoint)

    def _unload(self, endpoint: Endpoint) -> None:
        with self._visit(endpoint) as connection:
            try:
                connection.unload(_ASK_SECS)
            except CallFailed as failed:
                raise LoadFailed(f"{endpoint.name}: {failed.text}") from None

    def _ensure(self, connection: Visit, endpoint: Endpoint, seconds: float) -> None:
        deadline = monotonic() + seconds
        said = loaded(connection)
        if said is None:
            connection.load("", seconds)
            said = loaded(connection)
        config = None if said is None else said.config
        if config is None or agree(self._groups, config.instance_group):
            return
        log.info(
            "%s: model %s is loaded again with %s, in place of %s", endpoint.name, self._model,
            described(self._groups), described(config.instance_group),
        )  # fmt: skip
        config.ClearField("instance_group")
        config.instance_group.extend(self._groups)
        connection.load(json.dumps(to_json(config)), max(deadline - monotonic(), 1.0))


def load_everywhere(
    keeper: Keeper, model: str, endpoints: Sequence[Endpoint], deadline: float
) -> None:
    """Have all servers that can be reached serve a model; raises `LoadFailed` if none does.

    The others are asked again by health checks.
    """
    seconds = max(min(deadline - monotonic(), LOAD_SECS), 1.0)
    problems = each(endpoints, lambda endpoint: keeper.ensure(endpoint, seconds))
    if len(problems) < len(endpoints):
        for problem in problems:
            log.warning("model %s is not loaded by a server: %s", model, problem)
        return
    keeper.release()
    what = f"no server loads model '{model}'"
    raise LoadFailed(f"{what}: {'; '.join(map(str, problems))}", what)


def loaded(connection: Visit) -> RemoteDescription | None:
    """What a server says of a model that is loaded; None if it is not.

    Raises `CallFailed` if the server cannot be asked.
    """
    try:
        return connection.describe(_ASK_SECS)
    except CallFailed as failed:
        if failed.failure.fate in (Fate.UNSENT, Fate.UNCERTAIN, Fate.LATE):
            raise
        return None


def each(endpoints: Iterable[Endpoint], work: Callable[[Endpoint], None]) -> list[LoadFailed]:
    """Do something with several servers at once; what was raised."""

    def attempt(endpoint: Endpoint) -> LoadFailed | None:
        try:
            work(endpoint)
        except LoadFailed as error:
            return error
        return None

    found = list(endpoints)
    if not found:
        return []
    with ThreadPoolExecutor(min(len(found), _AT_ONCE), "remote") as pool:
        return [problem for problem in pool.map(attempt, found) if problem is not None]
