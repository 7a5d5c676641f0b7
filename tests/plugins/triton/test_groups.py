import pytest
from google.protobuf import text_format

from headrace.core.errors import InvalidOption
from headrace.placement.upstream.reconciler import agree, described
from headrace.placement.upstream.triton_options import NumberedProcess
from headrace.plugins.triton.groups import as_configured, groups_of
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup

ONE = [NumberedProcess(0, 1)]
TWO = [NumberedProcess(0, 2), NumberedProcess(1, 2)]
PER_GPU = [NumberedProcess(0, 2, "0", True), NumberedProcess(1, 2, "1", True)]


def groups(text: str) -> list[ModelInstanceGroup]:
    whole = "".join(f"instance_group {{ {one} }}" for one in text.split(";") if one.strip())
    return list(text_format.Parse(whole, ModelConfig()).instance_group)


@pytest.mark.parametrize(
    ("asked", "places", "expected"),
    [
        ("", ONE, [""]),  # Triton chooses
        ("", PER_GPU, ["", ""]),
        ("kind: KIND_GPU count: 2 gpus: [0,1]", ONE, ["kind: KIND_GPU count: 2 gpus: [0,1]"]),
        (
            "kind: KIND_GPU count: 2 gpus: [0,1]", PER_GPU,
            ["kind: KIND_GPU count: 2 gpus: [0]", "kind: KIND_GPU count: 2 gpus: [0]"],
        ),
        ("kind: KIND_GPU count: 3 gpus: [1]", PER_GPU, [None, "kind: KIND_GPU count: 3 gpus: [0]"]),
        ("kind: KIND_GPU count: 2", PER_GPU, ["kind: KIND_GPU count: 2"] * 2),
        ("gpus: [0]", PER_GPU, ["gpus: [0]", None]),
        ("kind: KIND_MODEL", PER_GPU, ["kind: KIND_MODEL"] * 2),
        (
            "kind: KIND_CPU count: 3", PER_GPU,
            ["kind: KIND_CPU count: 2", "kind: KIND_CPU count: 1"],
        ),
        ("kind: KIND_CPU", TWO, ["kind: KIND_CPU count: 1", None]),
        ("kind: KIND_CPU count: 4", TWO, ["kind: KIND_CPU count: 2"] * 2),
        (
            "kind: KIND_GPU count: 2 gpus: [0]; kind: KIND_CPU count: 1", PER_GPU,
            ["kind: KIND_GPU count: 2 gpus: [0]; kind: KIND_CPU count: 1", None],
        ),
        ("kind: KIND_CPU count: 0", ONE, ["kind: KIND_CPU"]),
    ],
)  # fmt: skip
def test_instances_of_each_process(
    asked: str, places: list[NumberedProcess], expected: list[str | None]
) -> None:
    found = [groups_of(groups(asked), place) for place in places]
    assert found == [None if one is None else groups(one) for one in expected]


def test_a_missing_gpu() -> None:
    asked = groups("kind: KIND_CPU; kind: KIND_GPU gpus: [0,2]")
    with pytest.raises(InvalidOption, match=r"there is no GPU 2: .* have 2") as error:
        groups_of(asked, PER_GPU[0])
    assert error.value.path == "instance_group[1].gpus"


def test_reported_gpus_are_numbered_as_configured() -> None:
    reported = groups("kind: KIND_GPU count: 2 gpus: [0]; kind: KIND_CPU")
    assert as_configured(reported, PER_GPU[1]) == groups(
        "kind: KIND_GPU count: 2 gpus: [1]; kind: KIND_CPU"
    )
    assert as_configured(reported, ONE[0]) == reported


@pytest.mark.parametrize(
    ("asked", "reported", "same"),
    [
        ("", "kind: KIND_CPU count: 7", True),
        ("count: 2", "kind: KIND_CPU count: 2", True),
        ("count: 2", "kind: KIND_CPU count: 1", False),
        ("kind: KIND_GPU", "kind: KIND_GPU count: 4 gpus: [0,1]", True),
        ("kind: KIND_GPU count: 1", "kind: KIND_CPU count: 1", False),
        ("kind: KIND_GPU count: 2 gpus: [0,1]", "kind: KIND_GPU count: 2 gpus: [1,0]", True),
        ("gpus: [0]", "kind: KIND_GPU count: 1 gpus: [0]", True),
        ("kind: KIND_GPU gpus: [0]", "kind: KIND_GPU count: 1 gpus: [1]", False),
        (
            "kind: KIND_GPU count: 2 gpus: [0,1]",
            "kind: KIND_GPU count: 2 gpus: [1]; kind: KIND_GPU count: 2 gpus: [0]", True,
        ),
        ("kind: KIND_CPU count: 2", "kind: KIND_CPU count: 1; kind: KIND_CPU count: 1", True),
        ("kind: KIND_CPU count: 2", "kind: KIND_CPU count: 1; kind: KIND_CPU count: 2", False),
        ('name: "a" kind: KIND_CPU', 'name: "b" kind: KIND_CPU count: 1', True),
        ("kind: KIND_CPU", "", False),
    ],
)  # fmt: skip
def test_differences_from_the_requested_groups(asked: str, reported: str, same: bool) -> None:
    assert agree(groups(asked), groups(reported)) is same


def test_formatted_groups() -> None:
    found = groups("kind: KIND_GPU count: 2 gpus: [0,1]; kind: KIND_CPU")
    assert described(found) == "2 x GPU 0, 2 x GPU 1, 1 x CPU"
    assert described([]) == "none"
