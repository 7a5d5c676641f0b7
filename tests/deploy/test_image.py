"""The image that `scripts/image` has built, run with a read-only root as an unknown user."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import __version__
from tests.deploy.chart import ROOT, of_kind, render
from tests.support.remote import free_ports
from tests.support.scrape import until
from tests.support.server_process import onnx_examples

IMAGE = f"localhost/headrace:{__version__}"
USER = "54321:0"
# What a container runtime does: the image's root read-only, volumes in it, another user.
RUN = """
mount --bind "$ROOT" "$ROOT"
mount --bind "$MODELS" "$ROOT/models"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$ROOT/cache"
mount -t proc proc "$ROOT/proc"
mount -o remount,ro,bind "$ROOT"
mount --bind /dev "$ROOT/dev"
exec chroot --userspec="$USER_ID" "$ROOT" /usr/bin/env -i "$@"
"""

pytestmark = pytest.mark.slow


def buildah(*words: str) -> str:
    """The output of buildah; skips without it, or where it cannot run."""
    if shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("buildah is not installed, or this is not root")
    environment = {"STORAGE_DRIVER": "vfs"} | os.environ
    done = subprocess.run(["buildah", *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        pytest.skip(f"scripts/image has built no image here: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    inspected = json.loads(buildah("inspect", "--type", "image", IMAGE))
    found: dict[str, Any] = inspected["OCIv1"]["config"]
    sources = subprocess.run(
        ["git", "rev-parse", "HEAD:server"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    if found["Labels"].get("headrace.sources") != sources:
        pytest.skip(f"{IMAGE} is of other sources; scripts/image builds it anew")
    return found


@pytest.fixture(scope="module")
def root(config: dict[str, Any]) -> Iterator[Path]:
    """The files of the image."""
    container = buildah("from", "--pull-never", IMAGE)
    yield Path(buildah("mount", container))
    buildah("rm", container)


def test_the_image_lists_its_packages(root: Path) -> None:
    document = json.loads((root / "usr/share/headrace/sbom.cdx.json").read_text())
    assert document["bomFormat"] == "CycloneDX"
    listed = {each["name"]: each["version"] for each in document["components"]}
    assert listed["headrace"] == __version__
    assert {"fastapi", "numpy", "onnxruntime", "protobuf", "uvloop"} <= set(listed)
    purls = [each["purl"] for each in document["components"] if each["name"] != "headrace"]
    assert all(purl.startswith("pkg:pypi/") for purl in purls)


def test_a_server_with_a_read_only_root(root: Path, config: dict[str, Any], tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    for model in onnx_examples(models).iterdir():  # links do not lead anywhere in the image
        target = model.resolve()
        model.unlink()
        shutil.copytree(target, model)
    [container] = of_kind(render({}), "Deployment")["spec"]["template"]["spec"]["containers"]
    http, grpc, metrics = free_ports(3)
    variables = [
        *config["Env"], *(f"{each['name']}={each['value']}" for each in container["env"]),
        f"HEADRACE_HTTP_PORT={http}", f"HEADRACE_GRPC_PORT={grpc}",
        f"HEADRACE_METRICS_PORT={metrics}",
        *(f"HEADRACE_{door}_ADDRESS=127.0.0.1" for door in ("HTTP", "GRPC", "METRICS")),
        "HEADRACE_SHUTDOWN_DELAY_SECS=0",
    ]  # fmt: skip
    words = [*config["Entrypoint"], *container["args"]]
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "bash", "-ec", RUN, "run", *variables,
         *words],
        env=os.environ | {"ROOT": str(root), "MODELS": str(models), "USER_ID": USER},
        stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            until(lambda: server.poll() is not None or answers(http), "a server that is ready")
            row = [list(range(16))]
            asked = {"inputs": [
                {"name": name, "datatype": "INT32", "shape": [1, 16], "data": row}
                for name in ("INPUT0", "INPUT1")
            ]}  # fmt: skip
            answer = httpx.post(f"http://127.0.0.1:{http}/v2/models/simple/infer", json=asked)
            assert answer.json()["outputs"][0]["data"] == [2 * n for n in range(16)]
            status = Path(f"/proc/{server.pid}/status").read_text()
            assert f"Uid:\t{USER.partition(':')[0]}\t" in status
        finally:
            server.terminate()
            told = server.communicate(timeout=60)[1]
        assert server.returncode == 0, told


def answers(port: int) -> bool:
    """True if the server at this port is ready."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=60)
    except httpx.TransportError:
        return False
    return answer.status_code == 200
