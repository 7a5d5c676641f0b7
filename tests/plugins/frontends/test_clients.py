"""Quotas in a front end, and at the engine's end of its link."""

from collections import Counter

import pytest

from headrace.core.call import Call
from headrace.core.errors import Allowance, QuotaExceeded
from headrace.core.identity import ANYONE
from headrace.core.limits import Payer
from headrace.core.quotas import Quota, Quotas
from headrace.engine.admission import Admission
from headrace.plugins.frontends.clients import (
    FrontEndClients,
    quotas_document,
    read_document,
)
from headrace.plugins.frontends.link_infer import error_parts, read_error
from headrace.plugins.frontends.session import RemotePayer

ALLOWANCE = Allowance("q", "requests_per_sec", "requests", 5, 1)
QUOTAS = Quotas((Quota("q", ("*",), requests_per_sec=5), Quota("a", ("address",), connections=1)))


class Asked(Call):
    """A call of a client at an address."""

    @property
    def payer(self) -> Payer:
        return RemotePayer("192.0.2.1")


def test_a_refusal_of_the_engine_is_repeated_until_it_ends() -> None:
    now = 100.0
    admission = Admission(0, 0)
    kept = read_document(quotas_document(QUOTAS))
    assert kept is not None
    clients = FrontEndClients(kept, admission.quota_refused, None, lambda: now)
    admission.limit_clients(clients)
    connection = admission.connect("http", "192.0.2.1")
    with pytest.raises(QuotaExceeded):  # quotas of connections are applied here
        admission.connect("http", "192.0.2.1")
    assert connection.of(ANYONE, "m") is not connection
    error = QuotaExceeded("slowly", 3, ALLOWANCE, 102.5)
    clients.note(Asked("m", "", "", {}), error)
    now = 101.2
    with pytest.raises(QuotaExceeded, match="slowly") as raised:
        connection.of(ANYONE, "m")
    assert raised.value.retry_after == 2
    assert admission.quota_refused == Counter({
        ("a", "connections"): 1, ("q", "requests_per_sec"): 1
    })  # fmt: skip
    connection.of(ANYONE, "other")
    now = 102.6
    connection.of(ANYONE, "m")
    clients.note(Asked("m", "", "", {}), error)  # too late
    connection.of(ANYONE, "m")
    assert read_document(quotas_document(None)) is None


def test_errors_on_the_link() -> None:
    error = QuotaExceeded("slowly", 3, ALLOWANCE, 102.5)
    found, version = read_error(*error_parts(error, "7"))
    assert isinstance(found, QuotaExceeded)
    assert (str(found), version) == ("slowly", "7")
    assert (found.retry_after, found.allowance, found.until) == (3, ALLOWANCE, 102.5)
