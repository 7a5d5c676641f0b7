"""Models in SQLite, PostgreSQL and MariaDB."""

import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Barrier, Event, Thread

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.contents import PART
from headrace.plugins.stores.database import DatabaseRemote
from headrace.plugins.stores.remote import Unreached
from headrace.repository.catalogue import open_store
from headrace.repository.model_files import manifest_of
from headrace.repository.store import Store, StoreOptions
from tests.models.onnx_graphs import constant, write_model
from tests.plugins.stores.remotes import brought, files_of
from tests.support.command import run
from tests.support.mariadb import MariaDb
from tests.support.postgres import PASSWORD, Postgres
from tests.support.remote import free_port
from tests.support.scrape import Scraper, until
from tests.support.server_process import clean_server
from tests.support.stores import constant_of


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres(free_port()) as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDb]:
    with MariaDb(free_port()) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'models.db'}"
    if request.param == "mysql":
        other: MariaDb = request.getfixturevalue("mariadb")
        return other.database(PASSWORD)
    server: Postgres = request.getfixturevalue("postgres")
    return server.database()


def published(remote: DatabaseRemote | Store, directory: Path) -> dict[str, bytes]:
    remote.publish(directory.name, directory, manifest_of(directory))
    return files_of(directory)


def test_models_are_published_and_brought(database: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "models", "m", bytes(range(256)) * (PART // 200), "# m\n")
    (model / "1" / "empty").write_bytes(b"")
    (model / "1" / "same").write_bytes(b"# m\n")
    store = open_store(database, options=StoreOptions(str(tmp_path / "cache")))
    assert PASSWORD not in store.address
    expected = published(store, model)
    assert brought(store, "m") == expected
    assert store.problems("m") == []
    assert store.size("m") == sum(map(len, expected.values()))
    before = store.token("m")
    published(store, model)
    store.names()
    assert store.token("m") == before, "the same content is no change"
    (model / "1" / "model.onnx").unlink()
    (model / "2").mkdir()
    (model / "2" / "model.onnx").write_bytes(b"two")
    expected = published(store, model)
    assert brought(store, "m") == expected
    assert store.current("m") == store.token("m") != before
    with pytest.raises(LoadFailed, match="m is being changed"):
        store.materialise("m", before._replace(state="older"))  # type: ignore[attr-defined]
    store.close()


def test_publishers_are_one_after_the_other(database: str, tmp_path: Path) -> None:
    """Models with contents in common, some of which no model has any longer."""
    for name in "abcd":
        write_model(tmp_path / name, name, b"in common", f"# {name}")
    with closing(DatabaseRemote(database)) as remote:
        published(remote, tmp_path / "a" / "a")
    start, errors = Barrier(4, timeout=60), list[BaseException]()

    def publish(name: str) -> None:
        remote = DatabaseRemote(database)
        try:
            start.wait()
            for content in ("x", "y", "in common"):
                (tmp_path / name / name / "1" / "model.onnx").write_text(content)
                published(remote, tmp_path / name / name)
        except BaseException as error:
            errors.append(error)
        finally:
            remote.close()

    threads = [Thread(target=publish, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    store = open_store(database, options=StoreOptions(str(tmp_path / "cache")))
    for name in "abcd":
        assert store.problems(name) == []
        assert brought(store, name) == files_of(tmp_path / name / name)
    store.close()


def test_a_damaged_database_gives_no_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models", "m", b"one")
    address = f"sqlite:///{tmp_path / 'models.db'}"
    store = open_store(address, options=StoreOptions(str(tmp_path / "cache")))
    published(store, model)
    with sqlite3.connect(tmp_path / "models.db") as connection:
        connection.execute("UPDATE headrace_chunks SET content = x'74776f'")
    connection.close()
    assert store.problems("m") == ["1/model.onnx does not hold what it is to hold"]
    with pytest.raises(LoadFailed, match=r"m: 1/model\.onnx does not hold what its manifest tells"):
        brought(store, "m")
    with sqlite3.connect(tmp_path / "models.db") as connection:
        connection.execute("DELETE FROM headrace_chunks")
    connection.close()
    with pytest.raises(LoadFailed, match="0 bytes came in place of 3"):
        brought(store, "m")
    with sqlite3.connect(tmp_path / "models.db") as connection:
        connection.execute("DELETE FROM headrace_files")
    connection.close()
    with pytest.raises(LoadFailed, match="m is being changed"):
        brought(store, "m")


def test_databases_that_are_not_there(tmp_path: Path) -> None:
    file = tmp_path / "none.db"
    with pytest.raises(Unreached, match=r"none\.db cannot be reached: there is no such file$"):
        DatabaseRemote(f"sqlite:///{file}").models()
    assert not file.exists()
    file.write_bytes(b"")
    with pytest.raises(Unreached, match=r"none\.db cannot be reached: no such table"):
        DatabaseRemote(f"sqlite:///{file}").models()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens there
        address = (
            f"postgresql://me:{PASSWORD}@127.0.0.1:{free.getsockname()[1]}/x?sslkey={PASSWORD}"
        )
        remote = DatabaseRemote(address)
        assert PASSWORD not in remote.address
        with pytest.raises(
            Unreached, match=r"postgresql://me:\*\*\*@.* cannot be reached"
        ) as found:
            remote.models()
    assert PASSWORD not in str(found.value)
    with pytest.raises(LoadFailed, match=r"^mysql://…: it is no address$"):
        DatabaseRemote(f"mysql://me:{PASSWORD}@host:port/x")


@pytest.mark.slow
def test_a_server_hears_of_changes(postgres: Postgres, tmp_path: Path) -> None:
    """Long before it would look by itself; and it serves on while the database is away.

    Versions that a change leaves alone stay loaded.
    """
    source, address = tmp_path / "models", postgres.database()
    write_model(source, "live", constant(1), "version_policy { all {} }\n")

    def push() -> None:
        ran = run("models", "push", str(source), address)
        assert ran.returncode == 0, ran.stderr
        assert PASSWORD not in ran.stdout + ran.stderr

    push()
    options = (
        f"--store-cache={tmp_path / 'cache'}", "--model-control-mode=poll",
        "--repository-poll-secs=3600",
    )  # fmt: skip
    with (
        clean_server(address, options=options, tracebacks=False) as server,
        Scraper(server.metrics) as scraper,
    ):
        assert constant_of(server, "live") == 1
        write_model(source, "live", constant(2), version=2)
        push()
        until(lambda: constant_of(server, "live") == 2, "version 2")
        postgres.stop()
        assert constant_of(server, "live") == 2
        postgres.start()
        write_model(source, "live", constant(3), version=3)
        push()
        until(lambda: constant_of(server, "live") == 3, "version 3")
        assert scraper.now().value("headrace_store_up") == 1
        assert "loaded live version 1 again" not in server.log
        config = "version_policy { all {} }\ninstance_group { count: 2 }\n"
        (source / "live" / "config.pbtxt").write_text(config)
        push()
        server.await_logged("loaded live version 1 again")
        assert PASSWORD not in server.log + server.output


def test_notices_are_heard(postgres: Postgres, tmp_path: Path) -> None:
    heard = Event()
    with closing(DatabaseRemote(postgres.database())) as remote:
        remote.watch(heard.set)
        assert heard.wait(60), "the first connection"
        heard.clear()
        published(remote, write_model(tmp_path, "noticed", b"x"))
        assert heard.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_models_on_request_in_little_memory(tmp_path: Path) -> None:
    """10,000 models of which a few are in memory at a time."""
    count, budget = 10_000, 8 << 20
    address = f"sqlite:///{tmp_path / 'models.db'}"
    model = write_model(tmp_path, "m", constant(7))
    remote = DatabaseRemote(address)
    manifest = manifest_of(model)
    remote.publish("m0", model, manifest)
    with sqlite3.connect(tmp_path / "models.db") as connection:  # as publishing would, but at once
        for number in range(1, count):
            name = f"m{number}"
            connection.execute(
                "INSERT INTO headrace_models SELECT ?, state, size, manifest, published"
                " FROM headrace_models WHERE name = 'm0'", (name,),
            )  # fmt: skip
            connection.execute(
                "INSERT INTO headrace_files SELECT ?, path, version, size, digest"
                " FROM headrace_files WHERE model = 'm0'", (name,),
            )  # fmt: skip
    connection.close()
    options = (
        f"--store-cache={tmp_path / 'cache'}", f"--store-cache-bytes={1 << 20}",
        "--load-on-request", f"--model-memory-budget={budget}", "--minimum-residency-secs=0",
    )  # fmt: skip
    with clean_server(address, options=options) as server, Scraper(server.metrics) as scraper:
        for number in range(0, count, 40):
            assert constant_of(server, f"m{number}") == 7
        found = scraper.now()
        assert found.value("headrace_store_brought_total") == count // 40
        assert found.value("headrace_model_evictions_total") > 0
        assert found.value("headrace_models_in_memory") < count // 40
