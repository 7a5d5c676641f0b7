"""Rules for client certificates."""

from math import inf
from typing import Any

import pytest

from headrace.core.identity import EVERYTHING, Role
from headrace.plugins.access.certificates import CertificateRule, identity_of, name_pattern

ROLES = (Role("r", EVERYTHING),)
CERTIFICATE = {
    "subject": (
        (("organizationName", "Example, Inc"),),
        (("organizationalUnitName", "a"),),
        (("organizationalUnitName", "b"),),
        (("commonName", "web"),),
    ),
    "subjectAltName": (
        ("DNS", "web.example.com"),
        ("URI", "spiffe://cluster/ns/prod/sa/web"),
        ("email", "web@example.com"),
    ),
    "notAfter": "Jan  1 00:00:00 2100 GMT",
}


def by_name(kind: str, glob: str, name: str = "") -> CertificateRule:
    separator = {"dns": ".", "uri": "/", "email": "@"}[kind]
    return CertificateRule(1, kind, ROLES, name, name_pattern(glob, separator))


def by_subject(name: str = "", **attributes: str) -> CertificateRule:
    patterns = tuple((short, name_pattern(glob)) for short, glob in attributes.items())
    return CertificateRule(1, "subject", ROLES, name, subject=patterns)


@pytest.mark.parametrize(("rule", "name"), [
    (by_name("dns", "web.example.com"), "dns:web.example.com"),
    (by_name("dns", "*.example.com"), "dns:web.example.com"),
    (by_name("dns", "*.com"), ""),
    (by_name("dns", "**.com"), "dns:web.example.com"),
    (by_name("dns", "web.example.com", "site"), "site"),
    (by_name("dns", "webXexample.com"), ""),
    (by_name("uri", "spiffe://cluster/ns/prod/sa/*"), "uri:spiffe://cluster/ns/prod/sa/web"),
    (by_name("uri", "spiffe://cluster/ns/*/sa/we?"), "uri:spiffe://cluster/ns/prod/sa/web"),
    (by_name("uri", "spiffe://cluster/*"), ""),
    (by_name("uri", "spiffe://cluster/**"), "uri:spiffe://cluster/ns/prod/sa/web"),
    (by_name("uri", "web.example.com"), ""),
    (by_name("email", "*@example.com"), "email:web@example.com"),
    (by_name("email", "*"), ""),
    (by_subject(CN="web"), "subject:CN=web"),
    (by_subject(CN="we*", O="Example*"), "subject:CN=web,O=Example\\, Inc"),
    (by_subject(CN="web", O="other"), ""),
    (by_subject(OU="a"), ""),  # there are two
    (by_subject(L="*"), ""),  # there is none
    (by_subject("ann", CN="web"), "ann"),
])  # fmt: skip
def test_a_rule_matches_names_or_not(rule: CertificateRule, name: str) -> None:
    assert rule.match(CERTIFICATE) == name


def test_the_first_rule_decides() -> None:
    rules = (by_name("dns", "no"), by_subject("first", CN="web"), by_name("dns", "**", "second"))
    found = identity_of(CERTIFICATE, rules)
    assert found is not None
    assert (found.name, found.kind, found.roles) == ("first", "certificate", ROLES)
    assert found.expires == 4_102_444_800
    assert identity_of(CERTIFICATE, rules[:1]) is None
    without_end = identity_of({**CERTIFICATE, "notAfter": None}, rules)
    assert without_end is not None
    assert without_end.expires == inf


@pytest.mark.parametrize("value", [None, (), "web", 5, (("DNS",),), ((1, 2),), (("DNS", b"web"),)])
def test_odd_certificates_match_nothing(value: Any) -> None:
    rules = (by_name("dns", "**"), by_subject(CN="*"))
    assert identity_of({"subject": value, "subjectAltName": value}, rules) is None


@pytest.mark.parametrize("value", ["", "tomorrow", "Jan  1 00:00:00 99999 GMT"])
def test_an_end_that_cannot_be_read_is_over(value: str) -> None:
    found = identity_of({**CERTIFICATE, "notAfter": value}, (by_subject(CN="web"),))
    assert found is not None
    assert found.expires == 0
