"""The tables `[[quotas]]` of a file of access, as quotas."""

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from headrace.core.identity import ROLE
from headrace.core.quotas import ADDRESS, Quota, Quotas
from headrace.core.texts import shown

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # also a text of HTTP's structured fields
_SIZE = re.compile(r"(\d{1,15}) ?([KMGT]iB|[kMGT]?B)?")
_UNITS = {
    None: 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_MOST = 10**12  # of any number
_KEYS = frozenset(Quota._fields)


class InvalidQuota(ValueError):
    """A table that is no quota: its position, from 0, and the key that is wrong, "" for none."""

    def __init__(self, position: int, key: str, text: str) -> None:
        super().__init__(f"quotas[{position}]{'.' if key else ''}{key}: {text}")
        self.text = text
        self.position = position
        self.key = key


def read_quotas(tables: Sequence[Mapping[str, Any]]) -> Quotas:
    """The quotas of these tables, in their order; raises `InvalidQuota`."""
    quotas = tuple(_Table(position, table).read() for position, table in enumerate(tables))
    names: set[str] = set()
    for position, quota in enumerate(quotas):
        if quota.name in names:
            raise InvalidQuota(position, "name", f"another quota has the name '{quota.name}'")
        names.add(quota.name)
    return Quotas(quotas)


class _Table:
    """One table that is being read."""

    def __init__(self, position: int, table: object) -> None:
        self._position = position
        if not isinstance(table, Mapping):
            raise self._wrong("", f"expected a table, got {shown(table)}")
        self._table = table

    def read(self) -> Quota:
        """The quota."""
        for key in self._table:
            if key not in _KEYS:
                raise self._wrong(str(key), f"unknown key; expected {', '.join(sorted(_KEYS))}")
        quota = Quota(
            self._name(),
            self._of(),
            self._texts("models", ("*",)),
            requests_per_sec=self._rate("requests_per_sec"),
            burst=self._rate("burst"),
            rows_per_sec=self._rate("rows_per_sec"),
            requests=self._count("requests"),
            bytes=self._size("bytes"),
            connections=self._count("connections"),
            weight=self._rate("weight"),
        )
        if quota.burst and not quota.requests_per_sec:
            raise self._wrong("burst", "without effect; expected requests_per_sec beside it")
        if quota.burst and quota.burst < 1:
            raise self._wrong("burst", f"expected at least 1 request, got {quota.burst:g}")
        if not any(quota[3:]):
            limits = "requests_per_sec, rows_per_sec, requests, bytes, connections or weight"
            raise self._wrong("", f"a quota without a limit; expected {limits}")
        return quota

    def _name(self) -> str:
        name = self._table.get("name", f"quota{self._position + 1}")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            expected = "1 to 64 letters, digits, and any of _.-"
            raise self._wrong("name", f"expected {expected}, got {shown(name)}")
        return name

    def _of(self) -> tuple[str, ...]:
        found = self._texts("of", None)
        if ADDRESS in found and len(found) > 1:
            raise self._wrong(
                "of", f"'{ADDRESS}' stands alone: it is for all clients of an address"
            )
        if ROLE in found:
            raise self._wrong("of", f"expected '{ROLE}NAME', got '{ROLE}'")
        return found

    def _texts(self, key: str, default: tuple[str, ...] | None) -> tuple[str, ...]:
        value = self._table.get(key, default)
        if (
            not isinstance(value, list | tuple)
            or not value
            or not all(isinstance(one, str) and one for one in value)
        ):
            found = "nothing" if value is None else shown(value)
            raise self._wrong(key, f"expected a list of texts, got {found}")
        return tuple(value)

    def _rate(self, key: str) -> float:
        value = self._table.get(key)
        if value is None:
            return 0.0
        if type(value) not in (int, float) or not (isfinite(value) and 0 < value <= _MOST):
            raise self._wrong(key, f"expected a number above 0, got {shown(value)}")
        return float(value)

    def _count(self, key: str) -> int:
        value = self._table.get(key)
        if value is None:
            return 0
        if type(value) is not int or not 0 < value <= _MOST:
            raise self._wrong(key, f"expected a whole number above 0, got {shown(value)}")
        return value

    def _size(self, key: str) -> int:
        value = self._table.get(key)
        if isinstance(value, str) and (found := _SIZE.fullmatch(value)):
            value = int(found[1]) * _UNITS[found[2]]
        elif isinstance(value, str) or (value is not None and type(value) is not int):
            raise self._wrong(
                key, f"expected bytes, such as 67108864 or '64MiB', got {shown(value)}"
            )
        if value is None:
            return 0
        if value <= 0:
            raise self._wrong(key, f"expected more than 0 bytes, got {value}")
        return int(value)

    def _wrong(self, key: str, text: str) -> InvalidQuota:
        return InvalidQuota(self._position, key, text)
