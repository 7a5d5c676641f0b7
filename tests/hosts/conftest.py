"""Real engines for tables, small enough for two cores, each started once for a file of tests."""

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.pages import ROOT

CORES = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the engines' own warnings pass."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Variables for executors: this interpreter, and where tests lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of Ray on this machine, with room for tasks beside two actors."""
    library = pytest.importorskip("ray", reason="Ray is not here; `make test-hosts` installs it")
    library.init(
        num_cpus=CORES + 2, object_store_memory=200 << 20, include_dashboard=False,
        logging_level="warning",
    )  # fmt: skip
    yield library
    library.shutdown()


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """A session of Spark whose two executors are processes on this machine."""
    if shutil.which("java") is None:
        pytest.skip("Java is not here; it is in Debian's package default-jre-headless")
    sql = pytest.importorskip("pyspark.sql", reason="Spark is not here; see `make test-hosts`")
    session = (
        sql.SparkSession.builder.master(f"local-cluster[{CORES},1,1024]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", CORES)
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", 1000)
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
