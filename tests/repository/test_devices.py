"""Which instances are on which GPU."""

from dataclasses import dataclass

import pytest
from google.protobuf import text_format

from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.completion import GpuUse, device_problems, may_use_gpus, on_devices

NO, BY_DEFAULT = GpuUse(), GpuUse(preferred=True)
OBSTACLE = GpuUse(preferred=True, obstacle="it has no CUDA")
GPU, CPU, MODEL = "kind: KIND_GPU", "kind: KIND_CPU", "kind: KIND_MODEL"


@dataclass(frozen=True)
class Machine:
    """So many GPUs, or a reason for none."""

    count: int
    problem: str = ""


def config_of(groups: str) -> ModelConfig:
    return text_format.Parse(f'name: "m" {groups}', ModelConfig())


def described(config: ModelConfig) -> list[str]:
    return [
        f"{group.Kind.Name(group.kind)} {group.count} {list(group.gpus)}"
        for group in config.instance_group
    ]


@pytest.mark.parametrize(("groups", "count", "use", "placed"), [
    # A model that says nothing.
    ("", 0, BY_DEFAULT, []), ("", 2, NO, []), ("", 2, OBSTACLE, []),
    ("", 2, BY_DEFAULT, ["KIND_GPU 1 [0, 1]"]),
    # A group that leaves it to the server.
    ("instance_group { count: 3 }", 0, BY_DEFAULT, ["KIND_CPU 3 []"]),
    ("instance_group { count: 3 }", 2, NO, ["KIND_CPU 3 []"]),
    ("instance_group { count: 3 }", 2, OBSTACLE, ["KIND_CPU 3 []"]),
    ("instance_group { count: 3 }", 2, BY_DEFAULT, ["KIND_GPU 3 [0, 1]"]),
    # One that also lists GPUs: all of them have to be there.
    ("instance_group { gpus: 1 }", 2, BY_DEFAULT, ["KIND_GPU 0 [1]"]),
    ("instance_group { gpus: 1 }", 2, NO, ["KIND_GPU 0 [1]"]),
    ("instance_group { gpus: 1 }", 2, OBSTACLE, ["KIND_CPU 0 []"]),
    ("instance_group { gpus: [ 1, 2 ] }", 2, BY_DEFAULT, ["KIND_CPU 0 []"]),
    ("instance_group { gpus: -1 }", 2, BY_DEFAULT, ["KIND_CPU 0 []"]),
    ("instance_group { gpus: 0 }", 0, NO, ["KIND_CPU 0 []"]),
    # One on GPUs, and those that are not.
    (f"instance_group {{ {GPU} }}", 3, NO, ["KIND_GPU 0 [0, 1, 2]"]),
    (f"instance_group {{ {GPU} gpus: [ 2, 0 ] }}", 3, NO, ["KIND_GPU 0 [2, 0]"]),
    (f"instance_group {{ {GPU} }}", 0, NO, ["KIND_GPU 0 []"]),
    (f"instance_group [ {{ {CPU} }}, {{ {MODEL} }} ]", 2, BY_DEFAULT, ["KIND_CPU 0 []",
     "KIND_MODEL 0 []"]),
])  # fmt: skip
def test_placed(groups: str, count: int, use: GpuUse, placed: list[str]) -> None:
    config = config_of(groups)
    result = on_devices(config, count, use)
    assert described(result) == placed
    assert config == config_of(groups)
    assert on_devices(result, count, use) == result


@pytest.mark.parametrize(("groups", "preferred", "answer"), [
    ("", True, True), ("", False, False), ("instance_group { }", True, True),
    ("instance_group { }", False, False), ("instance_group { gpus: 0 }", False, True),
    (f"instance_group {{ {GPU} }}", False, True),
    (f"instance_group [ {{ {CPU} }}, {{ {MODEL} }} ]", True, False),
])  # fmt: skip
def test_gpus_are_looked_for_only_where_it_matters(
    groups: str, preferred: bool, answer: bool
) -> None:
    assert may_use_gpus(config_of(groups), preferred) is answer


@pytest.mark.parametrize(("groups", "machine", "use", "says"), [
    (f"instance_group {{ {GPU} }}", Machine(2), NO, []),
    (f"instance_group {{ {CPU} }}", Machine(0, "no driver"), OBSTACLE, []),
    (f"instance_group [ {{ {CPU} }}, {{ {GPU} }} ]", Machine(0, "no driver"), NO,
     ["instance_group[1].kind: instance group m_1 of model m has kind KIND_GPU but no"
     " GPUs are available: no driver"]),
    (f'instance_group {{ name: "g" {GPU} gpus: 5 }}', Machine(0, "no driver"), OBSTACLE,
     ["instance_group[0].kind: instance group g of model m has kind KIND_GPU but no GPUs"
     " are available: no driver; besides, it has no CUDA"]),
    (f"instance_group {{ {GPU} }}", Machine(1), OBSTACLE,
     ["instance_group[0].kind: instance group m_0 of model m has kind KIND_GPU, but it"
     " has no CUDA"]),
    (f"instance_group {{ {GPU} gpus: [ 0, 2, -1 ] }}", Machine(2), NO,
     ["instance_group[0].gpus: instance group m_0 of model m specifies invalid or"
     f" unsupported gpu id {gpu}. GPUs are: 0, 1" for gpu in (2, -1)]),
])  # fmt: skip
def test_problems(groups: str, machine: Machine, use: GpuUse, says: list[str]) -> None:
    config = on_devices(config_of(groups), machine.count, use)
    found = [f"{p.path}: {p.text}" for p in device_problems(config, machine, use)]
    assert found == says
