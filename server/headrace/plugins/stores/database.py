"""Databases as stores: `sqlite:///FILE`, `postgresql://…` and `mysql://…`, through SQLAlchemy.

    headrace_store    one row: the number of writes, by which readers see if anything has changed
    headrace_models   name, state, bytes, manifest and time of each model
    headrace_files    path, version, bytes and digest of each file
    headrace_chunks   contents by digest, in pieces of 1 MiB, each once for all models

A model is published by one transaction. Publishers are one after the other: the first statement of
each changes the row of `headrace_store`. Contents are named by their digests, so that whoever reads
a model while it is replaced reads what its manifest lists, or nothing.

PostgreSQL tells of changes by NOTIFY, for which a thread listens; others are asked for the number
of writes.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.remote import (
    ModelState,
    Remote,
    RemoteContents,
    RemoteFile,
    first_line,
    needed,
    pauses,
    unreached,
)
from headrace.plugins.stores.remote_store import RemoteStore
from headrace.repository.model_files import parse_manifest
from headrace.repository.store import Store, StoreOptions

CHUNK = 1 << 20  # bytes
_CHANNEL = "headrace_models"
_CONNECTIONS = 8
_LISTEN_SECS = 1.0  # after which a thread that listens looks if the store is closed
_CONNECT_SECS = 5
_DRIVERS = {"postgresql": ("psycopg", "psycopg"), "mysql": ("pymysql", "PyMySQL")}


class Tables(NamedTuple):
    """The tables, and all of them together."""

    everything: Any
    store: Any
    models: Any
    files: Any
    chunks: Any


def tables() -> Tables:
    """The tables of models."""
    import sqlalchemy as sql

    everything = sql.MetaData()
    name = sql.String(190)  # an index of MySQL holds a path beside it
    store = sql.Table(
        "headrace_store", everything,
        sql.Column("id", sql.Integer, primary_key=True, autoincrement=False),
        sql.Column("writes", sql.BigInteger, nullable=False),
    )  # fmt: skip
    models = sql.Table(
        "headrace_models", everything,
        sql.Column("name", name, primary_key=True),
        sql.Column("state", sql.String(64), nullable=False),
        sql.Column("size", sql.BigInteger, nullable=False),
        sql.Column("manifest", sql.LargeBinary(1 << 24), nullable=False),
        sql.Column("published", sql.DateTime, nullable=False),
    )  # fmt: skip
    files = sql.Table(
        "headrace_files", everything,
        sql.Column("model", name, primary_key=True),
        sql.Column("path", sql.String(500), primary_key=True),
        sql.Column("version", sql.BigInteger, nullable=True),
        sql.Column("size", sql.BigInteger, nullable=False),
        sql.Column("digest", sql.String(80), nullable=False, index=True),
    )  # fmt: skip
    chunks = sql.Table(
        "headrace_chunks", everything,
        sql.Column("digest", sql.String(80), primary_key=True),
        sql.Column("number", sql.Integer, primary_key=True, autoincrement=False),
        sql.Column("content", sql.LargeBinary(1 << 24), nullable=False),
    )  # fmt: skip
    return Tables(everything, store, models, files, chunks)


class DatabaseRemote(Remote):
    """Models in the tables of a database."""

    def __init__(self, address: str) -> None:
        """Connects to nothing; raises `LoadFailed`."""
        with needed("databases as stores", "sqlalchemy: headrace[databases]"):
            import sqlalchemy
        self._sql = sqlalchemy
        try:
            url = sqlalchemy.make_url(address)
        except (sqlalchemy.exc.ArgumentError, ValueError):
            raise LoadFailed(f"{address.partition(':')[0]}://…: it is no address") from None
        self.address = url.set(query={}).render_as_string(hide_password=True)
        self._file = url.database or "" if url.drivername.startswith("sqlite") else None
        self._engine = self._made(url)
        self._tables = tables()
        self._listed: tuple[int, Mapping[str, ModelState]] | None = None
        self._stopped = Event()

    def models(self) -> Mapping[str, ModelState]:
        """Implements `Remote.models`; asks for them only if any has changed."""
        sql, store, models = self._sql, self._tables.store, self._tables.models
        with self._connected() as connection:
            writes = connection.execute(sql.select(store.c.writes)).scalar_one_or_none() or 0
            if self._listed is None or self._listed[0] != writes:
                found = connection.execute(sql.select(models.c.name, models.c.state, models.c.size))
                self._listed = writes, {name: ModelState(state, n) for name, state, n in found}
            return self._listed[1]

    def contents(self, name: str) -> RemoteContents:
        """Implements `Remote.contents`."""
        sql, models, files = self._sql, self._tables.models, self._tables.files
        with self._connected() as connection:
            own = models.c.name == name
            row = connection.execute(
                sql.select(models.c.state, models.c.manifest).where(own)
            ).first()
            if row is None:
                raise self.not_there(name)
            wanted = sql.select(files.c.path, files.c.size, files.c.digest)
            found = connection.execute(wanted.where(files.c.model == name)).all()
        listed = {path: RemoteFile(size, digest, digest) for path, size, digest in found}
        if {path: file.digest for path, file in listed.items()} != parse_manifest(row.manifest):
            raise self.changing(name)
        return RemoteContents(row.state, listed, row.manifest)

    def read(self, name: str, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
        """Implements `Remote.read`."""
        chunks = self._tables.chunks
        first, last = start // CHUNK, (stop - 1) // CHUNK
        wanted = (
            self._sql.select(chunks.c.content)
            .where(chunks.c.digest == file.digest, chunks.c.number.between(first, last))
            .order_by(chunks.c.number)
        )
        with self._connected() as connection:
            found = b"".join(connection.execute(wanted).scalars())
        return found[start - first * CHUNK : stop - first * CHUNK]

    def publish(self, name: str, directory: Path, manifest: bytes) -> None:
        """Implements `Remote.publish`, in one transaction; makes the tables if there are none."""
        sql, known = self._sql, self._tables
        wanted = parse_manifest(manifest)
        state = hashlib.sha256(manifest).hexdigest()[:32]
        with self._connected(writes=True) as connection:
            own = known.models.c.name == name
            if connection.execute(sql.select(known.models.c.state).where(own)).scalar() == state:
                return
            sizes = {path: (directory / path).stat().st_size for path in wanted}
            for path, digest in wanted.items():
                self._put(connection, directory / path, digest)
            connection.execute(sql.delete(known.files).where(known.files.c.model == name))
            connection.execute(sql.delete(known.models).where(own))
            connection.execute(sql.insert(known.models), {
                "name": name, "state": state, "size": sum(sizes.values()), "manifest": manifest,
                "published": datetime.now(UTC).replace(tzinfo=None),
            })  # fmt: skip
            connection.execute(sql.insert(known.files), [
                {"model": name, "path": path, "version": _version_of(path), "size": sizes[path],
                 "digest": digest}
                for path, digest in wanted.items()
            ])  # fmt: skip
            used = sql.select(known.files.c.digest)
            unused = known.chunks.c.digest.not_in(used)
            connection.execute(sql.delete(known.chunks).where(unused))
            if connection.dialect.name == "postgresql":
                connection.execute(sql.select(sql.func.pg_notify(_CHANNEL, name)))

    def watch(self, changed: Callable[[], None]) -> None:
        """Implements `Remote.watch`: listens if the database tells of changes."""
        if self._engine.dialect.name == "postgresql":
            listen = Thread(target=self._listen, args=(changed,), name="listen", daemon=True)
            listen.start()

    def close(self) -> None:
        """Implements `Remote.close`."""
        self._stopped.set()
        self._engine.dispose()

    def _listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` on each notice, and after each new connection."""
        backoff = pauses()
        while not self._stopped.is_set():
            try:
                connection = self._engine.raw_connection()
                try:
                    driver: Any = connection.driver_connection
                    driver.rollback()
                    driver.autocommit = True
                    driver.execute(f"LISTEN {_CHANNEL}")
                    backoff.succeeded()
                    changed()
                    while not self._stopped.is_set():
                        for _ in driver.notifies(timeout=_LISTEN_SECS):
                            changed()
                finally:
                    connection.invalidate()  # it listens, which others need not
            except Exception:  # of the driver: the store says so when it is asked
                self._stopped.wait(backoff.failed())

    def _put(self, connection: Any, file: Path, digest: str) -> None:
        """Write the chunks of a file, unless they are there."""
        sql, chunks = self._sql, self._tables.chunks
        there = sql.select(sql.func.count()).where(chunks.c.digest == digest)
        if connection.execute(there.select_from(chunks)).scalar():
            return
        with file.open("rb") as opened:
            for number, content in enumerate(iter(lambda: opened.read(CHUNK), b"")):
                row = {"digest": digest, "number": number, "content": content}
                connection.execute(sql.insert(chunks), row)

    def _made(self, url: Any) -> Any:
        """The engine of the library; raises `LoadFailed`."""
        given: dict[str, Any] = {"connect_args": {"connect_timeout": _CONNECT_SECS}}
        family = url.get_backend_name()
        if self._file is not None:
            given = {"connect_args": {"timeout": 30}}
        elif family in _DRIVERS and "+" not in url.drivername:
            url = url.set(drivername=f"{family}+{_DRIVERS[family][0]}")
        if self._file not in ("", ":memory:"):
            given |= {"pool_size": _CONNECTIONS, "pool_pre_ping": True}
        try:
            return self._sql.create_engine(url, hide_parameters=True, **given)
        except ImportError as error:
            package = _DRIVERS.get(family, ("", f"for {url.drivername}"))[1]
            raise LoadFailed(f"{self.address} needs the package {package}") from error
        except self._sql.exc.SQLAlchemyError as error:
            raise LoadFailed(f"{self.address}: {error}") from error

    @contextmanager
    def _connected(self, writes: bool = False) -> Iterator[Any]:
        """A transaction, alone if it `writes`; raises errors of the database as `Unreached`."""
        sql, store = self._sql, self._tables.store
        if self._file is not None and not writes and not os.path.exists(self._file):
            raise unreached(self.address, "there is no such file")
        try:
            if writes:
                self._tables.everything.create_all(self._engine)
            engine = self._engine
            if engine.dialect.name == "postgresql" and not writes:  # one state in all statements
                engine = engine.execution_options(isolation_level="REPEATABLE READ")
            with engine.begin() as connection:
                if writes:
                    more = {"writes": store.c.writes + 1}
                    if not connection.execute(sql.update(store).values(more)).rowcount:
                        connection.execute(sql.insert(store), {"id": 1, "writes": 1})
                yield connection
        except sql.exc.SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            raise unreached(self.address, first_line(cause)) from error


def _version_of(path: str) -> int | None:
    """The version that a file belongs to, if to one alone."""
    first, slash, _ = path.partition("/")
    return int(first) if slash and first.isdecimal() else None


def database_store(address: str, options: StoreOptions) -> Store:
    """The store with such an address; raises `LoadFailed`."""
    return RemoteStore(DatabaseRemote(address), options)
