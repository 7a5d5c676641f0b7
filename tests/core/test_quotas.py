from random import Random

import pytest

from headrace.core.identity import ANYONE, EVERYTHING, Identity, Role
from headrace.core.quotas import Quota, Quotas, Rate, network_of

WEB = Identity("web", "key", [Role("scorer", EVERYTHING)])


def test_a_bucket_holds_its_burst_and_is_refilled() -> None:
    rate = Rate(10.0, 3.0)
    full_at = 0.0
    for _ in range(3):
        assert rate.wait(full_at, 100.0) == 0
        full_at = rate.take(full_at, 100.0)
    assert rate.wait(full_at, 100.0) == pytest.approx(0.1)
    assert rate.wait(full_at, 100.05) == pytest.approx(0.05)
    assert rate.wait(full_at, 100.11) == 0
    assert rate.window == 1
    assert Rate(2.0, 5.0).window == 3


def test_a_debt_is_paid_before_anything_is_admitted() -> None:
    rate = Rate(100.0, 100.0)
    full_at = rate.take(0.0, 7.0, 350)
    assert rate.wait(full_at, 7.0, 0) == pytest.approx(2.5)
    assert rate.wait(full_at, 9.6, 0) == 0


def test_buckets_like_a_counter_of_tokens() -> None:
    random = Random(27)
    for _ in range(200):
        rate = Rate(random.choice([0.5, 1, 7, 1000]), random.choice([1, 2, 50]))
        now, at, tokens, full_at = 1000.0, 1000.0, rate.burst, 0.0
        for _ in range(100):
            now += random.expovariate(rate.per_sec)
            tokens = min(tokens + (now - at) * rate.per_sec, rate.burst)
            at = now
            if abs(tokens - 1) > 1e-6:
                assert (rate.wait(full_at, now) == 0) is (tokens > 1)
            if tokens > 1 + 1e-6:
                tokens -= 1
                full_at = rate.take(full_at, now)


@pytest.mark.parametrize(("of", "web", "anyone"), [
    (("*",), True, True), (("web",), True, False), (("anonymous",), False, True),
    (("role:scorer",), True, False), (("role:anyone",), False, True), (("address",), True, True),
    (("other", "web"), True, False),
])  # fmt: skip
def test_whom_a_quota_is_for(of: tuple[str, ...], web: bool, anyone: bool) -> None:
    quota = Quota("q", of)
    assert (quota.is_for(WEB.answers_to), quota.is_for(ANYONE.answers_to)) == (web, anyone)


def test_of_quotas_for_the_same_models_the_first_applies() -> None:
    own, all_, text, address = (
        Quota("own", ("web",), weight=3),
        Quota("all", ("*",), weight=2),
        Quota("text", ("*",), ("text_*",)),
        Quota("address", ("address",)),
    )
    quotas = Quotas((own, all_, text, address))
    assert list(quotas.applying(WEB.answers_to, "text_a")) == [own, text, address]
    assert list(quotas.applying(ANYONE.answers_to, "digits")) == [all_, address]


def test_networks_of_addresses() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff%eth0")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert network_of("unix:1000") == "unix:1000"
    assert network_of("not:an:address") == "not:an:address"
