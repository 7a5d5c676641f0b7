"""The life of a worker: load a model, start it, run batches, end."""

import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import traceback
from typing import Any

from headrace.workers import triton_api as pb
from headrace.workers.execute import Executor
from headrace.workers.frames import Kind, frame
from headrace.workers.link import Link, end_with


def main(descriptor: int) -> None:
    """Serve the server at the other end of an open socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server says when to end
    sock = socket.socket(fileno=descriptor)
    end_with(sock)
    sys.modules["triton_python_backend_utils"] = pb
    link = Link(sock)
    logging.basicConfig(level=logging.DEBUG, handlers=[_Handler(link)], force=True)
    for noisy in ("matplotlib", "PIL", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.INFO)
    status = 0
    try:
        Worker(link).serve()
    except BaseException:  # SystemExit of the model, too
        traceback.print_exc()
        status = 1
    # Whatever threads a model has left, they are not waited for.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Worker:
    """One model in this process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._class: Any = None
        self._model: Any = None
        self._executor: Executor | None = None

    def serve(self) -> None:
        """Take frames until there are no more."""
        while (received := self._link.receive()) is not None:
            header, meta, data = received
            if header.kind is Kind.EXECUTE:
                assert self._executor is not None
                self._executor.run(header, meta, data)
            elif header.kind is Kind.FORM:
                assert self._executor is not None
                self._executor.add_form(json.loads(meta))
            elif header.kind is Kind.LOAD:
                self._answer(Kind.LOADED, self._load, json.loads(meta))
            elif header.kind is Kind.START:
                self._answer(Kind.STARTED, self._start, json.loads(meta))
            elif header.kind is Kind.STOP:
                self._stop()
                return

    def _answer(self, kind: Kind, step: Any, document: dict[str, Any]) -> None:
        try:
            told = step(document)
        except Exception as error:
            text = "".join(traceback.format_exception_only(type(error), error)).strip()
            failure = {"text": text.replace("\n", " "), "traceback": traceback.format_exc()}
            self._link.send(frame(Kind.FAILED, json.dumps(failure).encode()))
        else:
            self._link.send(frame(kind, json.dumps(told).encode()))

    def _load(self, document: dict[str, Any]) -> dict[str, Any]:
        """Import the model; the configuration as it completes it, None if it does not."""
        sys.path[:0] = document["paths"]
        loader = importlib.import_module(f"headrace.workers.loaders.{document['loader']}")
        self._class = found = loader.load(document)
        completed = None
        if document["auto_complete"] and hasattr(found, "auto_complete_config"):
            result = found.auto_complete_config(pb.ModelConfig(document["config"]))
            if not isinstance(result, pb.ModelConfig):
                raise TypeError(
                    "auto_complete_config must return the ModelConfig that it was given,"
                    f" got {type(result).__name__}"
                )
            completed = result.as_dict()
        return {"config": completed}

    def _start(self, document: dict[str, Any]) -> None:
        self._model = self._class()
        if hasattr(self._model, "initialize"):
            self._model.initialize(document["args"])
        if not hasattr(self._model, "execute"):
            raise AttributeError("the class TritonPythonModel has no method execute")
        self._executor = Executor(self._link, self._model)
        gc.collect()
        gc.freeze()

    def _stop(self) -> None:
        if self._model is not None and hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except Exception:
                logging.getLogger("model").exception("finalize")


class _Handler(logging.Handler):
    """Sends what is logged to the server."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record as text."""
        try:
            document = [record.levelno, record.name, self.format(record)]
            self._link.send(frame(Kind.LOG, json.dumps(document).encode()))
        except OSError:
            os._exit(1)  # the server has gone
