"""Options of the response cache, as Triton's command line has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.texts import shown, whole_number

_LOCAL, _REDIS = "local", "redis"
_KNOWN: Mapping[str, Sequence[str]] = {
    _LOCAL: ("size",),
    _REDIS: ("host", "port", "user", "password", "db", "tls", "ttl_secs", "timeout_ms"),
}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """A Redis server that keeps answers. `ttl_secs` 0 leaves their end to Redis.

    An answer that takes longer than `timeout_ms` is none.
    """

    host: str
    port: int = 6379
    user: str = ""
    password: str = ""
    db: int = 0
    tls: bool = False
    ttl_secs: int = 0
    timeout_ms: int = 200


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The places of answers: `size` bytes of this process, and a Redis server; 0 and None: not."""

    size: int = 0
    redis: RedisOptions | None = None

    @classmethod
    def of(cls, texts: Sequence[str], size: int = 0) -> "CacheOptions | None":
        """Parse texts such as `local,size=1048576`; None without a place for answers.

        `size` is that of another option, 0 if it was not given. Raises `ValueError`.
        """
        found: dict[str, dict[str, str]] = {}
        for text in texts:
            place, comma, setting = text.partition(",")
            name, equals, value = setting.partition("=")
            if place not in _KNOWN or not comma or not equals or name not in _KNOWN[place]:
                names = " or ".join(f"{place},{{{'|'.join(of)}}}=" for place, of in _KNOWN.items())
                raise ValueError(f"expected {names}, got {_without_value(text)!r}")
            if name in found.setdefault(place, {}):
                raise ValueError(f"{place},{name}= is given twice")
            found[place][name] = value
        local, redis = found.get(_LOCAL), found.get(_REDIS)
        if local is not None:
            if size:
                raise ValueError(f"{_LOCAL},size= is the same as --response-cache-byte-size")
            size = _number(local, _LOCAL, "size", 0)
        options = None if redis is None else _redis(redis)
        return cls(size, options) if size or options else None


def _redis(given: Mapping[str, str]) -> RedisOptions:
    if not given.get("host"):
        raise ValueError(f"{_REDIS},host= is missing")
    tls = given.get("tls", "false").lower()
    if tls not in _FLAGS:
        raise ValueError(f"{_REDIS},tls= must be true or false, got {tls!r}")
    default = RedisOptions(given["host"])
    return RedisOptions(
        given["host"],
        _number(given, _REDIS, "port", default.port),
        given.get("user", ""),
        given.get("password", ""),
        _number(given, _REDIS, "db", default.db),
        _FLAGS[tls],
        _number(given, _REDIS, "ttl_secs", default.ttl_secs),
        _number(given, _REDIS, "timeout_ms", default.timeout_ms),
    )


def _number(given: Mapping[str, str], place: str, name: str, default: int) -> int:
    if name not in given:
        return default
    number = whole_number(given[name], 0, _MOST)
    if number is None:
        raise ValueError(f"{place},{name}= must be a whole number, got {shown(given[name])}")
    return number


def _without_value(text: str) -> str:
    """A setting without its value, which may be a password."""
    return text.partition("=")[0]
