"""Origins whose pages may have a browser change the server."""

import pytest

from headrace.api.header_rules import AllowedOrigins
from headrace.core.errors import Restricted

SERVER = ("10.1.2.3", 8000)
NAMED = ("https://ops.example", "http://tools.example:3000", "chrome-extension://abcdef")
EVIL = "http://evil.example:8000"


def allowed(*headers: tuple[str, str], named: tuple[str, ...] = NAMED, address: str = "") -> bool:
    """True if a request with such headers is served."""
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    try:
        AllowedOrigins(named, address).check(pairs, SERVER)
    except Restricted:
        return False
    return True


@pytest.mark.parametrize(("origin", "expected"), [
    ("http://localhost", True), ("http://localhost:3000", True), ("https://LOCALHOST:3000", True),
    ("http://127.0.0.1:8000", True), ("http://127.9.9.9", True), ("http://[::1]:8000", True),
    ("http://10.1.2.3:8000", True),  # the address that the request came to ...
    ("https://10.1.2.3:8000", False),  # ... where nothing speaks TLS
    ("http://10.1.2.3:8001", False), ("http://10.1.2.3", False), ("http://10.1.2.4:8000", False),
    ("https://ops.example", True), ("https://ops.example:443", True), ("https://OPS.example", True),
    ("http://ops.example", False), ("https://ops.example:8443", False),
    ("https://sub.ops.example", False), ("http://tools.example:3000", True),
    ("chrome-extension://abcdef", True), (EVIL, False), ("null", False), ("", False), ("*", False),
    ("http://127.0.0.1.evil.example", False), ("http://127.0.0.1@evil.example", False),
    ("http://localhost.evil.example", False), ("http://evil.example/http://localhost", False),
    ("http://localhost ", False), ("http://localhost:99999999", False),
    ("http://2130706433", False),  # which a browser would have written as 127.0.0.1
    ("http://[", False), ("ftp://localhost", False), ("http://xn--lcalhost-54a", False),
    ("http://\xfflocalhost", False),
])  # fmt: skip
def test_origins(origin: str, expected: bool) -> None:
    assert allowed(("host", "10.1.2.3:8000"), ("origin", origin)) is expected


def test_the_own_address_of_a_server_with_tls() -> None:
    rules = AllowedOrigins(scheme="https")
    rules.check([(b"origin", b"https://10.1.2.3:8000")], SERVER)
    with pytest.raises(Restricted):
        rules.check([(b"origin", b"http://10.1.2.3:8000")], SERVER)


def test_the_host_header_is_ignored() -> None:
    """A rebound DNS name is in both headers."""
    assert not allowed(("host", "evil.example:8000"), ("origin", EVIL))


@pytest.mark.parametrize(("site", "expected"), [
    ("same-origin", True), ("none", True), ("same-site", False), ("cross-site", False), ("", False),
])  # fmt: skip
def test_browsers_that_send_no_origin(site: str, expected: bool) -> None:
    assert allowed(("sec-fetch-site", site)) is expected


def test_origin_wins_over_sec_fetch_site() -> None:
    assert allowed(("sec-fetch-site", "cross-site"), ("origin", "https://ops.example"))
    assert not allowed(("sec-fetch-site", "same-origin"), ("origin", EVIL))


def test_all_of_several_origins_have_to_be_allowed() -> None:
    assert not allowed(("origin", "http://localhost"), ("origin", EVIL))


def test_other_clients_than_browsers_are_not_affected() -> None:
    assert allowed(("host", "headrace.models.svc.cluster.local"), ("user-agent", "curl/8"))


def test_every_origin_allowed() -> None:
    for origin in (EVIL, "null"):
        assert allowed(("origin", origin), named=("*",))
    assert allowed(("sec-fetch-site", "cross-site"), named=("*",))


def test_the_listening_host_name() -> None:
    assert allowed(("origin", "http://inference.lan:8000"), address="Inference.lan")
    assert not allowed(("origin", "http://inference.lan:9000"), address="inference.lan")


def test_ipv4_on_a_socket_of_ipv6() -> None:
    AllowedOrigins().check([(b"origin", b"http://10.1.2.3:8000")], ("::ffff:10.1.2.3", 8000))


@pytest.mark.parametrize("text", ["ops.example", "https://", "https://a/b", "null", "https://é"])
def test_invalid_origins(text: str) -> None:
    with pytest.raises(ValueError, match="expected SCHEME://HOST"):
        AllowedOrigins([text])


def test_an_error_shows_a_part_of_a_long_origin() -> None:
    with pytest.raises(Restricted) as caught:
        AllowedOrigins().check([(b"origin", b"http://" + b"x" * 10_000)], SERVER)
    assert len(str(caught.value)) < 250
