"""Models that run other models: they load, change and leave in agreement with those.

The models that a model runs are loaded before it, and their signatures are checked against what it
passes between them. Later, a change of one of them is checked against the models that run it before
it serves. A model that lacks one of them is unloaded, and loaded again once they are all there.

Owned by the event-loop thread. Invariants: `_users` has the models that run others as they serve,
`_waiting` those that could not be loaded, or had to leave, since another one was not there or did
not fit. None runs itself, however indirectly.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from headrace.core.errors import Contradiction, LoadFailed, RepositoryError, ServerError
from headrace.core.model_spec import Used
from headrace.core.signature import Signature
from headrace.engine.loading import Change, LoadedVersion
from headrace.engine.model import Model
from headrace.engine.opening import Opened
from headrace.repository.layout import ModelSource

log = logging.getLogger(__name__)

Results = Mapping[int, LoadedVersion | Change | str]  # of loading the versions of a model
Fetch = Callable[[str, str], Awaitable[None]]


async def _fetch_nothing(name: str, user: str) -> None:
    """Fetch for servers whose models are all loaded from the start."""


class Composition:
    """The models that run others. `fetch` loads a model, if it may, for another one, which waits;
    raises `ServerError`. `offers` tells if an absent model is loaded when it is asked for.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        load: Callable[[ModelSource], Awaitable[object]],
        unload: Callable[[str, str], object],
    ) -> None:
        """`load` starts a load, `unload` unloads a model for a reason."""
        self.fetch: Fetch = _fetch_nothing
        self.offers: Callable[[str], bool] = lambda name: False
        self._models = models
        self._load = load
        self._unload = unload
        self._users: dict[str, Opened] = {}
        self._waiting: dict[str, Opened] = {}
        self._loading: dict[str, Opened] = {}  # to be in `_users` once they serve
        self._refused: dict[str, ModelSource] = {}  # changes that models which run it objected to
        self._fetched: set[str] = set()  # loaded for others, and by no command

    async def completed(self, opened: Opened) -> Opened:
        """Load the models that a model runs; returns it with their signatures.

        Raises `RepositoryError` for one that is missing, does not fit, or runs this one.
        """
        user = opened.source.name
        self._loading[user] = opened
        self._waiting.pop(user, None)
        try:
            names = _names(opened)
            for name in names:
                if way := self._way(name, user):
                    raise LoadFailed(f"model '{user}' runs itself: {' -> '.join([user, *way])}")
            await asyncio.gather(*(self._bring(name, user) for name in names))
            if problem := self._missing(opened):
                raise LoadFailed(problem)
            try:
                found = self._fitted(opened)
            except RepositoryError:
                again = [self._refused.pop(name) for name in names if name in self._refused]
                if not again:
                    raise
                # They may have been changed for this one, which objects to nothing meanwhile.
                await asyncio.gather(*map(self._load, again))
                found = self._fitted(opened)
            self._loading[user] = found
            return found
        except BaseException as error:
            self._loading.pop(user, None)
            if isinstance(error, RepositoryError):
                self._waiting[user] = opened  # for a change of one that it runs
            raise

    def objection(self, name: str, results: Results) -> str:
        """The reason why loaded versions must not replace those of a model; "" for none.

        A model that runs it, and is being loaded anew itself, will be checked then.
        """
        for user in self._users_of(name):
            model, opened = self._models[user], self._users[user]
            if model.loading is not None or not model.ready_versions():
                continue
            found = dict(opened.used)
            for one in opened.uses:
                if one[0] != name:
                    continue
                signature = self._next_signature(one, results)
                if signature is None:
                    return f"{lacks(user, one)}, if this were loaded"
                found[one] = signature
            try:
                with_signatures(opened, found)
            except RepositoryError as error:
                return f"model '{user}', which runs it, would not go with it: {error}"
            if any(_kind(found[one]) != _kind(opened.used[one]) for one in opened.uses):
                return (
                    f"model '{user}' runs it and relies on whether it batches, and whether it is"
                    " decoupled, which is different now: unload that model first"
                )
        return ""

    def refuse(self, source: ModelSource) -> None:
        """Keep a change that was objected to, for when those that run the model change, too."""
        self._refused[source.name] = source

    def follow(self, model: Model) -> None:
        """Unload models that lack versions of this one, and load those that waited for it."""
        name = model.name
        self._refused.pop(name, None)
        if model.unloaded:
            self._users.pop(name, None)
            self._waiting.pop(name, None)
            self._fetched.discard(name)
        elif (opened := self._loading.pop(name, None)) is not None and model.newest() is not None:
            self._users[name] = opened
        for user in self._users_of(name):
            opened = self._users[user]
            if self._models[user].loading is None and (problem := self._missing(opened)):
                log.warning("unloading %s: %s", user, problem, extra={"model": user})
                self._unload(user, problem)
                self._waiting[user] = opened
        for user, opened in list(self._waiting.items()):
            if name in _names(opened) and not self._missing(opened):
                del self._waiting[user]
                self._load(self._models[user].source)

    def fetched_for(self, user: str) -> list[str]:
        """The models loaded for this one that no other one runs, and nobody has asked for."""
        opened = self._users.get(user)
        if opened is None:
            return []
        return [n for n in _names(opened) if n in self._fetched and self._users_of(n) == [user]]

    def asked_for(self, name: str) -> None:
        """Note that a model is wanted for its own sake."""
        self._fetched.discard(name)

    def waves(self, names: Iterable[str]) -> Iterator[set[str]]:
        """The models in the order in which they may leave: none before those that run it."""
        left = set(names)
        while left:
            used = {n for user in left if user in self._users for n in _names(self._users[user])}
            wave = (left - used) or left
            yield wave
            left -= wave

    def _users_of(self, name: str) -> list[str]:
        return [user for user, opened in self._users.items() if name in _names(opened)]

    def _way(self, name: str, user: str) -> list[str]:
        """The chain of models from one to the other, each of which runs the next; [] if none."""
        if name == user:
            return [name]
        model = self._models.get(name)
        loads = model is not None and model.loading is not None
        opened = (self._loading.get(name) if loads else None) or self._users.get(name)
        # Terminates, since no model ever runs itself.
        ways = (self._way(one, user) for one in (_names(opened) if opened is not None else ()))
        return next(([name, *way] for way in ways if way), [])

    async def _bring(self, name: str, user: str) -> None:
        """Wait for a model that is being loaded, or load it; raises `LoadFailed`."""
        while (model := self._models.get(name)) is not None and model.loading is not None:
            await asyncio.wait({model.loading.wait()})
        if model is not None and model.newest() is not None:
            return
        try:
            await self.fetch(name, user)
            self._fetched.add(name)
        except ServerError as error:
            model = self._models.get(name)
            if model is None or model.source.problem:
                raise LoadFailed(f"{lacks(user, (name, ''))}: {error}") from error

    def _fitted(self, opened: Opened) -> Opened:
        """The model with the present signatures of those that it runs; raises `RepositoryError`."""
        return with_signatures(opened, {one: self._signature(*one) for one in opened.uses})

    def _missing(self, opened: Opened) -> str:
        """The model that a model runs and that is not there, in words; "" if all are."""
        for one in opened.uses:
            if self._signature_if_ready(one) is None and not self.offers(one[0]):
                model = self._models.get(one[0])
                why = "" if model is None else model.why("")
                return lacks(opened.source.name, one) + (f": {why}" if why else "")
        return ""

    def _signature(self, name: str, version: str) -> Signature:
        found = self._signature_if_ready((name, version))
        if found is None:
            raise LoadFailed(f"model '{name}' has left before it could be used")
        return found

    def _signature_if_ready(self, used: Used) -> Signature | None:
        name, version = used
        model = self._models.get(name)
        if model is None:
            return None
        found = model.versions.get(int(version)) if version else model.newest()
        return found.chain.signature if found is not None and found.ready else None

    def _next_signature(self, used: Used, results: Results) -> Signature | None:
        """The signature of what will serve once loaded versions have replaced those before."""
        good = [number for number, result in results.items() if not isinstance(result, str)]
        number = int(used[1]) if used[1] else max(good, default=0)
        result = results.get(number)
        if isinstance(result, LoadedVersion):
            return result.signature
        if isinstance(result, Change):
            return self._signature_if_ready((used[0], str(number)))
        return None


def with_signatures(opened: Opened, used: Mapping[Used, Signature]) -> Opened:
    """The model with the signatures of those that it runs; raises `InvalidConfig` for misfits."""
    opened = replace(opened, used=used)
    with opened.options_explained():
        if problems := list(opened.backend.use_problems(opened.config, used)):
            raise Contradiction(problems)
    return opened


def _names(opened: Opened) -> Collection[str]:
    return dict.fromkeys(name for name, _ in opened.uses)


def _kind(signature: Signature) -> tuple[bool, bool]:
    return signature.batches, signature.decoupled


def lacks(user: str, used: Used) -> str:
    """The reason why a model cannot be loaded without another one, in Triton's words."""
    name, version = used
    what = f"whose required version {version} is not loaded" if version else (
        "which has no loaded version"
    )  # fmt: skip
    return f"ensemble '{user}' depends on '{name}' {what}"
