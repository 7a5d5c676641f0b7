"""Keys of issuers: which of them count, and how they are fetched, over real HTTP."""

import logging
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headrace.plugins.access.issuers import (
    InvalidKeys,
    KeySet,
    KeySource,
    RemoteKeys,
    fetch_keys,
    problem_of,
)
from tests.support.issuer import TokenIssuer, private_key, public, served
from tests.support.scrape import until

TLS = Path(__file__).parents[2] / "support" / "tls"


def source(issuer: TokenIssuer, **changes: Any) -> KeySource:
    return KeySource(issuer.name, ("ES256",), **changes)


# --- sets of keys


def test_keys_are_for_their_algorithms_alone() -> None:
    document = TokenIssuer(one="ES256", two="RS256", three="ES384").document
    keys = KeySet(document, ["RS256", "ES256", "PS256"])
    assert keys.find("one", "ES256") is not None
    assert keys.find("two", "RS256") is not None
    for name, algorithm in (("one", "RS256"), ("two", "PS256"), ("three", "ES384"), ("x", "ES256")):
        assert keys.find(name, algorithm) is None


def test_a_key_that_names_no_algorithm_is_for_all_of_its_type() -> None:
    document = public(private_key("RS256"), "one", "RS256")
    del document["alg"]
    keys = KeySet({"keys": [document]}, ["RS256", "PS512", "ES256"])
    assert keys.find("one", "RS256") is not None
    assert keys.find("one", "PS512") is not None
    assert keys.find("one", "ES256") is None


@pytest.mark.parametrize("changes", [
    {"use": "enc"}, {"alg": "ES384"}, {"kty": "oct", "k": "AAAA"}, {"crv": "P-384"}, {"kty": 5},
])  # fmt: skip
def test_keys_for_something_else(changes: dict[str, Any]) -> None:
    document = public(private_key("ES256"), "one", "ES256") | changes
    with pytest.raises(InvalidKeys, match="it has no key for ES256"):
        KeySet({"keys": [document, 5, None]}, ["ES256"])


def test_short_keys_do_not_count() -> None:
    document = public(private_key("RS256", 1024), "one", "RS256")
    with pytest.raises(InvalidKeys, match="it has no key for RS256"):
        KeySet({"keys": [document]}, ["RS256"])


@pytest.mark.parametrize("url", [
    "https://a.example", "https://a.example:1/b?c", "http://localhost/", "http://127.0.0.1:80/k",
    "http://[::1]:80/k",
])  # fmt: skip
def test_urls_of_keys(url: str) -> None:
    assert problem_of(url) == ""


@pytest.mark.parametrize("url", [
    "http://a.example", "http://127.0.0.1.example", "file:///etc/passwd", "https:///k", "a.example",
    "https://user:pass@a.example", "https://user@a.example", "https://[", "",
])  # fmt: skip
def test_urls_without_protection(url: str) -> None:
    assert problem_of(url)


# --- fetching


def test_keys_are_found_by_discovery_or_by_url() -> None:
    issuer = TokenIssuer()
    with served(issuer) as url:
        assert fetch_keys(source(issuer)).find("one", "ES256") is not None
        assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]
        assert fetch_keys(source(issuer, url=f"{url}/x")).find("one", "ES256") is not None
        assert issuer.asked[2:] == ["/x"]


def test_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    issuer = TokenIssuer()
    with served(issuer):
        assert fetch_keys(source(issuer)).find("one", "ES256") is not None


@pytest.mark.parametrize(("answer", "problem"), [
    (b"{", "it is no JSON"), (b"[]", "configuration is that of another issuer"),
    (b'{"issuer": "https://other.example", "jwks_uri": "https://other.example"}', "of another is"),
    (b" " * (2 << 20), "its answer is too long"),
])  # fmt: skip
def test_wrong_configurations(answer: bytes, problem: str) -> None:
    issuer = TokenIssuer()
    issuer.answer = answer
    with served(issuer), pytest.raises(InvalidKeys, match=problem):
        fetch_keys(source(issuer))


@pytest.mark.parametrize("place", ["file:///etc/passwd", "http://issuer.example/keys", 5, None])
def test_keys_elsewhere_without_protection(place: object) -> None:
    issuer = TokenIssuer()
    with served(issuer) as url:
        issuer.answer = f'{{"issuer": "{url}", "jwks_uri": "{place}"}}'.encode()
        with pytest.raises(InvalidKeys, match="its 'jwks_uri' must be an https:// URL"):
            fetch_keys(source(issuer))


@pytest.mark.parametrize("status", [301, 302, 404, 500])
def test_statuses_and_redirects_are_failures(status: int) -> None:
    issuer = TokenIssuer()
    issuer.status = status
    with served(issuer), pytest.raises(InvalidKeys, match=f"it has answered {status}"):
        fetch_keys(source(issuer))
    assert len(issuer.asked) == 1


def test_an_issuer_that_is_not_there() -> None:
    issuer = TokenIssuer()
    with served(issuer):
        pass
    with pytest.raises(InvalidKeys, match=r"it cannot be reached: .*refused"):
        fetch_keys(source(issuer))


def test_certificates_of_issuers_are_verified() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    issuer = TokenIssuer()
    with served(issuer, context):
        with pytest.raises(InvalidKeys, match="certificate verify failed"):
            fetch_keys(source(issuer))
        found = fetch_keys(source(issuer, roots=str(TLS / "root.pem")))
        assert found.find("one", "ES256") is not None
        with pytest.raises(InvalidKeys, match=r"it cannot be reached: .*No such file"):
            fetch_keys(source(issuer, roots="/no/such/file"))


# --- the thread


@contextmanager
def followed(of: KeySource, soon_secs: float = 3600) -> Iterator[tuple[RemoteKeys, Event]]:
    """Keys, and an event that is set when they have changed."""
    changed = Event()
    keys = RemoteKeys(of, changed.set, soon_secs)
    try:
        yield keys, changed
    finally:
        keys.close()


@pytest.mark.slow
def test_keys_are_fetched_at_start_and_at_intervals() -> None:
    issuer = TokenIssuer()
    with served(issuer), followed(source(issuer, refresh_secs=1)) as (keys, changed):
        assert changed.wait(60)
        changed.clear()
        assert keys.find("one", "ES256") is not None
        assert time.time() < keys.until <= time.time() + 86_400
        issuer.rotate("two")
        assert changed.wait(60)
        assert keys.find("two", "ES256") is not None
        assert keys.find("one", "ES256") is None  # a key that is withdrawn does not count


def test_an_unknown_key_has_them_fetched() -> None:
    issuer = TokenIssuer()
    with served(issuer), followed(source(issuer), soon_secs=0) as (keys, changed):
        assert changed.wait(60)
        changed.clear()
        issuer.rotate("two")
        assert keys.find("two", "ES256") is None
        assert changed.wait(60)
        assert keys.find("two", "ES256") is not None


@pytest.mark.slow
def test_unknown_keys_have_them_fetched_only_now_and_then() -> None:
    issuer = TokenIssuer()
    with served(issuer), followed(source(issuer), soon_secs=0.3) as (keys, changed):
        begun = time.monotonic()
        assert changed.wait(60)
        issuer.rotate("two")
        until(lambda: keys.find("two", "ES256") is not None, "the new key")
        most = 2 + (time.monotonic() - begun) / 0.3
        assert issuer.asked.count("/keys") <= most


@pytest.mark.slow
def test_keys_stay_while_the_issuer_is_down(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    issuer = TokenIssuer()
    with served(issuer), followed(source(issuer, refresh_secs=1)) as (keys, changed):
        assert changed.wait(60)
        changed.clear()
        issuer.status = 503
        until(lambda: "it has answered 503; failed attempts: 2" in caplog.text, "two attempts")
        assert keys.find("one", "ES256") is not None
        issuer.rotate("two")
        issuer.status = 200
        assert changed.wait(60)
        assert keys.find("two", "ES256") is not None
        assert "fetched again" in caplog.text


def test_keys_count_until_their_greatest_age() -> None:
    issuer = TokenIssuer()
    with served(issuer), followed(source(issuer, max_age_secs=0)) as (keys, changed):
        assert changed.wait(60)
        assert keys.find("one", "ES256") is None
        assert keys.until <= time.time()


@pytest.mark.slow
def test_an_issuer_may_be_down_at_start() -> None:
    issuer = TokenIssuer()
    issuer.status = 503
    with served(issuer), followed(source(issuer, refresh_secs=1)) as (keys, changed):
        until(lambda: bool(issuer.asked), "the first attempt")
        assert keys.find("one", "ES256") is None
        issuer.status = 200
        assert changed.wait(60)
        assert keys.find("one", "ES256") is not None


def test_keys_stay_when_only_times_change() -> None:
    issuer = TokenIssuer()
    with served(issuer), followed(source(issuer)) as (keys, changed):
        assert changed.wait(60)
        issuer.status = 503
        soon = source(issuer, refresh_secs=1, max_age_secs=60)
        assert soon == keys.source
        asked = len(issuer.asked)
        keys.change(soon)
        assert keys.find("one", "ES256") is not None
        assert keys.until <= time.time() + 60
        until(lambda: len(issuer.asked) > asked, "a fetch at once")


@pytest.mark.parametrize("changes", [
    {"issuer": "https://b.example"}, {"algorithms": ("RS256",)}, {"url": "https://a.example/k"},
    {"roots": "roots.pem"},
])  # fmt: skip
def test_keys_of_another_place_do_not_count(changes: dict[str, Any]) -> None:
    before = KeySource("https://a.example", ("ES256",))
    assert replace(before, refresh_secs=1) == before != replace(before, **changes)
