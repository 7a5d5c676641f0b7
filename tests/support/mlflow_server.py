"""A real server of MLflow on 127.0.0.1, with SQLite and files below a folder."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.remote import free_port
from tests.support.started import until_answers


class MlflowServer:
    """The server, which hands on its clients' files. `client` is MLflow's own."""

    def __init__(self, folder: Path) -> None:
        self.host = f"127.0.0.1:{free_port()}"
        self.url = f"http://{self.host}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        from mlflow import MlflowClient  # late: every process of the tests collects its users

        self.client = MlflowClient(self.url)

    def __enter__(self) -> Self:
        environment = os.environ | {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        path = self._folder / "mlflow.log"
        with path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1",
                 "--port", self.host.rpartition(":")[2], "--workers", "1",
                 "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db",
                 "--artifacts-destination", str(self._folder / "artifacts")],
                stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        try:
            until_answers(f"{self.url}/health", self._process, path, 240)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)

    def register(self, name: str, files: Mapping[str, bytes], folder: Path) -> str:
        """Register these files as a new version of a model; returns its number."""
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        if not self.client.search_registered_models(f"name = '{name}'"):
            self.client.create_registered_model(name)
        run: Any = self.client.create_run("0")
        self.client.log_artifacts(run.info.run_id, str(folder), "model")
        source = f"runs:/{run.info.run_id}/model"
        made = self.client.create_model_version(name, source, run.info.run_id)
        return str(made.version)

    def file(self, name: str) -> Path:
        """The only file of this name that the server keeps."""
        [found] = (self._folder / "artifacts").rglob(name)
        return found
