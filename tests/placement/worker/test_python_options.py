"""Workers' parameters in a configuration, and the resulting start-up options."""

import os
import re
import resource
from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.core.errors import Contradiction, InvalidOption
from headrace.core.limits import ExecutionLimits
from headrace.placement.worker.python_options import (
    WorkerOptions,
    WorkerSpec,
    with_columns,
    with_instances,
)
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.workers.limits import WorkerLimits


def test_without_parameters_the_servers_limits_hold() -> None:
    options = WorkerOptions.of({"python": "/usr/bin/python3"})
    assert options == WorkerOptions(ExecutionLimits(), 30.0, 0, 0, 2, WorkerLimits(0, 0, 0))
    limited = WorkerOptions.of({"stall_secs": "0"}, ExecutionLimits(600, 60))
    assert limited.execution == ExecutionLimits(600, 0)


def test_every_parameter() -> None:
    options = WorkerOptions.of(
        {
            "execution_limit_secs": "2.5", "stall_secs": "1.5", "heartbeat_secs": "0",
            "max_rss": "1.5GiB", "max_requests": "1000", "quarantine_deaths": "3", "nice": "19",
            "memory_limit": "512MiB", "max_open_files": "64", "worker_env": "SHOP_*, TOKEN",
        }
    )  # fmt: skip
    limits = WorkerLimits(19, 512 << 20, 64)
    assert options == WorkerOptions(
        ExecutionLimits(2.5, 1.5), 0.0, 3 << 29, 1000, 3, limits, ("SHOP_*", "TOKEN")
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("1048576", 1 << 20), ("7B", 7), ("2KiB", 2048), ("2 kB", None), ("2KB", 2000),
        ("3 MB", 3_000_000), ("1TiB", 1 << 40), (" 1GB ", 10**9), ("0.5GiB", 1 << 29),
        ("iB", None), ("1iB", None), ("-1", None), ("", None), ("1e9", None), ("a lot", None),
        ("9" * 16, None), ("1 0", None), ("1GiBB", None),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(InvalidOption, match="expected a number of bytes or a size such as"):
            WorkerOptions.of({"max_rss": text})
    else:
        assert WorkerOptions.of({"max_rss": text}).max_rss == size


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("execution_limit_secs", "fast", "a number of seconds, 0 for no limit"),
        ("stall_secs", "-1", "a number of seconds, 0 for no limit"),
        ("heartbeat_secs", "-1", "a number of seconds"),
        ("heartbeat_secs", "nan", "a number of seconds"),
        ("heartbeat_secs", "0.5", "0 or a number of seconds from 1 on"),
        ("max_requests", "1.5", "a whole number, 0 for no limit"),
        ("max_requests", "-1", "a whole number"),
        ("max_requests", "\u0661", "a whole number"),
        ("quarantine_deaths", "1", "0 or a whole number from 2 on"),
        ("quarantine_deaths", "two", "0 or a whole number from 2 on"),
        ("nice", "20", "a whole number from 0 to 19"),
        ("nice", "-5", "a whole number from 0 to 19, got '-5'"),
        ("memory_limit", "1MiB", "0 or a size from 128MiB on"),
        ("memory_limit", "much", "a number of bytes or a size"),
        ("worker_env", "SHOP=1", "names of environment variables, or patterns"),
        ("worker_env", "", "names of environment variables, or patterns"),
        ("max_open_files", "3", "0 or a number from 32 to "),
    ],
)
def test_invalid_values(name: str, text: str, expected: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        WorkerOptions.of({name: text})
    assert raised.value.path == f"parameters['{name}']"
    assert raised.value.text.startswith(f"expected {expected}")
    assert raised.value.text.endswith(f", got {text!r}")


def test_more_files_than_the_server_itself_may_open() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most != resource.RLIM_INFINITY
    assert WorkerOptions.of({"max_open_files": str(most)}).limits.files == most
    with pytest.raises(InvalidOption, match=f"from 32 to {most}, the server's own limit"):
        WorkerOptions.of({"max_open_files": str(most + 1)})


PAGE = (Path(__file__).parents[3] / "docs" / "python-models.md").read_text()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's environment variables."""
    for name in tuple(os.environ):
        monkeypatch.delenv(name)
    for name in (
        "SHOP_REGION",
        "SHOP_KEY",
        "shop_region",
        "HEADRACE_GRPC_SERVER_KEY",
        "AWS_SECRET",
    ):
        monkeypatch.setenv(name, "here")


def seen(*variables: str) -> set[str]:
    """Environment variables visible to a worker, by name."""
    found = WorkerSpec("m", "1", "m_0", variables=variables).environment()
    return {name for name, value in found.items() if value == "here"}


def test_a_worker_sees_no_secrets() -> None:
    assert seen() == set()


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        (["SHOP_REGION"], {"SHOP_REGION"}),
        (["SHOP_*"], {"SHOP_REGION", "SHOP_KEY"}),
        (["SHOP_[A-M]*", "NOT_THERE"], {"SHOP_KEY"}),
        (["*"], {"SHOP_REGION", "SHOP_KEY", "shop_region", "AWS_SECRET"}),
        (["HEADRACE_GRPC_SERVER_KEY"], set()),
    ],
)
def test_a_worker_sees_configured_variables(variables: list[str], names: set[str]) -> None:
    assert seen(*variables) == names


def test_the_documented_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    [listed] = re.findall(r"Of the server\'s environment .*?: (.*?)\. ", PAGE, re.DOTALL)
    names = {name.replace("*", "X") for name in re.findall("`(.*?)`", listed)}
    assert len(names) > 15
    for name in names:
        monkeypatch.setenv(name, "here")
    assert seen() == names


def config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


MATRIX = 'input { name: "x" } '


def named(columns: str) -> str:
    """A parameter with names of columns."""
    return f"parameters {{ key: 'columns' value {{ string_value: '{columns}' }} }}"


def test_names_of_columns() -> None:
    found = with_columns(config(MATRIX), ["ä", "b"])
    assert found.parameters["columns"].string_value == '{"x": ["ä", "b"]}'
    same = config(MATRIX + named('{"x":["ä","b"]}'))
    assert with_columns(same, ["ä", "b"]) == same
    for text, columns in (
        (MATRIX, []), ('input { name: "ä" } input { name: "b" }', ["ä", "b"]),
        ('input { name: "ä" }', ["ä"]),
    ):  # fmt: skip
        assert with_columns(config(text), columns) == config(text)
    for other in ('{"x": ["b", "ä"]}', '["ä", "b"]', "ä,b"):
        with pytest.raises(Contradiction, match="trained with the columns ä, b, in this order"):
            with_columns(config(MATRIX + named(other)), ["ä", "b"])


def test_instances_of_code() -> None:
    assert with_instances(config(""), 1) == config("")
    group = config("instance_group { count: 3 kind: KIND_CPU }")
    assert with_instances(config(""), 3) == group
    assert with_instances(group, 4) == group
