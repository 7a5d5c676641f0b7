"""Manifests: valid for their schemas, with existing options, ports and paths."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import kubernetes_validate
import pytest
import yaml

from headrace.core.plugins import OWN
from headrace.settings import OPTIONS
from tests.models import onnx_graphs
from tests.support.remote import free_ports

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES_VERSIONS = ("1.31", "1.34")
KSERVE_GRACE_SECS = 30  # Kubernetes' default, which a runtime cannot change
EXIT_SECS = 5  # for the process to end once requests have
DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}

DEFAULTS = {option.name: str(option.default) for option in OPTIONS}

Manifest = dict[str, Any]


def load(path: str) -> Manifest:
    manifest = yaml.load((DEPLOY / path).read_text(), yaml.CSafeLoader)
    assert isinstance(manifest, dict)
    return manifest


DEPLOYMENT = load("kubernetes/deployment.yaml")
SERVICE = load("kubernetes/service.yaml")
BUDGET = load("kubernetes/pod-disruption-budget.yaml")
COMPOSE = load("compose.yaml")
KUSTOMIZATION = load("kubernetes/kustomization.yaml")
RUNTIME = load("kserve/cluster-serving-runtime.yaml")
INFERENCE_SERVICE = load("kserve/inference-service.yaml")
GRAPH = load("kserve/inference-graph.yaml")
INFERENCE_SERVICES = {
    path.stem: load(f"kserve/{path.name}")
    for path in sorted((DEPLOY / "kserve").glob("inference-service*.yaml"))
}

POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(KSERVE_CONTAINER,) = RUNTIME["spec"]["containers"]
CONTAINERS = pytest.mark.parametrize(
    "container", [CONTAINER, KSERVE_CONTAINER], ids=["kubernetes", "kserve"]
)


CONFINED = {
    "runAsNonRoot": True, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def options(container: Manifest) -> dict[str, str]:
    """Options set by `--name=value` arguments and `HEADRACE_*` variables, by name."""
    command, *arguments = container["args"]
    assert command == "serve"
    given = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    names = {option.env: option.name for option in OPTIONS}
    return given | {names[variable["name"]]: variable["value"] for variable in container["env"]}


def ports(container: Manifest) -> dict[str, int]:
    """Ports of the server under these arguments."""
    given = options(container)
    return {door: int(given.get(f"{door}-port", port)) for door, port in DEFAULT_PORTS.items()}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("manifest", [DEPLOYMENT, SERVICE, BUDGET], ids=lambda m: str(m["kind"]))
def test_kubernetes_accepts(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_kubernetes_accepts_the_runtime_container(version: str) -> None:
    containers = RUNTIME["spec"]["containers"]
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "headrace"},
        "spec": {"containers": containers, "volumes": RUNTIME["spec"]["volumes"]},
    }  # fmt: skip
    kubernetes_validate.validate(pod, version, strict=True)


def test_kustomization_lists_every_manifest() -> None:
    others = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert set(KUSTOMIZATION["resources"]) == others - {"kustomization.yaml"}
    [image] = KUSTOMIZATION["images"]
    assert f"{image['name']}:{image['newTag']}" == CONTAINER["image"]


# The SDK registers protobuf files of its own, so it gets an interpreter of its own. Members below
# Kubernetes' classes, such as a container's, are for the tests above.
UNKNOWN_MEMBERS = """
import json, sys
import kserve.models

def unknown(value, kind, path):
    if kind.startswith("list["):
        for item in value:
            yield from unknown(item, kind[5:-1], path)
    elif hasattr(kserve.models, kind):
        model = getattr(kserve.models, kind)
        attributes = {member: attribute for attribute, member in model.attribute_map.items()}
        for member in value:
            if member in attributes:
                inner = model.openapi_types[attributes[member]]
                yield from unknown(value[member], inner, path + [member])
            else:
                yield ".".join(path + [member])

json.dump(list(unknown(json.load(sys.stdin), sys.argv[1], [])), sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("manifest", "model", "expected"), [
    (RUNTIME, "V1alpha1ClusterServingRuntime", []),
    *((service, "V1beta1InferenceService", []) for service in INFERENCE_SERVICES.values()),
    (GRAPH, "V1alpha1InferenceGraph", []),
    (RUNTIME | {"spec": {"formats": []}}, "V1alpha1ClusterServingRuntime", ["spec.formats"]),
], ids=["runtime", *INFERENCE_SERVICES, "graph", "misspelt"])  # fmt: skip
def test_kserve_knows_every_member(manifest: Manifest, model: str, expected: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNKNOWN_MEMBERS, model],
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def test_runtime_has_what_kserve_requires() -> None:
    assert RUNTIME["apiVersion"] == "serving.kserve.io/v1alpha1"
    assert KSERVE_CONTAINER["name"] == "kserve-container"
    assert RUNTIME["spec"]["protocolVersions"] == ["v1", "v2", "grpc-v2"]
    # It is selected by name alone: other models of a cluster must not be affected.
    formats = RUNTIME["spec"]["supportedModelFormats"]
    assert not any(each["autoSelect"] for each in formats)
    assert options(KSERVE_CONTAINER)["model-repository"] == "/mnt/models"


def test_the_runtime_has_every_format_with_a_backend() -> None:
    found = {each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]}
    # ONNX has the name of KServe; upstreams and ensembles are no files.
    backends = {*OWN["headrace.backends"], "onnx"}
    assert found == backends - {"onnxruntime", "triton", "ensemble"}


@pytest.mark.parametrize("service", INFERENCE_SERVICES.values(), ids=INFERENCE_SERVICES)
def test_inference_services_use_the_runtime(service: Manifest) -> None:
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
    formats = {supported["name"] for supported in RUNTIME["spec"]["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats
    assert model["storageUri"]
    assert {each["name"] for each in model.get("env", ())} <= {option.env for option in OPTIONS}
    for port in model.get("ports", ()):
        assert port["containerPort"] == ports(KSERVE_CONTAINER)["grpc"]


@CONTAINERS
def test_options_exist(container: Manifest) -> None:
    assert set(options(container)) <= {option.name for option in OPTIONS}
    assert {variable["name"] for variable in container["env"]} <= {o.env for o in OPTIONS}


def test_kubernetes_ports_are_the_servers() -> None:
    listening = ports(CONTAINER)
    assert {port["name"]: port["containerPort"] for port in CONTAINER["ports"]} == listening
    offered = {port["targetPort"]: port["port"] for port in SERVICE["spec"]["ports"]}
    assert offered == {door: port for door, port in listening.items() if door != "metrics"}
    annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(listening["metrics"])


def test_kserve_ports_are_the_servers() -> None:
    listening = ports(KSERVE_CONTAINER)
    assert [port["containerPort"] for port in KSERVE_CONTAINER["ports"]] == [listening["http"]]
    assert KSERVE_CONTAINER["readinessProbe"]["httpGet"]["port"] == listening["http"]
    annotations = RUNTIME["spec"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == str(listening["metrics"])


def test_selectors_find_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"].items()
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels
    assert BUDGET["spec"]["selector"]["matchLabels"].items() <= labels
    assert SERVICE["spec"]["selector"].items() <= labels


def test_models_are_mounted_read_only_where_the_server_looks() -> None:
    mount, _ = CONTAINER["volumeMounts"]
    volume, _ = POD["volumes"]
    assert mount["name"] == volume["name"]
    assert mount["mountPath"] == options(CONTAINER)["model-repository"]
    assert mount["readOnly"] is volume["persistentVolumeClaim"]["readOnly"] is True


def test_the_compose_file_runs_the_container_of_the_pods() -> None:
    [service] = COMPOSE["services"].values()
    assert service["command"] == CONTAINER["args"]
    assert service["environment"] == {each["name"]: each["value"] for each in CONTAINER["env"]}
    assert service["stop_grace_period"] == f"{POD['terminationGracePeriodSeconds']}s"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    targets = {volume.rpartition(":ro")[0] or volume for volume in service["volumes"]}
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert {target.rpartition(":")[2] for target in targets} == mounts


@pytest.mark.parametrize(("container", "grace"), [
    (CONTAINER, POD["terminationGracePeriodSeconds"]), (KSERVE_CONTAINER, KSERVE_GRACE_SECS),
], ids=["kubernetes", "kserve"])  # fmt: skip
def test_pod_outlives_the_servers_own_shutdown(container: Manifest, grace: int) -> None:
    given = DEFAULTS | options(container)
    shutdown = int(given["shutdown-delay-secs"]) + int(given["exit-timeout-secs"])
    assert shutdown + EXIT_SECS <= grace


@pytest.mark.parametrize(("container", "volumes"), [
    (CONTAINER, POD["volumes"]), (KSERVE_CONTAINER, RUNTIME["spec"]["volumes"]),
], ids=["kubernetes", "kserve"])  # fmt: skip
def test_environments_have_a_place(container: Manifest, volumes: list[Manifest]) -> None:
    assert container["securityContext"]["readOnlyRootFilesystem"]
    cache = options(container)["environment-cache"]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == cache]
    assert not mount.get("readOnly", False)
    (volume,) = [v for v in volumes if v["name"] == mount["name"]]
    limit = int(options(container)["environment-cache-bytes"])
    assert volume["emptyDir"] == {"sizeLimit": "8Gi"}
    assert 0 < limit < 8 << 30


@CONTAINERS
def test_container_is_confined(container: Manifest) -> None:
    context = POD["securityContext"] | container["securityContext"]
    assert context["runAsUser"] > 0
    assert {name: context[name] for name in CONFINED} == CONFINED
    for bound in ("requests", "limits"):
        assert set(container["resources"][bound]) == {"cpu", "memory"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Ports of a server that runs as in the Deployment, with one model."""
    onnx_graphs.write_model(tmp_path, "m", onnx_graphs.identity())
    free = dict(zip(DEFAULT_PORTS, free_ports(len(DEFAULT_PORTS)), strict=True))
    given = options(CONTAINER) | {"model-repository": str(tmp_path), "shutdown-delay-secs": "0"}
    given |= {f"{door}-port": str(port) for door, port in free.items()}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    server = subprocess.Popen(
        [Path(sys.executable).with_name("headrace"), "serve", *arguments],
    )
    try:
        yield free
    finally:
        server.terminate()
        server.wait(30)


def eventual_status(url: str, seconds: float) -> int:
    """Status of the first successful answer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urlopen(url, timeout=5) as answer:
                status: int = answer.status
                return status
        except URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@pytest.mark.slow
def test_the_server_answers_the_probes_of_the_manifests(running: dict[str, int]) -> None:
    annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    asked = {("metrics", annotations["prometheus.io/path"])}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = CONTAINER[probe]["httpGet"]
        asked.add((get["port"], get["path"]))
    assert len(asked) == 3
    for door, path in asked:
        assert eventual_status(f"http://127.0.0.1:{running[door]}{path}", seconds=60) == 200
