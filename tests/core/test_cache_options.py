"""Options of the response cache."""

import re

import pytest

from headrace.core.cache_options import CacheOptions, RedisOptions


def test_without_a_place_there_is_no_cache() -> None:
    assert CacheOptions.of([]) is None
    assert CacheOptions.of(["local,size=0"]) is None


@pytest.mark.parametrize(("texts", "size"), [(["local,size=1024"], 0), ([], 1024)])
def test_bytes_of_this_process(texts: list[str], size: int) -> None:
    assert CacheOptions.of(texts, size) == CacheOptions(1024)


def test_a_redis_server() -> None:
    texts = [
        "redis,host=db", "redis,port=7", "redis,user=u", "redis,password=a=,b", "redis,db=2",
        "redis,tls=true", "redis,ttl_secs=60", "redis,timeout_ms=50", "local,size=9",
    ]  # fmt: skip
    redis = RedisOptions("db", 7, "u", "a=,b", 2, True, 60, 50)
    assert CacheOptions.of(texts) == CacheOptions(9, redis)


@pytest.mark.parametrize(
    ("texts", "size", "problem"),
    [
        (["local"], 0, "expected local,{size}= or redis,{host|"),
        (["disk,size=1"], 0, "got 'disk,size'"),
        (["redis,secret=x"], 0, "got 'redis,secret'"),
        (["local,size=1k"], 0, "local,size= must be a whole number, got '1k'"),
        (["local,size=" + "9" * 5000], 0, "local,size= must be a whole number, got '9999"),
        (["redis,host=a", "redis,port=-1"], 0, "redis,port= must be a whole number, got '-1'"),
        (["local,size=1", "local,size=2"], 0, "local,size= is given twice"),
        (["local,size=1"], 2, "is the same as --response-cache-byte-size"),
        (["redis,port=1"], 0, "redis,host= is missing"),
        (["redis,host=a", "redis,tls=maybe"], 0, "redis,tls= must be true or false, got 'maybe'"),
    ],
)
def test_invalid_options(texts: list[str], size: int, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        CacheOptions.of(texts, size)


def test_an_error_does_not_show_a_password() -> None:
    with pytest.raises(ValueError, match=r"got 'redis,pasword'$"):
        CacheOptions.of(["redis,pasword=secret"])
