"""A full disk affects neither models nor the readiness of the server."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.core.errors import ServerError
from tests.faults.chaos import eventually
from tests.faults.stuck_models import calm, client_of, told, write_neighbours, write_told
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that fills the disk, and its neighbours."""
    root = tmp_path_factory.mktemp("neighbours")
    write_neighbours(root)
    write_told(root, "filler")
    return root


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """The command line that runs another one with a disk of 1 MiB at `tmp_path
    "disk"`.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1m tmpfs {disk} && exec "$@"'
    prefix = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount a disk of his own")
    return prefix


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_full_disk(models: Path, protocol: str, tmp_path: Path, small_disk: list[str]) -> None:
    """The disk of temporary files, the log and traces."""
    disk = tmp_path / "disk"
    options = [
        f"--log-file={disk}/log", "--access-log", f"--trace-config=triton,file={disk}/trace",
        "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1",
        "--model-control-mode=explicit", "--load-model=*", "--load-overrides=files",
    ]  # fmt: skip
    with (
        ServerProcess(
            models, options=options, environment={"TMPDIR": str(disk)}, prefix=small_disk
        ) as server,
        calm(server) as others_serve,
        client_of(server, protocol) as client,
    ):
        files = {"1/model.onnx": (models / "neighbour/1/model.onnx").read_bytes()}
        client.load("brought", config='{"max_batch_size": 8}', files=files)
        assert told(client, "filler", "fill") == "No space left on device"
        assert others_serve()
        with pytest.raises(ServerError, match="cannot be kept: No space left on device"):
            client.load("brought", config="{}", files=files | {"1/more": bytes(256 << 10)})
        assert client.model_ready("brought")  # as it was
        assert others_serve()
        for name in ("filler", "neighbour"):
            client.load(name)
            assert client.model_ready(name)
        assert others_serve()
        eventually(lambda: re.search("cannot write the log .*No space left", server.log))
