"""Rules for verified client certificates, in the form of `ssl.SSLSocket.getpeercert`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from headrace.core.identity import Identity, Role

# Kinds of names by their types in a certificate, and the character that `*` does not pass.
NAMES = {"dns": ("DNS", "."), "uri": ("URI", "/"), "email": ("email", "@")}
# Attributes of a subject: usual abbreviations of OpenSSL's names.
ATTRIBUTES = {
    "CN": "commonName",
    "O": "organizationName",
    "OU": "organizationalUnitName",
    "C": "countryName",
    "ST": "stateOrProvinceName",
    "L": "localityName",
    "DC": "domainComponent",
    "UID": "userId",
    "emailAddress": "emailAddress",
    "serialNumber": "serialNumber",
}
_SPECIAL = re.compile(r"[\\,=]")


def name_pattern(glob: str, separator: str = "") -> re.Pattern[str]:
    """A pattern: `**` is any text, `*` any without the separator, `?` one such character."""
    other = f"[^{re.escape(separator)}]" if separator else "."
    wild = {"**": ".*", "*": f"{other}*", "?": other}
    parts = re.split(r"(\*\*|\*|\?)", glob)
    return re.compile("".join(wild.get(part) or re.escape(part) for part in parts), re.DOTALL)


@dataclass(frozen=True, slots=True)
class CertificateRule:
    """Certificates that have a name like `pattern`, or a subject with all of `subject`.

    `kind` is one of `NAMES` or `subject`; `name` is that of the identity, "" for the matched one.
    """

    line: int
    kind: str
    roles: tuple[Role, ...]
    name: str = ""
    pattern: re.Pattern[str] | None = None
    subject: tuple[tuple[str, re.Pattern[str]], ...] = ()

    def match(self, certificate: Mapping[str, Any]) -> str:
        """The identity's name, "" if the certificate is not of this rule."""
        if self.pattern is None:
            found = self._subject(certificate)
        else:
            kind = NAMES[self.kind][0]
            names = (value for of, value in _pairs(certificate, "subjectAltName") if of == kind)
            found = next((name for name in names if self.pattern.fullmatch(name)), "")
        return (self.name or f"{self.kind}:{found}") if found else ""

    def _subject(self, certificate: Mapping[str, Any]) -> str:
        """The matched attributes of the subject, such as `CN=web,O=Example`."""
        found = []
        for short, pattern in self.subject:
            of = ATTRIBUTES[short]
            values = [value for name, value in _pairs(certificate, "subject") if name == of]
            if len(values) != 1 or not pattern.fullmatch(values[0]):
                return ""
            # Escaped, so that no value can look like two attributes.
            escaped = _SPECIAL.sub(r"\\\g<0>", values[0])
            found.append(f"{short}={escaped}")
        return ",".join(found)


def identity_of(
    certificate: Mapping[str, Any], rules: tuple[CertificateRule, ...]
) -> Identity | None:
    """The identity by the first rule that matches; None without one."""
    for rule in rules:
        if name := rule.match(certificate):
            return Identity(name, "certificate", rule.roles, _end(certificate))
    return None


def _pairs(certificate: Mapping[str, Any], field: str) -> Iterator[tuple[str, str]]:
    """The names and values of a field, of which a subject's are in further tuples."""
    waiting = [certificate.get(field)]
    while waiting:
        match waiting.pop(0):
            case (str(name), str(value)):
                yield name, value
            case tuple(others):
                waiting[:0] = others
            case _:
                continue


def _end(certificate: Mapping[str, Any]) -> float:
    """The end of a certificate's validity, in seconds since the epoch."""
    import ssl  # only with certificates

    until = certificate.get("notAfter")
    try:
        return float(ssl.cert_time_to_seconds(until)) if isinstance(until, str) else inf
    except (ValueError, OverflowError):  # of no form that `getpeercert` gives
        return 0.0
