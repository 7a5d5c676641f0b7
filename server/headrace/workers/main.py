"""The main program of a worker: loads a model, starts it, runs batches, ends."""

import gc
import importlib
import inspect
import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Mapping
from types import FrameType
from typing import Any

from headrace.ipc.allocation import keep_memory
from headrace.ipc.frames import FrameKind, frame
from headrace.workers import model_class
from headrace.workers import triton_api as pb
from headrace.workers.batches import Batches
from headrace.workers.channel import WorkerChannel, end_with
from headrace.workers.execute import Executor
from headrace.workers.forked import Forks
from headrace.workers.model_class import import_freshly
from headrace.workers.session import NOT_NOW, Session
from headrace.workers.triton_config import Contradicted
from headrace.workers.triton_requests import InferenceRequest, connect
from headrace.workers.triton_tensors import TritonModelException

_LONGEST = 64 << 10  # characters of what is logged at once
_ENDING = (signal.SIGINT, signal.SIGTERM)
log = logging.getLogger("model")


def main(descriptor: int) -> None:
    """Serve the server at the other end of an open socket."""
    for number in _ENDING:
        # The server decides when to end. Not by ignoring signals, which child processes would
        # inherit; system calls are resumed.
        signal.signal(number, _go_on)
        signal.siginterrupt(number, False)
    sock = socket.socket(fileno=descriptor)
    end_with(sock)
    sys.modules["triton_python_backend_utils"] = pb
    sys.path.append(
        os.path.join(os.path.dirname(__file__), "shared")
    )  # for processes spawned by the model
    link = WorkerChannel(sock)
    worker = Worker(link)
    # Hooks run in order of registration, those before a fork in reverse order.
    Forks(link, worker.session, worker.tell).register()
    forking = _Forking()
    os.register_at_fork(
        before=forking.begin, after_in_parent=forking.end, after_in_child=_end_by_signals
    )
    os.register_at_fork(after_in_child=forking.end)
    logging.basicConfig(level=logging.DEBUG, handlers=[_ServerHandler(link)], force=True)
    for noisy in ("matplotlib", "PIL", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.INFO)
    status = 0
    try:
        worker.serve()
    except SystemExit as error:  # raised by the model
        log.error("%s\n%s", model_class.one_line(error), model_class.its_traceback(error))
        status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    # Threads left by the model are not waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _go_on(number: int, frame: FrameType | None) -> None:
    """Ignore a signal."""


class _Forking(threading.local):
    """Blocks signals while this thread forks, until the child has its handlers."""

    def begin(self) -> None:
        """Block signals."""
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

    def end(self) -> None:
        """Unblock signals."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def _end_by_signals() -> None:
    """Restore the default handling of signals, in a forked process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _kind(model: Any) -> type[Executor]:
    """The executor for a model; asyncio is only imported for coroutines."""
    if not inspect.iscoroutinefunction(model.execute):
        return Executor
    from headrace.workers.coroutines import CoroutineExecutor

    return CoroutineExecutor


class Worker:
    """One model in this process, and its connection to the server."""

    def __init__(self, link: WorkerChannel) -> None:
        self._link = link
        self._class: Any = None
        self._model: Any = None
        self._session: Session | None = None  # set when the model is started
        self._executor: Executor | None = None

    def serve(self) -> None:
        """Load and start a model, run its batches, and finalise it."""
        connect(self)
        while self._executor is None:
            received = self._link.receive()
            if received is None:
                return
            for header, meta, _ in received:
                if header.kind is FrameKind.LOAD:
                    self._answer(FrameKind.LOADED, self._load, json.loads(meta))
                elif header.kind is FrameKind.START:
                    self._answer(FrameKind.STARTED, self._start, json.loads(meta))
                elif header.kind is FrameKind.STOP:
                    return
        self._executor.serve()
        self._finalize()

    # --- implementation of Triton's API

    def exec(self, request: InferenceRequest, decoupled: bool) -> Any:
        """Run another model, and wait for the responses."""
        return self._reached().exec(request, decoupled)

    def async_exec(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Any]:
        """Run another model without blocking other coroutines."""
        return self._reached().async_exec(request, decoupled)

    def control(self, document: Mapping[str, Any]) -> Any:
        """Run a control operation of the server, and wait for the result."""
        return self._reached().control(document)

    def register(self, document: Mapping[str, Any]) -> None:
        """Create a family of metrics; waits for the result where a model may."""
        session = self.session()
        if session is not None and session.open:
            session.register(document)
        else:
            self.tell({"do": "family", **document})

    def tell(self, document: Mapping[str, Any]) -> None:
        """Send an update of a metric to the server."""
        self._link.send(frame(FrameKind.METRIC, json.dumps(document).encode()))

    def session(self) -> Session | None:
        """The model's session, once it is being started."""
        return self._session

    def _reached(self) -> Session:
        if self._session is None:
            raise TritonModelException(NOT_NOW)
        return self._session

    # --- loading

    def _answer(self, kind: FrameKind, step: Any, document: dict[str, Any]) -> None:
        try:
            told = step(document)
        except (Exception, SystemExit) as error:
            failure = {
                "text": model_class.one_line(error),
                "traceback": model_class.its_traceback(error),
                "problems": error.problems if isinstance(error, Contradicted) else (),
            }
            self._link.send(frame(FrameKind.FAILED, json.dumps(failure).encode()))
        else:
            self._link.send(frame(kind, json.dumps(told).encode()))

    def _load(self, document: dict[str, Any]) -> dict[str, Any]:
        """Import the model; returns its completed configuration, None for no change, whether it may
        read request parameters, the columns that it was trained with, and its instances.
        """
        import_freshly(document["paths"])
        sys.path[:0] = document["paths"]
        loader = importlib.import_module(document["loader"])
        self._class = found = loader.load(document)
        completed = (
            model_class.complete(found, document["config"]) if document["auto_complete"] else None
        )
        return {
            "config": completed,
            "reads_parameters": model_class.reads_parameters(found),
            "columns": model_class.columns(found),
            "instances": model_class.instances(found),
        }

    def _start(self, document: dict[str, Any]) -> dict[str, Any]:
        """Start the model, which may load others; returns how it runs batches."""
        link, decoupled = self._link, bool(document["decoupled"])
        config = json.loads(document["args"]["model_config"])
        declared = frozenset(output["name"] for output in config.get("output", ()))
        sequences = config.get("sequence_batching")
        if sequences is not None:
            declared |= {state["output_name"] for state in sequences.get("state", ())}
        batches = Batches(link, decoupled, declared)
        self._session = session = Session(link, batches.add_form, declared)
        self._model = model = model_class.start(self._class, document["args"])
        name = document["instance"]
        self._executor = executor = _kind(model)(
            link, model, name, decoupled, batches, session, stateful=sequences is not None
        )
        gc.collect()
        gc.freeze()
        keep_memory()
        return {"is_async": executor.is_async, "asks": hasattr(model, "is_ready")}

    def _finalize(self) -> None:
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except Exception:
                log.exception("finalize")


class _ServerHandler(logging.Handler):
    """Sends log records to the server."""

    def __init__(self, link: WorkerChannel) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; in a process forked by the model, print it."""
        if self._link.foreign:
            print(self.format(record), file=sys.stderr)
            return
        try:
            document = [record.levelno, record.name, self.format(record)[:_LONGEST]]
            self._link.send(frame(FrameKind.LOG, json.dumps(document).encode()))
        except OSError:
            os._exit(1)  # the server is gone
