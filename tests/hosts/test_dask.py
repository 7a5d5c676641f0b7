"""Runners in workers of Dask."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from tests.hosts.labelled import REPOSITORY, die_once, engines, image_of, labels

ROWS = 2000
PIXELS = [f"p{n}" for n in range(64)]


@pytest.fixture(scope="module")
def frame() -> Any:
    pandas = pytest.importorskip("pandas")
    dask = pytest.importorskip("dask.dataframe", reason="Dask is not here; see `make test-hosts`")
    rows = np.stack([image_of(n).reshape(-1) for n in range(ROWS)])
    table = pandas.DataFrame(rows, columns=PIXELS).assign(id=range(ROWS))
    return dask.from_pandas(table, npartitions=8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    distributed = pytest.importorskip("distributed", reason="Dask's cluster is not here")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None):
        yield


def runner(kind: type[headrace.Runner] = headrace.Runner) -> headrace.Runner:
    return kind(
        REPOSITORY, "digits", columns={"image": PIXELS}, keep={"id": "int64"}, outputs=["label"]
    )


def check(found: Any) -> None:
    """Every row is there once, in order, with its label and the types that were announced."""
    assert found.dtypes.to_dict() == runner().meta.dtypes.to_dict()
    assert found.id.tolist() == list(range(ROWS))
    assert found.index.tolist() == list(range(ROWS))
    assert found.label.tolist() == labels(ROWS)


@pytest.mark.parametrize("scheduler", ["threads", "processes"])
def test_schedulers_of_this_machine(frame: Any, scheduler: str) -> None:
    digits = runner()
    found = frame.map_partitions(digits, meta=digits.meta)
    check(found.compute(scheduler=scheduler, num_workers=2))


@pytest.mark.usefixtures("cluster")
def test_a_worker_has_one_engine_and_its_share_of_the_cores(frame: Any) -> None:
    digits = runner()

    def told(part: Any) -> Any:
        cores = os.environ["OMP_NUM_THREADS"]
        return digits(part).assign(process=os.getpid(), engines=engines(), cores=cores)

    meta = digits.meta.assign(process=1, engines=1, cores="")
    found = frame.map_partitions(told, meta=meta).compute()
    check(found[["id", "label"]])
    assert 1 <= found.process.nunique() <= 2
    assert set(found.engines) == {1}
    assert set(found.cores) == {"1"}


@pytest.mark.usefixtures("cluster")
def test_rows_of_a_killed_worker_are_scored_once(frame: Any, tmp_path: Path) -> None:
    digits, death = runner(), str(tmp_path / "death")

    def dies_once(part: Any) -> Any:
        found = digits(part)
        if ROWS // 2 in found.id.tolist():
            die_once(death, os.getpid())
        return found

    check(frame.map_partitions(dies_once, meta=digits.meta).compute())
    assert os.path.exists(death)
