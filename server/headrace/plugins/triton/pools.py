"""Models on Tritons, described in Python: `Pool` writes the repository and detects drift.

    from headrace.triton import Group, Model, Pool

    pool = Pool(
        [Model("resnet", groups=[Group(gpus=[0, 1], count=2)], max_batch_size=32)],
        endpoints=["grpc://gpu-1:8001", "grpc://gpu-2:8001"],
        load=True,
    )
    pool.write("models")
    for found in pool.drift():
        print(found)

A pool without endpoints is for Tritons that the server starts. Large modules are only imported when
needed.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from headrace.connections.endpoint import Endpoint
    from headrace.placement.upstream.options import RemoteOptions
    from headrace.protocol.pb.model_config_pb2 import ModelConfig

_AT_ONCE = 16  # servers queried concurrently

__all__ = ["Drift", "Group", "Model", "Pool"]


@dataclass(frozen=True, slots=True)
class Group:
    """One instance group: `count` instances on each of the `gpus`, on all by default."""

    count: int = 1
    gpus: Sequence[int] = ()
    kind: Literal["gpu", "cpu", "model", "auto"] = "gpu"


@dataclass(frozen=True, slots=True)
class Model:
    """One model. Unset properties are the servers' choice.

    `remote` is its name there, `version` its version, if different. For a Triton that the server
    starts, `backend` is Triton's (`tensorrt`, `python`, ...), or `platform`, and `files` the
    directory of the version directories. `config` is further configuration in protobuf text format,
    and `parameters` are further parameters.
    """

    name: str
    groups: Sequence[Group] = ()
    max_batch_size: int | None = None
    remote: str = ""
    version: int = 0
    backend: str = ""
    platform: str = ""
    files: str | os.PathLike[str] = ""
    parameters: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    config: str = ""


@dataclass(frozen=True, slots=True)
class Drift:
    """A difference between a server and its description; `field` is "model" if it is missing."""

    model: str
    endpoint: str
    field: str
    asked: str
    reported: str

    def __str__(self) -> str:
        return f"{self.model} on {self.endpoint}: {self.field}: {self.asked}, not {self.reported}"


@dataclass(frozen=True, slots=True)
class Pool:
    """Models, and the servers that run them: `endpoints`, or Tritons that the server starts.

    With `load` this server loads the models there, with `unload` it unloads them in the end, and
    with `strict` it does not serve a model with differences. `parameters` apply to all models.
    Tritons are started as `processes`, or one for each of the `gpus`; `program` is Triton's
    executable.
    """

    models: Sequence[Model]
    endpoints: Sequence[str] = ()
    load: bool = False
    unload: bool = False
    strict: bool = False
    parameters: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    processes: int | Literal["per-gpu"] = 1
    gpus: Sequence[int | str] = ()
    program: str = ""

    def __post_init__(self) -> None:
        """Raises `ValueError` for invalid combinations."""
        names = [model.name for model in self.models]
        for model in self.models:
            if names.count(model.name) > 1:
                raise ValueError(f"model {model.name!r} is there twice")
            if not model.name or model.name.startswith(".") or "/" in model.name:
                raise ValueError(f"{model.name!r} cannot be a model's name")
            here = bool(model.backend or model.platform)
            if self.endpoints and (here or model.files):
                raise ValueError(
                    f"model {model.name!r}: backend, platform and files are for a pool without"
                    " endpoints, whose Tritons the server starts"
                )
            if not self.endpoints and not (here and model.files):
                raise ValueError(
                    f"model {model.name!r}: give endpoints to the pool, or a backend and files to"
                    " the model, for a Triton that the server starts"
                )
        if self.endpoints and (self.processes != 1 or self.gpus or self.program):
            raise ValueError("processes, gpus and program are for a pool without endpoints")
        if not self.endpoints and (self.load or self.unload):
            raise ValueError("load and unload are for a pool with endpoints")

    def config(self, name: str) -> "ModelConfig":
        """The configuration of a model, as a message; raises `ValueError` and `KeyError`."""
        from google.protobuf import text_format

        from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup

        model = next((one for one in self.models if one.name == name), None)
        if model is None:
            raise KeyError(name)
        config = ModelConfig()
        try:
            text_format.Parse(model.config, config)
        except text_format.ParseError as error:
            raise ValueError(f"model {name!r}: config: {error}") from None
        config.name, config.backend = name, "triton"
        if model.max_batch_size is not None:
            config.max_batch_size = model.max_batch_size
        for group in model.groups:
            kind = ModelInstanceGroup.Kind.Value(f"KIND_{group.kind.upper()}")
            config.instance_group.add(kind=kind, count=group.count, gpus=group.gpus)
        for key, value in self._parameters(model).items():
            config.parameters[key].string_value = value
        return config

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """Write or update a model repository; returns its path.

        Only differing files are written. For managed Tritons, the version directories are linked,
        unless they are there already. Other models in the directory are left alone. Raises
        `OSError`, and `ValueError` for an invalid configuration.
        """
        from google.protobuf import text_format

        root = Path(directory)
        for model in self.models:
            place = root / model.name
            place.mkdir(parents=True, exist_ok=True)
            text = text_format.MessageToString(self.config(model.name))
            if model.max_batch_size == 0:  # written although it is the default
                text += "max_batch_size: 0\n"
            files = Path(os.path.abspath(model.files))
            if model.files and files != Path(os.path.abspath(place)):
                _link(place, files)
            target = place / "config.pbtxt"
            if not target.is_file() or target.read_text(encoding="utf-8") != text:
                whole = place / ".config.pbtxt"
                whole.write_text(text, encoding="utf-8")
                whole.replace(target)
        return root

    def options(self) -> list[str]:
        """The options of `headrace serve` that go with the repository."""
        found = []
        if self.program:
            found.append(f"--triton-server={self.program}")
        if self.processes != 1:
            found.append(f"--triton-processes={self.processes}")
        if self.gpus:
            found.append(f"--triton-gpus={','.join(map(str, self.gpus))}")
        return found

    def drift(self, timeout: float = 10.0) -> list[Drift]:
        """The differences between the servers and the description; empty if there are none.

        Each server is queried for each model, within `timeout` seconds. A pool without endpoints
        has no servers that can be queried from here: the server that starts them has metrics about
        them. Raises `ValueError` for an invalid pool.
        """
        found: list[Drift] = []
        for model in self.models if self.endpoints else ():
            found += drift_of(model.name, self.config(model.name), timeout=timeout)
        return found

    def _parameters(self, model: Model) -> dict[str, str]:
        own: dict[str, str | int | float | bool] = {}
        if self.endpoints:
            own["endpoints"] = ",".join(self.endpoints)
        own |= {"remote_load": True} if self.load else {}
        own |= {"remote_unload": True} if self.unload else {}
        own |= {"remote_drift": "refuse"} if self.strict else {}
        own |= {"remote_model": model.remote} if model.remote else {}
        own |= {"remote_version": model.version} if model.version else {}
        own |= {"remote_backend": model.backend} if model.backend else {}
        own |= {"remote_platform": model.platform} if model.platform else {}
        given = {**own, **self.parameters, **model.parameters}
        return {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in given.items()
        }


def drift_of(
    model: str,
    config: "ModelConfig",
    root: Path = Path(),
    versions: Sequence[int] = (),
    timeout: float = 10.0,
) -> list[Drift]:
    """The differences between the servers of one model and its configuration.

    `versions` are its version directories, in `root`. Raises `ValueError` for invalid options.
    """
    from headrace.core.errors import InvalidOption, LoadFailed
    from headrace.placement.upstream.options import RemoteOptions

    parameters = {name: one.string_value for name, one in config.parameters.items()}
    try:
        options = [RemoteOptions.of(parameters, model, one, root) for one in versions or [0]]
        endpoints = options[0].resolve()
    except (InvalidOption, LoadFailed) as error:
        raise ValueError(f"model {model!r}: {error}") from None
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        asked = threads.map(lambda one: _drift_at(one, model, config, options, timeout), endpoints)
        return [drift for of_server in asked for drift in of_server]


def _drift_at(
    endpoint: "Endpoint",
    model: str,
    config: "ModelConfig",
    options: "Sequence[RemoteOptions]",
    seconds: float,
) -> "list[Drift]":
    """The differences of one server; a server that cannot be asked is one."""
    from headrace.core.errors import LoadFailed
    from headrace.placement.upstream.connection import CallFailed
    from headrace.placement.upstream.protocols import ProtocolClients
    from headrace.placement.upstream.reconciler import differences

    found: dict[Drift, None] = {}
    for one in options:
        try:
            clients = ProtocolClients(one, model)
            said = clients.visit(endpoint, lambda client: client.describe(seconds))
        except (CallFailed, LoadFailed) as error:
            problem = error if isinstance(error, LoadFailed) else error.text or error.failure.error
            return [Drift(model, endpoint.name, "model", "loaded", str(problem))]
        for each in differences(config, said, one.version):
            found[Drift(model, endpoint.name, each.path, each.asked, each.reported)] = None
    return list(found)


def _link(place: Path, files: Path) -> None:
    """Link all of `files` except a configuration into `place`, replacing earlier links."""
    wanted = {one.name: one for one in files.iterdir() if not one.name.startswith(".")}
    wanted.pop("config.pbtxt", None)
    for entry in place.iterdir():
        if entry.is_symlink() and entry.name not in wanted:
            entry.unlink()
    for name, one in wanted.items():
        link = place / name
        if link.is_symlink() and Path(os.readlink(link)) == one:
            continue
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise FileExistsError(f"{link} is there already, and is no link to {one}")
        link.symlink_to(one)
