"""The clients of a front end that have quotas: their connections, and refusals of the engine.

The engine's process owns all buckets and counts. Where it has refused a client's requests until a
bucket has a token, the front end refuses further ones itself until then, before it decodes them.
Both processes read the same monotonic clock.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from time import monotonic
from typing import Any

from headrace.core.call import Call
from headrace.core.errors import QuotaExceeded
from headrace.core.identity import Identity
from headrace.core.quotas import Quota, Quotas, network_of
from headrace.engine.admission import Account
from headrace.engine.client_accounts import QuotaAccount, QuotaClients

_MOST = 4096  # refusals that are remembered
_Key = tuple[str, str, str]


class FrontEndClients(QuotaClients):
    """The quotas of connections, and refusals that are still valid."""

    def __init__(
        self, quotas: Quotas, refused: Counter[tuple[str, str]],
        before: QuotaClients | None = None, clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        super().__init__(quotas, refused, before, clock)
        self._refusals: dict[_Key, QuotaExceeded] = {}

    def account(self, connection: Account, identity: Identity, address: str, model: str) -> Account:
        """Implements `Clients.account`; also raises what the engine has refused."""
        if self._refusals:
            self._check(_key(identity, address, model))
        return super().account(connection, identity, address, model)

    def note(self, call: Call, error: QuotaExceeded) -> None:
        """Remember the engine's refusal of a call, as long as it is valid."""
        if error.until <= self._clock():
            return
        if len(self._refusals) >= _MOST:
            self._refusals.clear()
        address = "" if (payer := call.payer) is None else payer.origin
        self._refusals[_key(call.context.identity, address, call.model_name)] = error

    def _check(self, key: _Key) -> None:
        found = self._refusals.get(key)
        if found is None:
            return
        left = found.until - self._clock()
        if left <= 0:
            del self._refusals[key]
            return
        if (allowance := found.allowance) is not None:
            self._refused[allowance.quota, allowance.limit] += 1
        raise QuotaExceeded(str(found), max(ceil(left), 1), allowance, found.until)

    def _quotas_of(self, identity: Identity, address: str, model: str) -> Iterator[QuotaAccount]:
        found = super()._quotas_of(identity, address, model)
        return (one for one in found if one.quota.connections)


def _key(identity: Identity, address: str, model: str) -> _Key:
    return "" if identity.anonymous else identity.name, network_of(address), model


def quotas_document(quotas: Quotas | None) -> list[Mapping[str, Any]] | None:
    """Quotas for a front end as a JSON document: all other limits are the engine's."""
    if quotas is None:
        return None
    return [
        {"name": q.name, "of": q.of, "models": q.models, "connections": q.connections}
        for q in quotas.all
    ]


def read_document(document: Sequence[Mapping[str, Any]] | None) -> Quotas | None:
    """The quotas of `quotas_document`."""
    if document is None:
        return None
    return Quotas(tuple([
        Quota(q["name"], tuple(q["of"]), tuple(q["models"]), connections=q["connections"])
        for q in document
    ]))  # fmt: skip
