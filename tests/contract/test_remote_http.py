"""Models that another server runs, asked over HTTP: in binary, as JSON, and with packed bodies."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest
from tests.contract.conftest import CARRIERS, CLIENTS
from tests.contract.test_remote import INTS
from tests.support.client import Client
from tests.support.remote import values, write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

JSON = {"http_tensors": "json"}
FORMS: dict[str, dict[str, str]] = {"binary": {}, "json": JSON, "gzip": {"compression": "gzip"}}


@pytest.fixture(scope="module")
def there(servers: Callable[[str], ServerProcess]) -> ServerProcess:
    """The server that runs the models."""
    return servers("default")


@pytest.fixture(scope="module")
def models(there: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose models all run on the other server."""
    root = tmp_path_factory.mktemp("front")
    for name in ("simple", *(f"identity_{datatype}" for datatype in Datatype)):
        for form, given in FORMS.items():
            write_remote(root, f"{name}_{form}", there.url, remote_model=name, **given)
    write_remote(root, "mixed", there.grpc, there.url, remote_model="row_sum", max_in_flight="2")
    return root


@pytest.fixture(scope="module")
def front(models: Path) -> Iterator[ServerProcess]:
    """The server before the other one."""
    with clean_server(models, tracebacks=False) as process:
        yield process


@pytest.fixture(scope="module")
def split_front(models: Path) -> Iterator[ServerProcess]:
    """The same with front ends."""
    with clean_server(models, options=CARRIERS["frontends"]) as process:
        yield process


@pytest.fixture(
    scope="module",
    params=["grpc", *(pytest.param(k, marks=pytest.mark.slow) for k in ("http", "frontends"))],
)
def pair(request: pytest.FixtureRequest, there: ServerProcess) -> Iterator[tuple[Client, Client]]:
    """The model's server, and the one before it."""
    kind: str = request.param
    before: ServerProcess = request.getfixturevalue(
        "split_front" if kind == "frontends" else "front"
    )
    client = CLIENTS.get(kind, CLIENTS["grpc"])
    with client(there) as direct, client(before) as through:
        yield direct, through


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("datatype", Datatype)
def test_every_datatype(pair: tuple[Client, Client], datatype: Datatype, form: str) -> None:
    direct, through = pair
    text = datatype is Datatype.BYTES
    if not direct.carries(datatype) or (text and not direct.carries_bytes):
        pytest.skip("this form of tensors has no place for it")
    for shape in ((1, 3), (8, 2), (2, 0)):
        array = values(datatype, shape)
        if text:
            array = np.full(shape, "Grüße".encode(), object)
        there, here = (
            client.infer(name, {"INPUT0": array}, id="an id")
            for client, name in (
                (direct, f"identity_{datatype}"),
                (through, f"identity_{datatype}_{form}"),
            )
        )
        assert (here.id, here.datatypes) == (there.id, there.datatypes)
        assert here["OUTPUT0"].shape == there["OUTPUT0"].shape
        assert here["OUTPUT0"].tolist() == there["OUTPUT0"].tolist()


def test_numbers_that_are_none(pair: tuple[Client, Client]) -> None:
    array = np.array([[np.nan, np.inf, -np.inf, 0.1]], np.float32)
    for form in FORMS:
        answer = pair[1].infer(f"identity_FP32_{form}", {"INPUT0": array})
        np.testing.assert_array_equal(answer["OUTPUT0"], array)


def test_bytes_that_are_no_text_are_refused_where_they_cannot_be_sent(
    pair: tuple[Client, Client], pool: ThreadPoolExecutor
) -> None:
    """Those that wait with them are answered."""
    _, through = pair
    if not through.carries_bytes:
        pytest.skip("this form of tensors has no place for it")

    def ask(element: bytes) -> str:
        array = np.full((1, 2), element, object)
        try:
            answer = through.infer("identity_BYTES_json", {"INPUT0": array})
        except InvalidRequest as error:
            return str(error)
        return str((answer["OUTPUT0"] == array).all())

    good, bad = np.array(list(pool.map(ask, [b"a", b"\xff"] * 16))).reshape(16, 2).T.tolist()
    assert set(good) == {"True"}
    assert all("'INPUT0' holds bytes that are not UTF-8" in text for text in bad)


def test_a_large_tensor(pair: tuple[Client, Client]) -> None:
    array = np.arange(1 << 20, dtype=np.float32).reshape(8, -1)
    for form in FORMS:
        answer = pair[1].infer(f"identity_FP32_{form}", {"INPUT0": array})
        np.testing.assert_array_equal(answer["OUTPUT0"], array)


def test_requests_with_parameters_keep_theirs(
    pair: tuple[Client, Client], pool: ThreadPoolExecutor
) -> None:
    _, through = pair

    def ask(number: int) -> bool:
        wanted = bool(number % 2)
        form = list(FORMS)[number % 3]
        answer = through.infer(
            f"simple_{form}", {"INPUT0": INTS, "INPUT1": INTS},
            parameters={"headrace_timing": True} if wanted else {},
        )  # fmt: skip
        assert answer["OUTPUT0"].tolist() == (INTS + INTS).tolist()
        return ("compute_us" in answer.parameters) is wanted

    assert all(pool.map(ask, range(32)))


def test_one_pool_over_both_protocols(
    there: ServerProcess, front: ServerProcess, pool: ThreadPoolExecutor
) -> None:
    def ask(number: int) -> bool:
        row = np.full((1, 4), number, np.float32)
        return bool(through.infer("mixed", {"INPUT0": row})["OUTPUT0"].ravel()[0] == 4 * number)

    with CLIENTS["grpc"](front) as through, Scraper(front.metrics) as scraper:
        scraper.until_reached("mixed", 2)
        assert all(pool.map(ask, range(256)))
        after = scraper.now()
    for url in (f"grpc://{there.grpc}", there.url):
        labels = {"model": "mixed", "version": "1", "endpoint": url}
        assert after.value("headrace_endpoint_requests_total", **labels) > 0
        assert after.value("headrace_endpoint_failures_total", **labels) == 0
        assert after.value("headrace_endpoint_healthy", **labels) == 1
