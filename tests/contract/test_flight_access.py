"""Arrow Flight's door with TLS, identities and an audit log: who may do what, what is recorded."""

import json
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.plugins.access.keys import new_key
from tests.support.access_file import known_client
from tests.support.command import FREE_PORTS, run
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.table_models import numbers, write_table_models
from tests.support.tls_files import FOLDER, ROOT, Authority, tls_options

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")
pytestmark = pytest.mark.slow

READER, INFERRER, OBSERVER = new_key(), new_key(), new_key()
RULES = (
    known_client("reader", READER, ["read"], ["numbers", "texts"])
    + known_client("inferrer", INFERRER, ["infer"])
    + known_client("observer", OBSERVER, ["observe"])
    + """
[roles.scorer]
may = ["infer", "read"]
models = ["numbers"]
[[certificates]]
dns = "localhost"
name = "scorer"
roles = ["scorer"]
"""
)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_table_models(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def served(models: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    (tmp_path / "access.toml").write_text(RULES)
    options = [
        "--door=flight=0", *tls_options("flight"), f"--flight-root-cert={ROOT}",
        f"--access={tmp_path}/access.toml", f"--audit-log={tmp_path}/audit.log",
    ]  # fmt: skip
    with clean_server(models, options=options) as process:
        yield process


def address(process: ServerProcess) -> str:
    """The host for which there is a certificate, and the port."""
    return process.door("flight").replace("grpc+tls://127.0.0.1", "localhost")


def connect(process: ServerProcess, known: bool = False) -> Any:
    """A client, who is `known` by a certificate."""
    pair = {
        name: (FOLDER / file).read_bytes()
        for name, file in (("cert_chain", "client.pem"), ("private_key", "client.key"))
    }
    url = f"grpc+tls://{address(process)}"
    return flight.connect(url, tls_root_certs=ROOT.read_bytes(), **(pair if known else {}))


def ask(client: Any, model: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> int:
    """The rows of the answer to a table; raises pyarrow's errors."""
    batch, options = numbers(3), flight.FlightCallOptions(headers=headers)
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(model), options)
    try:
        writer.begin(batch.schema)
        writer.write_batch(batch)
        writer.done_writing()
    except (flight.FlightError, pa.ArrowException, OSError):  # which the reader tells, too
        pass
    return int(reader.read_all().num_rows)


def entries(log: Path, count: int) -> list[dict[str, Any]]:
    """Members of the first entries of the audit log, without times and proofs."""
    until(lambda: log.exists() and log.read_text().count("\n") >= count, f"{count} entries")
    names = ("operation", "outcome", "status", "identity", "door", "address", "model")
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [{name: entry[name] for name in names if name in entry} for entry in found]


def test_a_certificate_is_an_identity(served: ServerProcess) -> None:
    with connect(served, known=True) as client:
        assert ask(client, "numbers") == 3
        listed = [info.descriptor.path for info in client.list_flights()]
        assert listed == [[b"numbers"]]
        for model in ("two", "absent"):
            with pytest.raises(pa.ArrowKeyError, match=f"unknown model: '{model}'"):
                ask(client, model)
            with pytest.raises(pa.ArrowKeyError, match=f"unknown model: '{model}'"):
                client.get_schema(flight.FlightDescriptor.for_path(model))


def test_refusals_are_recorded_and_counted(served: ServerProcess, tmp_path: Path) -> None:
    key = [(b"authorization", f"Bearer {READER.key}".encode())]
    with connect(served) as client:
        with pytest.raises(flight.FlightUnauthenticatedError):
            ask(client, "numbers")
        with pytest.raises(flight.FlightUnauthorizedError, match="no role that permits 'infer'"):
            ask(client, "numbers", key)
        options = flight.FlightCallOptions(headers=key)
        with pytest.raises(pa.ArrowKeyError):
            client.get_schema(flight.FlightDescriptor.for_path("two"), options)
    with connect(served, known=True) as client, pytest.raises(pa.ArrowKeyError):
        ask(client, "texts")
    common = {"outcome": "refused", "door": "flight", "address": "127.0.0.1"}
    stream = {**common, "operation": "ModelStreamInfer"}
    reader = {**common, "identity": "reader"}
    assert entries(tmp_path / "audit.log", 4) == [
        {**stream, "status": "UNAUTHENTICATED"},
        {**stream, "status": "PERMISSION_DENIED", "identity": "reader"},
        {**reader, "operation": "ModelMetadata", "status": "NOT_FOUND", "model": "two"},
        {**common, "operation": "ModelInfer", "status": "NOT_FOUND", "identity": "scorer",
         "model": "texts"},
    ]  # fmt: skip
    with Scraper(served.metrics, OBSERVER.key) as scraper:
        metrics = scraper.now()
    for operation, status in (
        ("stream_infer", "UNAUTHENTICATED"), ("stream_infer", "PERMISSION_DENIED"),
        ("metadata", "NOT_FOUND"), ("stream_infer", "NOT_FOUND"),
    ):  # fmt: skip
        counted = {"door": "flight", "operation": operation, "status": status}
        assert metrics.value("headrace_requests_total", **counted) == 1
    expiry = "headrace_certificate_expiry_timestamp_seconds"
    assert metrics.value(expiry, door="flight", file=str(FOLDER / "server.pem")) > 0


@pytest.mark.parametrize(("procedure", "permission"), [
    ("DoExchange", "infer"), ("DoPut", "infer"), ("DoGet", "infer"),
    ("GetFlightInfo", "read"), ("GetSchema", "read"), ("ListFlights", "read"),
])  # fmt: skip
def test_procedures(served: ServerProcess, procedure: str, permission: str) -> None:
    """Each for a client without proof, with a role for it, and with one for something else."""
    grpc = pytest.importorskip("grpc")
    refused = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    credentials = grpc.ssl_channel_credentials(ROOT.read_bytes())

    def status(key: str) -> Any:
        given = (("authorization", f"Bearer {key}"),) if key else ()
        with grpc.secure_channel(address(served), credentials) as channel:
            call = channel.stream_stream(f"/arrow.flight.protocol.FlightService/{procedure}")
            try:
                list(call(iter([b""]), timeout=30, metadata=given))
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    assert status("") is grpc.StatusCode.UNAUTHENTICATED
    assert status(READER.key + "x") is grpc.StatusCode.UNAUTHENTICATED
    other = READER if permission == "infer" else INFERRER
    assert status(other.key) is grpc.StatusCode.PERMISSION_DENIED
    assert status((INFERRER if permission == "infer" else READER).key) not in refused


def test_mutual_tls(models: Path) -> None:
    options = ["--door=flight=0", *tls_options("flight", mutual=True)]
    with clean_server(models, options=options) as process:
        with connect(process, known=True) as client:
            assert ask(client, "numbers") == 3
        with connect(process) as client, pytest.raises(flight.FlightUnavailableError):
            ask(client, "numbers")


def test_files_that_change_are_in_effect_for_new_connections(models: Path, tmp_path: Path) -> None:
    authority, folder = Authority("flight"), tmp_path / "tls"
    folder.mkdir()

    def write(name: str) -> str:
        certificate, key = authority.sign(name, ["localhost"])
        (folder / "server.key").write_bytes(key)
        (folder / "server.pem").write_bytes(certificate)
        return certificate.decode().strip()

    def shown() -> str:
        port = int(address(process).removeprefix("localhost:"))
        return ssl.get_server_certificate(("127.0.0.1", port)).strip()

    first = write("first")
    options = ["--door=flight=0", *tls_options("flight", folder)]
    with clean_server(models, options=options) as process:
        assert shown() == first
        url = f"grpc+tls://{address(process)}"
        with flight.connect(url, tls_root_certs=authority.root) as client:
            assert ask(client, "numbers") == 3
            second = write("second")
            until(lambda: shown() == second, "the second certificate")
            assert ask(client, "numbers") == 3


def test_settings_that_do_not_fit_end_the_server(models: Path) -> None:
    options = ("--door=flight=0", "--flight-use-ssl", "--flight-server-cert=/nothing")
    done = run("serve", f"--model-repository={models}", *FREE_PORTS, *options)
    assert done.returncode == 1
    assert "--door flight=0: --flight-use-ssl needs --flight-server-key" in done.stderr


def test_restricted_operations(models: Path, tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    options = ["--door=flight=0", "--restricted-api=inference:x-key=right", f"--audit-log={log}"]
    with (
        clean_server(models, options=options) as process,
        flight.connect(process.door("flight")) as client,
    ):
        assert ask(client, "numbers", [(b"x-key", b"right")]) == 3
        with pytest.raises(flight.FlightUnavailableError, match="expecting header 'x-key'"):
            ask(client, "numbers", [(b"x-key", b"wrong")])
        [entry] = entries(log, 1)
        assert (entry["operation"], entry["status"]) == ("ModelStreamInfer", "UNAVAILABLE")
