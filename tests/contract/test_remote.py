"""Models on an upstream: clients see the upstream's answers."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, RepositoryError, ServerError
from headrace.engine.loading import load_version
from headrace.engine.opening import LoadOptions, open_model
from headrace.placement.backend import load_backends
from headrace.repository.layout import read_model_directory
from tests.contract.conftest import CARRIERS, CLIENTS
from tests.support.client import Client, Inputs
from tests.support.remote import values, write_remote
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, clean_server

NAMES = [f"identity_{datatype}" for datatype in Datatype] + [
    "simple", "unbatched", "scalar", "matrix", "row_sum", "optional_bias", "convert", "flat",
    "folded", "two_unknown", "lookup",
]  # fmt: skip
# HTTP forms of requests, by suffix of the models' names.
FORMS: dict[str, dict[str, str]] = {
    "_binary": {}, "_json": {"http_tensors": "json"}, "_gzip": {"compression": "gzip"},
}  # fmt: skip
FLOATS = np.arange(6, dtype=np.float32)
INTS = np.arange(32, dtype=np.int32).reshape(2, 16)
CASES: list[tuple[str, Inputs]] = [
    ("simple", {"INPUT0": INTS, "INPUT1": INTS}),
    ("unbatched", {"INPUT0": FLOATS[:3], "INPUT1": FLOATS[3:]}),
    ("scalar", {"INPUT0": np.array(2.5)}), ("matrix", {"INPUT0": FLOATS.reshape(2, 3, 1)}),
    ("flat", {"INPUT0": FLOATS.reshape(6, 1)}),
    ("simple", {"INPUT0": INTS, "INPUT1": INTS[:, :3]}),
    ("lookup", {"INPUT0": np.array([[10_000]], np.int64)}), ("nope", {"INPUT0": INTS}),
]  # fmt: skip


@pytest.fixture(scope="module")
def there(servers: Callable[[str], ServerProcess]) -> ServerProcess:
    return servers("default")


@pytest.fixture(scope="module", params=["grpc", pytest.param("http", marks=pytest.mark.slow)])
def endpoint(request: pytest.FixtureRequest, there: ServerProcess) -> str:
    return f"grpc://{there.grpc}" if request.param == "grpc" else there.url


@pytest.fixture(scope="module")
def models(there: ServerProcess, endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of models that all run on the upstream."""
    root = tmp_path_factory.mktemp("front")
    for name in NAMES:
        write_remote(root, name, endpoint)
    for name in ("identity_FP32", "identity_UINT64", "identity_BYTES"):
        for form, given in FORMS.items():
            write_remote(root, name + form, there.url, remote_model=name, **given)
    write_remote(root, "mixed", there.grpc, there.url, remote_model="row_sum", max_in_flight="2")
    write_remote(root, "other_name", endpoint, remote_model="simple", remote_version="1")
    write_remote(root, "third", endpoint, remote_model="versions_all", remote_version="3")
    write_remote(root, "versions_all", endpoint, more="version_policy { all { } }")
    for number in (1, 10):
        (root / "versions_all" / str(number)).mkdir()
    return root


@pytest.fixture(scope="module")
def front(models: Path) -> Iterator[ServerProcess]:
    with clean_server(models, tracebacks=False) as process:
        yield process


@pytest.fixture(scope="module")
def split_front(models: Path) -> Iterator[ServerProcess]:
    with clean_server(models, options=CARRIERS["frontends"]) as process:
        yield process


@pytest.fixture(
    scope="module", params=[*CLIENTS, pytest.param("frontends", marks=pytest.mark.slow)]
)
def pair(
    request: pytest.FixtureRequest, endpoint: str, there: ServerProcess
) -> Iterator[tuple[Client, Client]]:
    """The upstream and the server before it."""
    kind: str = request.param
    before: ServerProcess = request.getfixturevalue(
        "split_front" if kind == "frontends" else "front"
    )
    client = CLIENTS.get(kind, CLIENTS["grpc"])
    with client(there) as direct, client(before) as through:
        yield direct, through


def outcome(client: Client, name: str, inputs: Inputs) -> object:
    """An answer in a comparable form."""
    try:
        answer = client.infer(name, inputs, id="an id")
    except ServerError as error:
        return type(error), str(error)
    return (
        answer.model_name, answer.model_version, answer.id, answer.datatypes,
        {name: (array.shape, array.tolist()) for name, array in answer.outputs.items()},
    )  # fmt: skip


@pytest.mark.parametrize(("name", "inputs"), CASES)
def test_answers_are_the_same(pair: tuple[Client, Client], name: str, inputs: Inputs) -> None:
    direct, through = pair
    assert outcome(through, name, inputs) == outcome(direct, name, inputs)


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.UINT64, Datatype.BYTES])
@pytest.mark.parametrize("form", ["", *FORMS])
def test_every_form_of_tensors(pair: tuple[Client, Client], datatype: Datatype, form: str) -> None:
    direct, through = pair
    name = f"identity_{datatype}"
    for shape in ((1, 3), (8, 2), (2, 0)):
        array = values(datatype, shape)
        if datatype is Datatype.BYTES:
            array = np.full(shape, "Grüße".encode(), object)
        there = direct.infer(name, {"INPUT0": array}, id="an id")
        here = through.infer(name + form, {"INPUT0": array}, id="an id")
        assert (here.id, here.datatypes) == (there.id, there.datatypes)
        assert here["OUTPUT0"].shape == shape
        assert here["OUTPUT0"].tolist() == there["OUTPUT0"].tolist()


def test_nan_and_large_tensors(pair: tuple[Client, Client]) -> None:
    # Above gRPC's default limit of 4 MiB; as JSON it would take seconds.
    long = 1 << 20 if pair[1].carries_bytes else 1 << 17
    for array in (
        np.array([[np.nan, np.inf, -np.inf, 0.1]], np.float32),
        np.arange(long, dtype=np.float32).reshape(8, -1),
    ):
        for form in FORMS:
            answer = pair[1].infer(f"identity_FP32{form}", {"INPUT0": array})
            np.testing.assert_array_equal(answer["OUTPUT0"], array)


def test_bytes_that_are_not_utf8_are_refused_over_json(
    front: ServerProcess, pool: ThreadPoolExecutor
) -> None:
    """Other requests of the batch are answered."""

    def ask(element: bytes) -> str:
        array = np.full((1, 2), element, object)
        try:
            answer = through.infer("identity_BYTES_json", {"INPUT0": array})
        except InvalidRequest as error:
            return str(error)
        return str((answer["OUTPUT0"] == array).all())

    with CLIENTS["grpc"](front) as through:
        found = list(pool.map(ask, [b"a", b"\xff"] * 16))
    assert set(found[::2]) == {"True"}
    assert all("'INPUT0' holds bytes that are not UTF-8" in text for text in found[1::2])


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


def test_metadata_are_completed_from_the_server(pair: tuple[Client, Client]) -> None:
    direct, through = pair
    for name in NAMES:
        there, here = direct.model_metadata(name), through.model_metadata(name)
        assert list(here.inputs) == list(there.inputs)
        assert list(here.outputs) == list(there.outputs)
        config = through.model_config(name)
        assert config.backend == "triton"
        assert config.max_batch_size == direct.model_config(name).max_batch_size


def test_another_remote_name_and_version(pair: tuple[Client, Client]) -> None:
    _, through = pair
    answer = through.infer("other_name", {"INPUT0": INTS, "INPUT1": INTS})
    assert (answer.model_name, answer.model_version) == ("other_name", "1")
    assert answer["OUTPUT0"].tolist() == (INTS + INTS).tolist()
    answer = through.infer("third", {"INPUT0": np.zeros((1, 1), np.float32)})
    assert (answer.model_version, answer["OUTPUT0"].tolist()) == ("3", [[3]])
    # Version directories are versions there.
    _, through = pair
    zero = {"INPUT0": np.zeros((1, 1), np.float32)}
    assert through.infer("versions_all", zero)["OUTPUT0"].tolist() == [[10]]
    assert through.infer("versions_all", zero, version="1")["OUTPUT0"].tolist() == [[1]]


def test_samples_are_run_on_a_server(there: ServerProcess, tmp_path: Path, endpoint: str) -> None:
    sample = """model_warmup {{ name: "one" batch_size: 2 inputs {{ key: "INPUT0"
        value {{ data_type: TYPE_FP32 dims: [ {} ] zero_data: true }} }} }}"""
    write_remote(tmp_path, "row_sum", endpoint, more=sample.format(4))
    with Scraper(there.metrics) as scraper:
        labels = {"model": "row_sum", "version": "1"}
        before = scraper.now()
        opened = open_model(
            read_model_directory(tmp_path / "row_sum"), load_backends(), LoadOptions(1)
        )
        loaded = load_version(opened, 1, LoadOptions(1))
        loaded.instances[0].model.close()
        rows = scraper.now().value("nv_inference_count", **labels)
    assert rows - before.value("nv_inference_count", **labels) == 2


def test_requests_are_batched_here(
    endpoint: str, front: ServerProcess, pool: ThreadPoolExecutor
) -> None:
    """Each concurrent request has its own rows, and there are fewer calls than requests."""
    through = CLIENTS["grpc"](front)

    def ask(number: int) -> bool:
        row = np.full((1, 4), number, np.float32)
        return bool(through.infer("row_sum", {"INPUT0": row})["OUTPUT0"].ravel()[0] == 4 * number)

    with through, Scraper(front.metrics) as scraper:
        labels = {"model": "row_sum", "version": "1", "endpoint": endpoint}
        before = scraper.now()
        assert all(pool.map(ask, range(256)))
        after = scraper.now()
    name = "headrace_endpoint_requests_total"
    assert 0 < after.value(name, **labels) - before.value(name, **labels) < 256
    assert after.value("headrace_endpoint_outstanding", **labels) == 0
    assert after.value("headrace_endpoint_healthy", **labels) == 1


def test_one_of_a_batch_that_fails_fails_alone(
    pair: tuple[Client, Client], pool: ThreadPoolExecutor
) -> None:
    _, through = pair

    def ask(index: int) -> bool:
        try:
            through.infer("lookup", {"INPUT0": np.array([[index]], np.int64)})
        except InvalidRequest:
            raise
        except ServerError:
            return False
        return True

    assert list(pool.map(ask, [0, 10_000] * 16)) == [True, False] * 16


def test_requests_keep_their_parameters(
    pair: tuple[Client, Client], pool: ThreadPoolExecutor
) -> None:
    """The upstream answers `headrace_timing` itself."""
    _, through = pair

    def ask(number: int) -> bool:
        wanted = bool(number % 2)
        answer = through.infer(
            "simple", {"INPUT0": INTS, "INPUT1": INTS},
            parameters={"headrace_timing": True} if wanted else {},
        )  # fmt: skip
        return ("compute_us" in answer.parameters) is wanted

    assert all(pool.map(ask, range(32)))


@pytest.mark.parametrize(("name", "more", "given", "text"), [
    ("simple", "max_batch_size: 9", {}, r"config.pbtxt:3: max_batch_size: .* takes 8 rows"),
    ("simple", 'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }'
     ' input { name: "INPUT1" data_type: TYPE_INT32 dims: [ 15 ] }', {},
     r"input 'INPUT0' is INT32, not FP32(.|\n)*'INPUT1' has shape \[-1,16\]"),
    ("simple", "instance_group { count: 2 }", {"remote_drift": "refuse"},
     r"config.pbtxt:3: instance_group: 2 x AUTO asked for, 1 x CPU there"),
    ("simple", "", {"remote_unload": "true"},
     r"remote_unload.*: unloads what remote_load has loaded"),
    ("simple", "", {"remote_backend": "python"}, r"'endpoints'\]: is for servers that others"),
    ("simple", "", {"endpoints": ""}, r"name at least one server"),
    ("simple", "", {"execution": "thread"}, r"the model runs on other servers"),
    ("nope", "", {}, r"no server answers for model 'nope'"),
    ("simple", "", {"max_in_fligth": "2"}, None),
])  # fmt: skip
def test_models_that_cannot_be_served_are_explained(
    there: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    more: str,
    given: dict[str, str],
    text: str | None,
) -> None:
    root = tmp_path_factory.mktemp("wrong")
    write_remote(root, name, there.grpc, more=more, **given)
    source, options = read_model_directory(root / name), LoadOptions(1)
    if text is None:
        opened = open_model(source, load_backends(), options)
        assert any("max_in_fligth" in warning for warning in opened.warnings)
        return
    with pytest.raises(RepositoryError) as refused:
        load_version(open_model(source, load_backends(), options), 1, options)
    assert re.search(text, str(refused.value)), str(refused.value)


def test_a_decoupled_model_is_called_over_grpc_only(there: ServerProcess, tmp_path: Path) -> None:
    write_remote(tmp_path, "decoupled", there.grpc, endpoints=f"http://{there.http}")
    source, options = read_model_directory(tmp_path / "decoupled"), LoadOptions(1)
    with pytest.raises(RepositoryError, match=r"pbtxt:\d+: parameters\['endpoints'\]: .*gRPC only"):
        load_version(open_model(source, load_backends(), options), 1, options)
