from pathlib import Path

import pytest

from headrace.core.errors import InvalidOption
from headrace.placement.upstream.triton_options import (
    NumberedProcess,
    TritonControl,
    TritonOptions,
    check_managed,
    is_managed,
)
from headrace.plugins.triton.groups import gpu_count, places
from headrace.plugins.triton.process import Secret, arguments, environment


@pytest.mark.parametrize(
    ("options", "own", "found", "expected"),
    [
        (TritonOptions(), {}, 2, [NumberedProcess(0, 1)]),
        (TritonOptions(gpus=["2", "3"]), {}, 4, [NumberedProcess(0, 1, "2,3")]),
        (TritonOptions(processes="2"), {}, 0, [NumberedProcess(0, 2), NumberedProcess(1, 2)]),
        (
            TritonOptions(processes="per-gpu"), {}, 2,
            [NumberedProcess(0, 2, "0", True), NumberedProcess(1, 2, "1", True)],
        ),
        (
            TritonOptions(processes="per-gpu", gpus=["GPU-5ab", "3"]), {}, 8,
            [NumberedProcess(0, 2, "GPU-5ab", True), NumberedProcess(1, 2, "3", True)],
        ),
        (
            TritonOptions(processes="per-gpu"), {"CUDA_VISIBLE_DEVICES": "4, 6"}, 8,
            [NumberedProcess(0, 2, "4", True), NumberedProcess(1, 2, "6", True)],
        ),
    ],
)  # fmt: skip
def test_processes(
    options: TritonOptions, own: dict[str, str], found: int, expected: list[NumberedProcess]
) -> None:
    assert places(options, own, found) == expected


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_count(tmp_path) == 2
    assert gpu_count(tmp_path / "nowhere") == 0
    with pytest.raises(InvalidOption, match="this machine has no GPU"):
        places(TritonOptions(processes="per-gpu"), {}, 0)


def test_the_environment_has_the_listed_variables() -> None:
    own = {
        "PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "HEADRACE_HTTP_PORT": "1",
        "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1", "LICENCE": "y",
    }  # fmt: skip
    options = TritonOptions(passed=["LICENCE"])
    expected = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "LICENCE": "y"}
    assert environment(own, options, NumberedProcess(0, 1)) == expected | {
        "CUDA_VISIBLE_DEVICES": "0,1"
    }
    assert environment(own, options, NumberedProcess(1, 2, "1", True)) == expected | {
        "CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip


def test_the_command() -> None:
    options = TritonOptions(arguments=["--log-verbose=1"], exit_secs=3)
    found = arguments("/bin/t", options, Path("/m"), 8123, "region-", Secret("key"))
    assert found[0] == "/bin/t"
    assert found[-1] == "--log-verbose=1"
    assert {
        "--model-repository=/m", "--model-control-mode=explicit", "--grpc-address=127.0.0.1",
        "--grpc-port=8123", "--exit-timeout-secs=3", "--allow-http=false",
        "--backend-config=python,shm-region-prefix-name=region-",
    } <= set(found)  # fmt: skip
    assert Secret("key").argument.endswith(":headrace-key=key")
    assert Secret("key").metadata == (("triton-grpc-protocol-headrace-key", "key"),)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"remote_load": "yes"}, "expected true or false, got 'yes'"),
        ({"remote_unload": "true"}, "set that, too"),
        ({"remote_drift": "fail"}, "expected warn or refuse, got 'fail'"),
        ({"drift_interval_secs": "-1"}, "expected whole seconds"),
        ({"drift_interval_secs": "1.5"}, "expected whole seconds"),
        ({"drift_interval_secs": "9" * 5000}, "expected whole seconds"),
    ],
)
def test_invalid_settings_of_a_model(given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidOption, match=text) as error:
        TritonControl.of(given)
    assert error.value.path == f"parameters['{next(iter(given))}']"


def test_settings_of_a_model() -> None:
    assert TritonControl.of({}) == TritonControl(False, False, False, 60)
    given = {
        "remote_load": "true", "remote_unload": "true", "remote_drift": "refuse",
        "drift_interval_secs": "0",
    }  # fmt: skip
    assert TritonControl.of(given) == TritonControl(True, True, True, 0)


def test_models_for_tritons_of_this_server() -> None:
    assert is_managed({"remote_backend": "python"})
    assert is_managed({"remote_platform": "tensorrt_plan"})
    assert not is_managed({"remote_backend": "", "endpoints": "grpc://a:1"})
    check_managed({"remote_backend": "python", "timeout_secs": "3"})
    for name in ("endpoints", "remote_model", "remote_load", "tls_key"):
        with pytest.raises(InvalidOption, match="servers that others have started") as error:
            check_managed({"remote_backend": "python", name: "x"})
        assert error.value.path == f"parameters['{name}']"
