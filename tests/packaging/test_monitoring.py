"""Rules for Prometheus and the dashboard for Grafana: valid, tested, and about existing metrics."""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard

from headrace.client.blocking import Client
from headrace.engine.metrics import (
    ADMISSION_FAMILIES,
    BACKEND_FAMILIES,
    ENDPOINT_FAMILIES,
    GPU_FAMILIES,
    GPU_MEMORY_FAMILIES,
    SERVER_FAMILIES,
    version_families,
)
from headrace.observability.statistics import MetricsOptions
from headrace.plugins.traffic.control import FAMILIES as TRAFFIC_FAMILIES
from tests.models.python_models import tensors, write_python_model
from tests.support.command import run
from tests.support.remote import free_ports
from tests.support.scrape import Metrics, until
from tests.support.server_process import ServerProcess, clean_server, onnx_examples

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((DEPLOY / "grafana" / "headrace.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OF_TARGETS = {"job", "instance"}  # labels that Prometheus adds
OF_VERSIONS = {"model", "version"}
ECHO = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def tool(name: str) -> str:
    """The path of a program of Debian's package prometheus."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return found


def check(*command: str | Path) -> None:
    """Run promtool; its complaints are the failure."""
    ran = subprocess.run(
        [tool("promtool"), *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    check("check", "config", PROMETHEUS / "prometheus.yml")
    check("check", "rules", "--lint-fatal", PROMETHEUS / "rules.yaml")


def test_promtool_runs_the_unit_tests_of_the_rules() -> None:
    check("test", "rules", PROMETHEUS / "rules.test.yaml")


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules.test.yaml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in RULES if "alert" in rule}


def test_promtool_accepts_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (expression, _) in enumerate(targets())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    check("check", "rules", file)


def targets() -> Iterator[tuple[str, str]]:
    """Expression and legend of each query of the dashboard."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def _queries(panel: dict[str, Any]) -> Iterator[str]:
    """The queries of a panel, for all servers and models."""
    for target in panel["targets"]:
        text = re.sub(r"\$(job|instance|model)\b", ".*", target["expr"])
        yield text.replace("$__rate_interval", "5m")


# --- expressions


class Expression:
    """The parts of an expression: metrics with the labels that select them, and grouping labels."""

    def __init__(self, text: str) -> None:
        text = re.sub(r'"[^"]*"', '""', text)
        text = re.sub(r"\[[^]]*\]|\boffset\s+\w+", "", text)
        self.groups: set[str] = set()
        self.grouped = bool(re.search(r"\b(sum|min|max)\b", text))
        self.selectors: list[tuple[str, set[str]]] = []
        text = re.sub(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", self._group, text)
        text = re.sub(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", self._selector, text)
        for name in re.findall(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()", text):
            if name not in ("or", "and", "unless"):
                self.selectors.append((name, set()))

    def _group(self, found: re.Match[str]) -> str:
        self.groups |= set(re.findall(r"\w+", found[1]))
        return ""

    def _selector(self, found: re.Match[str]) -> str:
        self.selectors.append((found[1], set(re.findall(r"(\w+)\s*[=!]", found[2]))))
        return " "


def test_parts_of_an_expression() -> None:
    found = Expression('sum by (a, le) (rate(m_x{b=~"c d", e!="f"}[5m])) / n > 0 or up offset 5m')
    assert found.groups == {"a", "le"}
    assert found.selectors == [("m_x", {"b", "e"}), ("n", set()), ("up", set())]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that has answered over both protocols, with a worker, whose model is in a store."""
    root = onnx_examples(tmp_path_factory.mktemp("models"))
    config = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "FP32", "1"))
    write_python_model(source := tmp_path_factory.mktemp("source"), "worker", ECHO, config)
    store = f"sqlite:///{tmp_path_factory.mktemp('store')}/models.db"
    cache = tmp_path_factory.mktemp("cache")
    pushed = run("models", "push", str(source), store)
    assert pushed.returncode == 0, pushed.stderr
    options = [
        "--metrics-config=native_histograms=true", f"--model-repository={store}",
        f"--store-cache={cache}",
    ]  # fmt: skip
    with clean_server(root, options=options) as process:
        row = np.ones((1, 16), np.int32)
        call(process, "simple", INPUT0=row, INPUT1=row)
        yield process


def call(server: ServerProcess, model: str, **inputs: np.ndarray[Any, Any]) -> None:
    """A request over each protocol."""
    for url in (server.url, f"grpc://{server.grpc}"):
        with Client(url) as client:
            client.infer(model, inputs)


@cache
def exported(address: str) -> dict[str, set[str]]:
    """The labels of all samples by name: those of a running server, and what the tables say of
    families without samples there.
    """
    text = httpx.get(f"http://{address}/metrics", trust_env=False).text
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    found = _of_tables() | {"up": set()}
    for name, kind in types.items():
        parts = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        for part in parts:
            samples = Metrics(text).samples(name + part)
            labels = set[str]().union(*(own for own, _ in samples))
            found[name + part] = labels | found.get(name + part, set())
    for rule in RULES:
        if "record" in rule:
            found[rule["record"]] = Expression(rule["expr"]).groups - {"le"}
    return found


def _of_tables() -> dict[str, set[str]]:
    families: list[tuple[Any, set[str]]] = [
        (ADMISSION_FAMILIES, set()), (SERVER_FAMILIES, set()), (GPU_FAMILIES, {"gpu_uuid"}),
        (GPU_MEMORY_FAMILIES, OF_VERSIONS | {"gpu_uuid"}), (TRAFFIC_FAMILIES, {"model"}),
        (ENDPOINT_FAMILIES, OF_VERSIONS | {"endpoint"}),
        (version_families(MetricsOptions()), OF_VERSIONS),
        (BACKEND_FAMILIES, OF_VERSIONS | {"backend"}),
    ]  # fmt: skip
    return {one.name: labels | set(one.labels) for table, labels in families for one in table}


def missing(text: str, told: str, known: Mapping[str, set[str]]) -> list[str]:
    """The names in an expression, and labels in it and in a text about it, that do not exist."""
    expression, problems, labels = Expression(text), list[str](), set[str]()
    for name, selected in expression.selectors:
        if name not in known:
            problems.append(f"no metric {name}")
            continue
        own = known[name] | OF_TARGETS
        problems += [f"no label {label} of {name}" for label in sorted(selected - own)]
        labels |= own
    left = expression.groups if expression.grouped else labels
    named = set(re.findall(r"(?:\{\{|\$labels\.)(\w+)", told))
    for label in sorted((expression.groups - labels) | (named - left)):
        problems.append(f"no label {label}")
    return [f"{problem}: {text}" for problem in problems]


def test_metrics_and_labels_of_the_rules_exist(server: ServerProcess) -> None:
    known = exported(server.metrics)
    problems = [
        problem
        for rule in RULES
        for problem in missing(rule["expr"], json.dumps(rule.get("annotations", "")), known)
    ]
    assert not problems, "\n".join(problems)


def test_metrics_and_labels_of_the_dashboard_exist(server: ServerProcess) -> None:
    known = exported(server.metrics)
    problems = [problem for one in targets() for problem in missing(*one, known)]
    queries = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if "label" in one
               and one["type"] == "query"]  # fmt: skip
    for query in queries:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert found, query
        problems += missing(f"sum by ({found[2]}) ({found[1]})", "", known)
    assert not problems, "\n".join(problems)
    assert missing("rate(nv_nothing[5m])", "", known)  # such would be found
    assert missing('headrace_ready{door="http"}', "", known)
    assert missing("sum by (door) (headrace_ready)", "", known)
    assert missing("sum by (model) (nv_inference_count)", "{{version}}", known)


def test_panels_do_not_overlap_and_are_wired() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters)) > 0
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= variables | {"__rate_interval"}, target["expr"]


def lost(given: object, read: object, path: str = "dashboard") -> list[str]:
    """Places of a document that are not in, or not the same as in, what was read from it."""
    if isinstance(given, dict) and isinstance(read, dict):
        missing = [f"{path}.{name}" for name in given if name not in read]
        common = [name for name in given if name in read]
        return missing + [at for n in common for at in lost(given[n], read[n], f"{path}.{n}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        pairs = enumerate(zip(given, read, strict=True))
        return [at for n, (one, other) in pairs for at in lost(one, other, f"{path}[{n}]")]
    return [] if given == read else [path]


def read_by_grafana(document: dict[str, Any]) -> Any:
    """A dashboard as Grafana's own classes have it: options by the type of each panel, queries by
    their data source.
    """
    register_default_plugins()
    return json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(document)))


def test_grafana_knows_every_member_of_the_dashboard() -> None:
    assert lost(DASHBOARD, read_by_grafana(DASHBOARD)) == []
    wrong = copy.deepcopy(DASHBOARD)
    wrong["panels"][1]["options"]["colourMode"] = "value"
    wrong["panels"][1]["targets"][0]["expression"] = "up"
    at = "dashboard.panels[1]"
    found = lost(wrong, read_by_grafana(wrong))
    assert set(found) == {f"{at}.targets[0].expression", f"{at}.options.colourMode"}


# --- a real Prometheus


@contextmanager
def prometheus(folder: Path, target: str, *features: str) -> Iterator[httpx.Client]:
    """Prometheus with the rules, which scrapes a server each second."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "rules.yaml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    [port] = free_ports(1)
    command = [
        tool("prometheus"), f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
        f"--enable-feature={','.join(features)}",
    ]  # fmt: skip
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False) as api,
    ):
        try:
            until(lambda: _answers(api), "Prometheus")
            yield api
        finally:
            process.terminate()
            process.wait(60)


def _answers(api: httpx.Client) -> bool:
    try:
        return api.get("/status/buildinfo").status_code == 200
    except httpx.TransportError:
        return False


def query(api: httpx.Client, text: str) -> list[Any]:
    """The samples of an expression."""
    answer = api.get("/query", params={"query": text}).json()
    assert answer["status"] == "success", (text, answer)
    return list(answer["data"]["result"])


# Panels about failures, and about parts that the server of these tests does not have.
WITHOUT_DATA = {
    "Failed answers", "Captured payloads", "Time until certificates expire", "Healthy upstreams",
    "Calls to upstreams", "Requests by backend", "Versions that get traffic",
    "Mean duration of an ensemble's steps", "Memory", "Utilization",
}  # fmt: skip


@pytest.mark.slow
def test_panels_have_data(server: ServerProcess, tmp_path: Path) -> None:
    with prometheus(tmp_path, server.metrics) as api:

        def silent() -> set[str]:
            call(server, "digits", image=np.zeros((1, 8, 8), np.float32))
            return {
                panel["title"] for panel in PANELS
                if not any(query(api, text) for text in _queries(panel))
            }  # fmt: skip

        until(lambda: silent() == WITHOUT_DATA, "data of the other panels")


@pytest.mark.slow
def test_prometheus_reads_the_server_and_evaluates_everything(
    server: ServerProcess, tmp_path: Path
) -> None:
    features = "native-histograms", "exemplar-storage"
    with prometheus(tmp_path, server.metrics, *features) as api:
        found = partial(query, api)
        until(lambda: found("headrace_ready") != [], "the first scrape")
        [target] = api.get("/targets").json()["data"]["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        [histogram] = found('headrace_request_duration_seconds{model="simple"}')
        assert histogram["histogram"][1]["count"] == "2"  # native
        for panel in PANELS:
            for text in _queries(panel):
                found(text)

        def evaluated() -> bool:
            groups = api.get("/rules").json()["data"]["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert not [rule for rule in rules if rule["health"] == "err"], rules
            return len(rules) == len(RULES) and all(rule["health"] == "ok" for rule in rules)

        until(evaluated, "every rule evaluated")
        firing = found("ALERTS{alertstate='firing'}")
        assert [one["metric"]["alertname"] for one in firing] == []
