import tomllib
from typing import Any

import pytest

from headrace.core.quotas import Quota
from headrace.plugins.access.quotas import InvalidQuota, read_quotas

DOCUMENT = """
[[quotas]]
name = "batch"
of = ["night", "role:scorer"]
models = ["text_*", "digits"]
requests_per_sec = 2.5
burst = 10
rows_per_sec = 1000
requests = 8
bytes = "64MiB"
connections = 4
weight = 2

[[quotas]]
of = ["*"]
bytes = 1_000
"""


def test_every_key() -> None:
    quotas = read_quotas(tomllib.loads(DOCUMENT)["quotas"])
    assert quotas.all == (
        Quota(
            "batch",
            ("night", "role:scorer"),
            ("text_*", "digits"),
            2.5,
            10,
            1000,
            8,
            64 << 20,
            4,
            2,
        ),
        Quota("quota2", ("*",), bytes=1_000),
    )
    assert read_quotas([]).all == ()


@pytest.mark.parametrize(("table", "text"), [
    ([], "quotas[0]: expected a table, got []"),
    ({"requests": 1}, "quotas[0].of: expected a list of texts, got nothing"),
    ({"of": "web", "requests": 1}, "quotas[0].of: expected a list of texts, got 'web'"),
    ({"of": [], "requests": 1}, "quotas[0].of: expected a list of texts, got []"),
    ({"of": ["address", "web"], "requests": 1}, "quotas[0].of: 'address' stands alone"),
    ({"of": ["role:"], "requests": 1}, "quotas[0].of: expected 'role:NAME'"),
    ({"of": ["*"], "models": [""], "requests": 1}, "quotas[0].models: expected a list of texts"),
    ({"of": ["*"]}, "quotas[0]: a quota without a limit; expected requests_per_sec"),
    ({"of": ["*"], "requests": 0}, "quotas[0].requests: expected a whole number above 0, got 0"),
    ({"of": ["*"], "requests": 1.0}, "quotas[0].requests: expected a whole number above 0"),
    ({"of": ["*"], "requests": True}, "quotas[0].requests: expected a whole number above 0"),
    ({"of": ["*"], "connections": "4"}, "quotas[0].connections: expected a whole number above 0"),
    ({"of": ["*"], "rows_per_sec": -1}, "quotas[0].rows_per_sec: expected a number above 0"),
    ({"of": ["*"], "weight": float("nan")}, "quotas[0].weight: expected a number above 0"),
    ({"of": ["*"], "weight": True}, "quotas[0].weight: expected a number above 0, got True"),
    ({"of": ["*"], "burst": 5}, "quotas[0].burst: without effect"),
    ({"of": ["*"], "requests_per_sec": 5, "burst": 0.5}, "quotas[0].burst: expected at least 1"),
    ({"of": ["*"], "bytes": "64 mib"}, "quotas[0].bytes: expected bytes, such as"),
    ({"of": ["*"], "bytes": 1.5}, "quotas[0].bytes: expected bytes, such as"),
    ({"of": ["*"], "bytes": 0}, "quotas[0].bytes: expected more than 0 bytes, got 0"),
    ({"of": ["*"], "bytes": "0B"}, "quotas[0].bytes: expected more than 0 bytes, got 0"),
    ({"of": ["*"], "name": 'a"b', "requests": 1}, "quotas[0].name: expected 1 to 64 letters"),
    ({"of": ["*"], "request": 1}, "quotas[0].request: unknown key; expected burst, bytes"),
])  # fmt: skip
def test_errors_name_table_and_key(table: Any, text: str) -> None:
    with pytest.raises(InvalidQuota) as raised:
        read_quotas([table])
    assert str(raised.value).startswith(text)


def test_names_are_unique() -> None:
    tables: list[dict[str, Any]] = [
        {"name": "quota2", "of": ["*"], "requests": 1}, {"of": ["*"], "requests": 2},
    ]  # fmt: skip
    with pytest.raises(InvalidQuota, match="another quota has the name 'quota2'"):
        read_quotas(tables)
