"""The Helm chart: linted, rendered with each of its values changed, and valid for real schemas."""

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace import __version__
from headrace.cli.command import CommandParser
from headrace.plugins.activator.command import ACTIVATOR
from headrace.plugins.activator.relay import Tally
from headrace.settings import OPTIONS
from tests.deploy.chart import CHART, DEPLOY, ROOT, Manifest, of_kind, render, tool, validate
from tests.models import onnx_graphs
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess

VALUES: Manifest = yaml.load((CHART / "values.yaml").read_text(), yaml.CSafeLoader)
HPA = {"mode": "hpa"}
KEDA = {"mode": "keda"}
TO_ZERO: Manifest = {
    "autoscaling": KEDA | {"concurrency": 8}, "activator": {"enabled": True},
}  # fmt: skip

# Each value of the chart, changed, with what else it needs to have an effect.
VARIED: list[tuple[str, Any, Manifest]] = [
    ("nameOverride", "scores", {}),
    ("image.repository", "registry.example/headrace", {}),
    ("image.tag", "1.2.3", {}),
    ("image.digest", "sha256:" + "0" * 64, {}),
    ("image.pullPolicy", "Always", {}),
    ("image.pullSecrets", ["registry"], {}),
    ("replicas", 5, {}),
    ("models.claim", "others", {}),
    ("models.repositories", ["s3://bucket/models"], {"storeCache": {"size": "9Gi"}}),
    ("models.controlMode", "poll", {}),
    ("settings", {"model-memory-budget": 4_000_000_000, "load-on-request": True}, {}),
    ("drain.delaySeconds", 7, {}),
    ("drain.exitSeconds", 90, {}),
    ("drain.marginSeconds", 20, {}),
    ("probes.startupSeconds", 601, {}),
    ("probes.livenessFailures", 5, {}),
    ("probes.strictReadiness", True, {}),
    ("rollout.maxSurge", "50%", {}),
    ("rollout.maxUnavailable", 1, {}),
    ("rollout.progressDeadlineSeconds", 60, {}),
    ("environments.size", "20Gi", {}),
    ("environments.claim", "environments", {}),
    ("environments.buildFirst", True, {}),
    ("storeCache.size", "40Gi", {}),
    ("storeCache.claim", "stores", {}),
    ("signatures.secret", "publishers", {}),
    ("scratch.size", "500M", {}),
    ("access.secret", "access", {}),
    ("access.key", "rules.toml", {"access": {"secret": "access"}}),
    ("tls.secret", "certificate", {}),
    ("tls.clientCertificates", True, {"tls": {"secret": "certificate"}}),
    ("credentials.secret", "store", {}),
    ("credentials.files", "key-files", {}),
    ("resources.requests.cpu", "500m", {}),
    ("resources.requests.memory", "1Gi", {}),
    ("resources.limits.cpu", "8", {}),
    ("resources.limits.memory", "16Gi", {}),
    ("account.memoryPercent", 25, {}),
    ("gpu.count", 1, {}),
    ("gpu.resource", "nvidia.com/mig-1g.10gb", {"gpu": {"count": 1}}),
    ("gpu.runtimeClass", "nvidia", {}),
    ("service.type", "LoadBalancer", {}),
    ("service.annotations", {"example.com/a": "b"}, {}),
    ("serviceAccount.create", False, {}),
    ("serviceAccount.name", "mine", {"serviceAccount": {"create": False}}),
    ("serviceAccount.annotations", {"eks.amazonaws.com/role-arn": "arn"}, {}),
    ("podDisruptionBudget.maxUnavailable", "20%", {}),
    ("topologySpread", [], {}),
    ("networkPolicy.enabled", False, {}),
    ("networkPolicy.clients", [{"podSelector": {"matchLabels": {"a": "b"}}}], {}),
    ("networkPolicy.monitors", [], {}),
    ("networkPolicy.egress", [], {}),
    ("monitor.kind", "service", {}),
    ("monitor.interval", "5s", {"monitor": {"kind": "pod"}}),
    ("monitor.labels", {"release": "prometheus"}, {"monitor": {"kind": "pod"}}),
    ("monitor.tokenSecret", "observer", {"monitor": {"kind": "pod"}}),
    ("autoscaling.mode", "hpa", {}),
    ("autoscaling.minReplicas", 1, {"autoscaling": HPA}),
    ("autoscaling.maxReplicas", 99, {"autoscaling": HPA}),
    ("autoscaling.pendingRequests", 4, {"autoscaling": HPA}),
    ("autoscaling.concurrency", 0.5, {"autoscaling": HPA}),
    ("autoscaling.throughput", 100, {"autoscaling": KEDA}),
    ("autoscaling.latencySeconds", 0.25, {"autoscaling": KEDA}),
    ("autoscaling.latencyQuantile", 0.5, {"autoscaling": KEDA | {"latencySeconds": 0.25}}),
    ("autoscaling.cpuPercent", 70, {"autoscaling": HPA}),
    ("autoscaling.scaleDownSeconds", 60, {"autoscaling": HPA}),
    ("autoscaling.prometheus", "https://prometheus.example", {"autoscaling": KEDA}),
    ("autoscaling.pollingSeconds", 5, {"autoscaling": KEDA}),
    ("activator.enabled", True, {"autoscaling": KEDA | {"concurrency": 8}}),
    ("activator.waitSeconds", 60, TO_ZERO),
    ("activator.pollingSeconds", 1, TO_ZERO),
    ("activator.cooldownSeconds", 60, TO_ZERO),
    ("activator.resources.requests.cpu", "1", TO_ZERO),
    ("activator.resources.requests.memory", "256Mi", TO_ZERO),
    ("activator.resources.limits.cpu", "2", TO_ZERO),
    ("activator.resources.limits.memory", "1Gi", TO_ZERO),
    ("activator.nodeSelector", {"kubernetes.io/arch": "amd64"}, TO_ZERO),
    ("activator.tolerations", [{"key": "nvidia.com/gpu", "operator": "Exists"}], TO_ZERO),
    ("activator.affinity", {"podAntiAffinity": {}}, TO_ZERO),
    ("activator.priorityClassName", "high", TO_ZERO),
    ("pod.runAsUser", None, {}),
    ("pod.fsGroup", 2000, {}),
    ("pod.annotations", {"example.com/a": "b"}, {}),
    ("pod.labels", {"team": "scores"}, {}),
    ("pod.nodeSelector", {"kubernetes.io/arch": "amd64"}, {}),
    ("pod.tolerations", [{"key": "nvidia.com/gpu", "operator": "Exists"}], {}),
    ("pod.affinity", {"podAntiAffinity": {}}, {}),
    ("pod.priorityClassName", "high", {}),
    ("extraEnv", [{"name": "AWS_REGION", "value": "eu-west-1"}], {}),
    ("extraVolumes", [{"name": "more", "emptyDir": {}}], {}),
    ("extraVolumeMounts", [{"name": "models", "mountPath": "/more"}], {}),
]


def leaves(values: Manifest, path: str = "") -> Iterator[str]:
    """The values by path; maps and lists that are empty in values.yaml are whole values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def with_value(values: Manifest, path: str, value: Any) -> Manifest:
    changed = copy.deepcopy(values)
    *parents, last = path.split(".")
    inner = changed
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    return changed


def container(manifests: list[Manifest]) -> Manifest:
    [found] = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(manifests: list[Manifest]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(manifests)["env"]}


def test_helm_lints_the_chart() -> None:
    done = subprocess.run([tool("helm"), "lint", "--strict", CHART], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_chart_has_the_version_of_the_server() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert str(chart["appVersion"]) == __version__


def test_manifests_and_compose_file_are_what_the_chart_gives() -> None:
    tool("helm")
    done = subprocess.run(
        [ROOT / "scripts" / "manifests", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_kubectl_builds_the_kustomization() -> None:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", DEPLOY / "kubernetes"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(done.stdout)]
    assert sorted(kinds) == [
        "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "Service", "ServiceAccount"
    ]  # fmt: skip


def test_every_value_is_varied() -> None:
    assert sorted(path for path, *_ in VARIED) == sorted(leaves(VALUES))


@pytest.mark.slow
@pytest.mark.parametrize(("path", "value", "beside"), VARIED, ids=[path for path, *_ in VARIED])
def test_a_changed_value_changes_valid_manifests(path: str, value: Any, beside: Manifest) -> None:
    before, after = render(beside), render(with_value(beside, path, value))
    assert before != after
    for manifest in after:
        validate(manifest)


@pytest.mark.slow
def test_kubectl_reads_every_kind_of_kubernetes() -> None:
    values = {"autoscaling": HPA, "environments": {"buildFirst": True}, "tls": {"secret": "t"}}
    for manifest in render(values):
        done = subprocess.run(
            [tool("kubectl"), "label", "--local", "-f", "-", "-o", "json", "read=yes"],
            input=json.dumps(manifest), capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["metadata"]["labels"]["read"] == "yes"


@pytest.mark.parametrize(("values", "text"), [
    ({"replica": 2}, "replica"),
    ({"drain": {"exitSeconds": "soon"}}, "exitSeconds"),
    ({"settings": {"exit-timeout-secs": 9}}, "exit-timeout-secs is what other values"),
    ({"settings": {"http-port": 9}}, "http-port cannot be changed"),
    ({"models": {"claim": ""}}, "expected a claim or repositories"),
    ({"models": {"claim": "", "repositories": ["/b"]}, "environments": {"buildFirst": True}},
     "environments.buildFirst"),
    ({"models": {"repositories": ["s3://b/m"]}}, "stores need storeCache.size"),
    ({"autoscaling": HPA | {"latencySeconds": 1}}, "need the mode keda"),
    ({"activator": {"enabled": True}}, "activator: needs autoscaling.mode keda"),
    ({"activator": {"enabled": True}, "autoscaling": KEDA}, "activator: expected autoscaling.conc"),
    ({"autoscaling": KEDA | {"cpuPercent": 1}}, "needs the mode hpa"),
    ({"autoscaling": HPA | {"pendingRequests": None}}, "expected pendingRequests"),
    ({"resources": {"limits": {"memory": "2X"}}, "account": {"memoryPercent": 5}}, "2X: expected"),
    ({"image": {"digest": "latest"}}, "digest"),
    ({"nameOverride": "a.b"}, "nameOverride"),
    ({"nameOverride": "a" * 64}, "nameOverride"),
])  # fmt: skip
def test_wrong_values_are_refused(values: Manifest, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        render(values)


@pytest.mark.parametrize("path", [
    "drain.exitSeconds", "probes.startupSeconds", "models.controlMode", "monitor.interval",
    "podDisruptionBudget.maxUnavailable", "autoscaling.maxReplicas", "activator.waitSeconds",
])  # fmt: skip
def test_a_value_that_is_needed_is_not_null(path: str) -> None:
    with pytest.raises(ValueError, match=f"missing property '{path.split('.')[1]}'"):
        render(with_value({}, path, None))


@pytest.mark.parametrize("path", ["models.repositories", "image.pullSecrets", "environments.size"])
def test_a_null_is_left_out(path: str) -> None:
    for manifest in render(with_value({}, path, None)):
        validate(manifest)


def test_the_grace_period_follows_the_drain_times() -> None:
    manifests = render({"drain": {"delaySeconds": 3, "exitSeconds": 100, "marginSeconds": 6}})
    pod = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 109
    assert environment(manifests)["HEADRACE_SHUTDOWN_DELAY_SECS"] == "3"
    assert environment(manifests)["HEADRACE_EXIT_TIMEOUT_SECS"] == "100"


@pytest.mark.parametrize(("limit", "percent", "expected"), [
    ("16Gi", 25, 4 << 30), ("1500M", 10, 150_000_000), ("2Gi", 12.5, 256 << 20),
])  # fmt: skip
def test_the_account_follows_the_memory_limit(limit: str, percent: float, expected: int) -> None:
    given = {"resources": {"limits": {"memory": limit}}, "account": {"memoryPercent": percent}}
    assert environment(render(given))["HEADRACE_MAX_ADMITTED_BYTES"] == str(expected)


def test_variables_are_options_of_the_server() -> None:
    everything = {
        "access": {"secret": "a"}, "tls": {"secret": "t", "clientCertificates": True},
        "account": {"memoryPercent": 10}, "models": {"controlMode": "explicit"},
        "storeCache": {"size": "4Gi"}, "signatures": {"secret": "s"},
        "settings": {"model-memory-budget": 4_000_000_000, "load-on-request": True},
    }  # fmt: skip
    given = environment(render(everything))
    assert set(given) <= {option.env for option in OPTIONS}
    assert given["HEADRACE_MODEL_MEMORY_BUDGET"] == "4000000000"
    assert given["HEADRACE_LOAD_ON_REQUEST"] == "true"
    assert given["HEADRACE_STORE_CACHE_BYTES"] == str(3 << 30)
    assert given["HEADRACE_ACCESS"] == "/etc/headrace/access/access.toml"


def test_secrets_are_mounted_where_the_server_looks() -> None:
    manifests = render({"access": {"secret": "a"}, "tls": {"secret": "t"}})
    pod = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    assert secrets == {"access": "a", "tls": "t"}
    mounts = {m["name"]: Path(m["mountPath"]) for m in container(manifests)["volumeMounts"]}
    given = environment(manifests)
    assert Path(given["HEADRACE_ACCESS"]).parent == mounts["access"]
    assert Path(given["HEADRACE_HTTP_SERVER_KEY"]).parent == mounts["tls"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(manifests)[probe]["httpGet"]["scheme"] == "HTTPS"


def test_a_slice_of_a_gpu_is_a_limit() -> None:
    manifests = render({"gpu": {"count": 1, "resource": "nvidia.com/gpu.shared"}})
    assert container(manifests)["resources"]["limits"]["nvidia.com/gpu.shared"] == "1"


def test_environments_are_built_first_with_the_same_cache() -> None:
    manifests = render({"environments": {"buildFirst": True}})
    pod = of_kind(manifests, "Deployment")["spec"]["template"]["spec"]
    [first] = pod["initContainers"]
    serving = container(manifests)
    assert first["args"] == ["environments", "build", "/models"]
    assert first["volumeMounts"] == serving["volumeMounts"]
    assert [each for each in serving["env"] if each in first["env"]] == first["env"]
    assert first["securityContext"] == serving["securityContext"]


def test_every_part_selects_the_pods() -> None:
    manifests = render({"monitor": {"kind": "pod"}}, release="scores")
    template = of_kind(manifests, "Deployment")["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    selectors = [
        of_kind(manifests, "Deployment")["spec"]["selector"]["matchLabels"],
        of_kind(manifests, "Service", "scores-headrace")["spec"]["selector"],
        of_kind(manifests, "Service", "scores-headrace-grpc")["spec"]["selector"],
        of_kind(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        of_kind(manifests, "PodMonitor")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in selectors)
    assert of_kind(manifests, "Service", "scores-headrace-grpc")["spec"]["clusterIP"] == "None"


def test_a_service_monitor_finds_each_pod_once() -> None:
    """By the port of the one Service that it selects: others have the servers' pods, too."""
    asked = {"kind": "service", "labels": {"release": "prometheus"}, "tokenSecret": "observer"}
    manifests = render(TO_ZERO | {"monitor": asked}, release="scores")
    for manifest in manifests:
        validate(manifest)
    template = of_kind(manifests, "Deployment", "scores-headrace")["spec"]["template"]
    monitor = of_kind(manifests, "ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    [service] = [
        each for each in manifests
        if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
    ]  # fmt: skip
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    [port] = service["spec"]["ports"]
    [endpoint] = monitor["endpoints"]
    assert endpoint["port"] == port["name"]
    [container] = template["spec"]["containers"]
    assert port["targetPort"] in [each["name"] for each in container["ports"]]
    assert not [each for each in manifests if each["kind"] == "PodMonitor"]


def named(manifests: list[Manifest]) -> set[tuple[str, str]]:
    return {(each["kind"], each["metadata"]["name"]) for each in manifests}


def generated(owner: str, random: str) -> str:
    """A name that Kubernetes generates from that of the owner, with some random characters."""
    return f"{owner}-"[:58] + random


@pytest.mark.parametrize("length", [8, 37, 38, 41, 53])
def test_keda_counts_the_pods_of_any_release(length: int) -> None:
    manifests = render({"autoscaling": KEDA}, release="r" * length)
    name = of_kind(manifests, "Deployment")["metadata"]["name"]
    [trigger] = of_kind(manifests, "ScaledObject")["spec"]["triggers"]
    pods = re.search('pod=~"(.*)"', trigger["metadata"]["query"])
    assert pods is not None
    for digest in ("7d9f8b6c5", "7d9f8b6c54"):
        assert re.fullmatch(pods[1], generated(f"{name}-{digest}", "x2v4z"))


def test_labels_of_an_activator_fit() -> None:
    manifests = render(TO_ZERO | {"nameOverride": "n" * 63}, release="r" * 53)
    for manifest in manifests:
        validate(manifest)
        labels = manifest["metadata"]["labels"].values()
        assert max(map(len, labels)) <= 63
        assert len(manifest["metadata"]["name"]) <= 63


@pytest.mark.parametrize("release", ["on", "2024", "1e3", "null", "my.models"])
def test_texts_that_yaml_takes_for_others(release: str) -> None:
    """Names of releases, claims and Secrets may be numbers, and words such as `on`."""
    one = {"secret": "2024"}
    values = {
        "nameOverride": "no", "image": {"pullSecrets": ["2024"]}, "credentials": {"files": "2024"},
        "models": {"claim": "2024", "repositories": ["/some # place: here"]}, "access": one,
        "environments": {"claim": "2024"}, "storeCache": {"claim": "2024"}, "signatures": one,
        "tls": one, "serviceAccount": {"create": False, "name": "2024"},
        "monitor": {"kind": "pod", "tokenSecret": "2024"}, **TO_ZERO,
    }  # fmt: skip
    manifests = render(values, release)
    for manifest in manifests:
        validate(manifest)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == release
        assert re.fullmatch(r"[a-z0-9-]{1,63}", manifest["metadata"]["name"])
    deployment = of_kind(manifests, "Deployment", f"{release.replace('.', '-')}-no")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "2024"
    assert pod["imagePullSecrets"] == [{"name": "2024"}]
    assert "--model-repository=/some # place: here" in pod["containers"][0]["args"]


def test_the_activator_is_what_keda_and_the_servers_know() -> None:
    manifests = render(TO_ZERO | {"networkPolicy": {"clients": [{"podSelector": {}}]}}, "scores")
    for manifest in manifests:
        validate(manifest)
    scaled = of_kind(manifests, "ScaledObject")["spec"]
    assert scaled["minReplicaCount"] == 0
    [trigger] = [each for each in scaled["triggers"] if each["type"] == "metrics-api"]
    deployment = of_kind(manifests, "Deployment", "scores-headrace-activator")
    service = of_kind(manifests, "Service", "scores-headrace-activator")
    assert trigger["metadata"]["url"].startswith("http://scores-headrace-keda.default:8002/")
    asked = of_kind(manifests, "Service", "scores-headrace-keda")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for each in (service, asked):
        assert each["spec"]["selector"].items() <= labels.items()
    # Its own pods are no servers.
    servers = of_kind(manifests, "Service", "scores-headrace")["spec"]["selector"]
    assert not servers.items() <= labels.items()
    policy = of_kind(manifests, "NetworkPolicy", "scores-headrace")["spec"]
    admitted = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert admitted.items() <= labels.items()
    parser = CommandParser("headrace")
    ACTIVATOR(parser.add_subparsers())
    given = parser.parse_args(deployment["spec"]["template"]["spec"]["containers"][0]["args"])
    assert given.forwards == ["0.0.0.0:8000=scores-headrace:8000",
                              "0.0.0.0:8001=scores-headrace:8001"]  # fmt: skip
    shown = {family.name for family in Tally().collect()}
    assert trigger["metadata"]["valueLocation"] in shown


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_clients_reach_no_metrics(kind: str) -> None:
    """Of a Service that may be reached from outside the cluster; annotations may keep it inside."""
    given = {"type": kind, "annotations": {"example.com/internal": "true"}}
    manifests = render(TO_ZERO | {"service": given, "monitor": {"kind": "service"}})
    services = [each for each in manifests if each["kind"] == "Service"]
    ports = {
        each["metadata"]["name"]: [port["port"] for port in each["spec"]["ports"]]
        for each in services
        if each["spec"].get("type") == kind
    }
    assert ports == {"headrace": [8000, 8001], "headrace-activator": [8000, 8001]}
    for name in ports:
        service = of_kind(services, "Service", name)
        assert service["metadata"]["annotations"] == given["annotations"]
    inside = of_kind(services, "Service", "headrace-keda")["spec"]
    assert ([port["port"] for port in inside["ports"]], inside.get("type")) == ([8002], None)


@pytest.mark.parametrize(("given", "release"), [
    ([{}, {}], ["r" * 52 + "a", "r" * 52 + "b"]),
    ([{"nameOverride": "n" * 62 + last} for last in "ab"], ["r", "r"]),
])  # fmt: skip
def test_names_that_begin_alike_stay_apart(given: list[Manifest], release: list[str]) -> None:
    """Releases of one namespace, and charts of one release."""
    one, other = (
        render(TO_ZERO | values, name) for values, name in zip(given, release, strict=True)
    )
    assert not named(one) & named(other)
    assert max(len(name) for _, name in named(one)) <= 63
    pods = [each["spec"]["template"] for each in other if each["kind"] == "Deployment"]
    for deployment in (each for each in one if each["kind"] == "Deployment"):
        wanted = deployment["spec"]["selector"]["matchLabels"].items()
        assert not any(wanted <= pod["metadata"]["labels"].items() for pod in pods)


_CALLS = frozenset({"sum", "rate", "histogram_quantile", "by", "or", "vector", "le"})


def metrics_of(manifest: Manifest) -> set[str]:
    """The metrics that an autoscaler asks for."""
    if manifest["kind"] == "HorizontalPodAutoscaler":
        return {
            each["pods"]["metric"]["name"]
            for each in manifest["spec"]["metrics"]
            if each["type"] == "Pods"
        }
    queries = [
        each["metadata"]["query"]
        for each in manifest["spec"]["triggers"]
        if each["type"] == "prometheus"
    ]
    bare = [re.sub(r"\{[^}]*\}|\[\w+\]", "", query) for query in queries]
    return set(re.findall(r"[a-z_]{2,}", " ".join(bare))) - _CALLS


def test_the_metrics_of_autoscalers_exist(tmp_path: Path) -> None:
    targets = {"concurrency": 4, "throughput": 100, "latencySeconds": 0.2}
    keda = of_kind(render({"autoscaling": KEDA | targets}), "ScaledObject")
    hpa = of_kind(render({"autoscaling": HPA | {"concurrency": 4}}), "HorizontalPodAutoscaler")
    validate(keda)
    validate(hpa)
    asked = metrics_of(keda) | metrics_of(hpa)
    assert len(asked) == 4
    onnx_graphs.write_model(tmp_path, "m", onnx_graphs.identity())
    with ServerProcess(tmp_path) as server, Scraper(server.metrics) as scraper:
        asked_for = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]}
        httpx.post(f"http://{server.http}/v2/models/m/infer", json=asked_for)
        text = scraper.now().text
    assert asked <= set(re.findall(r"^([a-z_]+)", text, re.MULTILINE))
