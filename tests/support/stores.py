"""Directories as stores, and the models of stores."""

from collections.abc import Iterable
from pathlib import Path

import httpx

from headrace.repository.catalogue import Catalogue, Directory
from headrace.repository.layout import ModelSource
from tests.support.server_process import ServerProcess


def catalogue(
    paths: Iterable[Path],
    files: Iterable[Path] = (),
    config_name: str = "",
    namespacing: bool = False,
    name: str = "",
) -> Catalogue:
    """The catalogue of repositories on this machine; the rest as in `Catalogue`."""
    stores = tuple(Directory(path, name) for path in paths)
    return Catalogue(stores, tuple(files), config_name, namespacing, name)


def scan(paths: Iterable[Path], config_name: str = "", name: str = "") -> list[ModelSource]:
    """The models of repositories on this machine."""
    return catalogue(paths, (), config_name, False, name).sources()[0]


def constant_of(server: ServerProcess, name: str) -> float:
    """The number with which the newest version of a model of `onnx_graphs.constant` answers."""
    document = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [0]}]}
    url = f"{server.url}/v2/models/{name}/infer"
    response = httpx.post(url, json=document, timeout=60, trust_env=False, verify=False)
    assert response.status_code == 200, response.text
    found: float = response.json()["outputs"][0]["data"][0]
    return found
