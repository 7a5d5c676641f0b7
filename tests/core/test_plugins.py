"""Plugins: declared ones are found; broken ones are named and left out."""

import logging
from collections.abc import Callable
from pathlib import Path
from shutil import make_archive
from typing import TypeVar

import pytest

from headrace import build
from headrace.api import handlers
from headrace.cli import command, serve
from headrace.cli.commands import certificates, completion, infer, models, status, stubs, top
from headrace.cli.commands.stores import SIGN
from headrace.core.errors import LoadFailed
from headrace.core.plugins import OWN, PARTS, OptionalPart, PluginGroup, all_plugins
from headrace.doors import clients, server
from headrace.doors.door import DOORS
from headrace.doors.http.app import PAGES
from headrace.engine import padding, sequencing
from headrace.engine.chain import STAGES
from headrace.placement.backend import BACKENDS
from headrace.placement.local.onnx import OnnxBackend
from headrace.placement.upstream import backend as upstreams
from headrace.placement.upstream import options, protocols
from headrace.placement.worker import environment, python_backend
from headrace.plugins import console, dialects, functions, grpcio, kserve_v1, openapi, traces
from headrace.plugins.access.command import ACCESS
from headrace.plugins.access.file import open_access
from headrace.plugins.activator.command import ACTIVATOR
from headrace.plugins.audit import audit_log
from headrace.plugins.cache.flights import SharedCache
from headrace.plugins.capture.commands.replay import REPLAY
from headrace.plugins.capture.opening import open_capture
from headrace.plugins.cuda_memory import opener
from headrace.plugins.ensembles.backend import EnsembleBackend
from headrace.plugins.ensembles.drawing import draw
from headrace.plugins.environments import command as environments
from headrace.plugins.environments.resolve import demanded
from headrace.plugins.explain.commands.explain import EXPLAIN
from headrace.plugins.explain.commands.tune import TUNE
from headrace.plugins.explain.explaining import explain
from headrace.plugins.flight.door import FlightDoor
from headrace.plugins.following import Follower, Reloader
from headrace.plugins.frontends.supervisor import Supervisor
from headrace.plugins.in_process import LoadedInProcess
from headrace.plugins.inboxes.command import CONSUME
from headrace.plugins.inboxes.door import Inboxes
from headrace.plugins.loaders import backend as loaders
from headrace.plugins.nvml import Nvml
from headrace.plugins.on_request import OnRequest
from headrace.plugins.padding import BucketPadding
from headrace.plugins.rate_limiter import rate_limiter
from headrace.plugins.run import command as run
from headrace.plugins.sequences import SequenceBatching
from headrace.plugins.stores.database import database_store
from headrace.plugins.stores.hub import hub_store
from headrace.plugins.stores.mlflow_registry import mlflow_store
from headrace.plugins.stores.objects import object_store
from headrace.plugins.stores.oci import oci_store
from headrace.plugins.stores.signatures import required, signed
from headrace.plugins.stores.web import web_store
from headrace.plugins.traffic.control import TrafficControl, TrafficStage
from headrace.plugins.triton import command as triton
from headrace.plugins.triton.servers import TritonServers
from headrace.plugins.upstream_memory.client import sharing_clients
from headrace.repository.catalogue import STORES

T = TypeVar("T")


def named(group: PluginGroup[T], **targets: T) -> set[tuple[str, str]]:
    """The plugins of a group, which name these targets; mypy checks that they have its type."""
    assert all(group.own()[name].load() == target for name, target in targets.items())
    return {(group.name, name) for name in targets}


def part(of: OptionalPart[T]) -> Callable[[T], str]:
    """The name of a part, for the target that it names; mypy checks that this has its type."""

    def name(target: T) -> str:
        assert of.load() is target
        return of.name

    return name


def install(root: Path, package: str, group: str, **entries: str) -> None:
    """Write metadata of a package with entry points of one group."""
    metadata = root / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the import path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_our_own_plugins_have_the_types_of_their_groups() -> None:
    found = {
        *named(
            BACKENDS, onnxruntime=OnnxBackend.of, python=python_backend.PythonBackend.of,
            sklearn=loaders.sklearn, xgboost=loaders.xgboost, lightgbm=loaders.lightgbm,
            catboost=loaders.catboost, mlflow=loaders.mlflow, pmml=loaders.pmml,
            mojo=loaders.mojo, pytorch=loaders.pytorch,
            triton=upstreams.RemoteBackend.of, ensemble=EnsembleBackend,
        ),
        *named(STAGES, traffic=TrafficStage),
        *named(
            command.COMMANDS, serve=serve.SERVE, infer=infer.INFER, status=status.STATUS,
            top=top.TOP,
            models=models.MODELS, environments=environments.ENVIRONMENTS, triton=triton.TRITON,
            run=run.RUN, consume=CONSUME, certificates=certificates.CERTIFICATES, stubs=stubs.STUBS,
            completion=completion.COMPLETION, access=ACCESS,
            activator=ACTIVATOR, replay=REPLAY, explain=EXPLAIN, tune=TUNE,
        ),
        *named(
            options.PROTOCOLS, v2=options.v2_protocol, tfserving=dialects.tfserving_protocol,
            torchserve=dialects.torchserve_protocol,
        ),
        *named(DOORS, flight=FlightDoor, inboxes=Inboxes),
        *named(
            STORES, s3=object_store, gs=object_store, az=object_store, sqlite=database_store,
            postgresql=database_store, mysql=database_store, http=web_store,
            https=web_store, oci=oci_store, hf=hub_store, mlflow=mlflow_store,
            **{"as": object_store},
        ),
        *named(environment.ENVIRONMENTS, python=demanded),
        *named(command.SOURCES, pools=triton.take_pools),
        *named(PAGES, console=console.add_console, openapi=openapi.add_pages, v1=kserve_v1.add_v1),
    }  # fmt: skip
    assert found == {(group, name) for group, own in OWN.items() for name in own}


def test_our_own_parts_have_the_types_that_their_users_declare() -> None:
    found = {
        part(build.AUDIT)(audit_log),
        part(build.CAPTURE)(open_capture),
        part(build.CACHE)(SharedCache),
        part(build.CUDA_MEMORY)(opener),
        part(handlers.EXPLAIN)(explain),
        part(padding.PADDING)(BucketPadding),
        part(build.NVML)(Nvml),
        part(build.ON_REQUEST)(OnRequest),
        part(build.POLL)(Follower),
        part(build.RATE_LIMITER)(rate_limiter),
        part(build.RELOAD)(Reloader),
        part(build.SIGNATURES)(required),
        part(SIGN)(signed),
        part(models.GRAPHS)(draw),
        part(build.TRACES)(traces.trace_sink),
        part(build.TRAFFIC)(TrafficControl),
        part(clients.ACCESS)(open_access),
        part(clients.GRPCIO)(grpcio.grpcio_server),
        part(protocols.UPSTREAM_MEMORY)(sharing_clients),
        part(python_backend.FUNCTIONS)(functions.load),
        part(python_backend.IN_PROCESS_MODELS)(LoadedInProcess),
        part(sequencing.SEQUENCES)(SequenceBatching),
        part(server.FRONT_ENDS)(Supervisor),
        part(upstreams.TRITON_SERVERS)(TritonServers),
    }
    used_by_programs = {"beam"}  # which imports Apache Beam
    assert found | used_by_programs == PARTS.keys()


def test_every_plugin_is_listed() -> None:
    own = [plugin for plugin in all_plugins() if plugin.package == "headrace"]
    assert len(own) == sum(map(len, OWN.values())) + len(PARTS)


def test_plugins_of_packages_come_after_our_own(path: Path) -> None:
    install(path, "others", BACKENDS.name, upper="collections:OrderedDict")
    found = BACKENDS.installed()
    assert list(found) == [*BACKENDS.own(), "upper"]
    plugin = found["upper"]
    assert (plugin.kind, plugin.package) == ("backend", "others 1.0")
    assert BACKENDS.load(lambda target: target)["upper"] is plugin.load()


def test_a_plugin_of_a_package_in_an_archive_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packed").mkdir()
    install(tmp_path / "packed", "packed", BACKENDS.name, inner="collections:OrderedDict")
    monkeypatch.syspath_prepend(make_archive(str(tmp_path / "all"), "zip", tmp_path / "packed"))
    assert BACKENDS.installed()["inner"].package == "packed 1.0"


@pytest.mark.parametrize(("target", "problem"), [
    ("no_such_module:Plugin", "No module named 'no_such_module'"),
    ("collections:no_such_name", "has no attribute 'no_such_name'"), ("exits:Plugin", "by now"),
])  # fmt: skip
def test_broken_plugins_are_named_and_left_out(
    path: Path, target: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path / "exits.py").write_text("raise SystemExit('by now')")
    install(path, "broken", STAGES.name, bad=target, good="collections:Counter")
    assert set(STAGES.load(lambda loaded: loaded)) - STAGES.own().keys() == {"good"}
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(
        f"plugin left out: stage 'bad' ({target}) of broken 1.0: "
    )
    assert problem in record.getMessage()
    assert record.exc_info is not None


def test_a_duplicate_name_is_reported(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(path, "others", BACKENDS.name, python="others:Python")
    assert BACKENDS.installed()["python"].package == "headrace"
    assert "its name in headrace.backends is taken by" in caplog.text


def test_a_part_that_was_left_out_is_named() -> None:
    wings: OptionalPart[object] = OptionalPart("wings")
    assert wings.target == ""
    with pytest.raises(LoadFailed, match="without its part 'wings'"):
        wings.load()
