"""The status of the server as one document: processes, cores, memory, limits, models.

Computed when it is asked for, from the same counters as the metrics: models in pieces, and what
`/proc` says of processes on a thread. A client sees the versions that it may observe, with their
workers, and sums over these; what is of the whole server is seen by all who may observe any model,
as in the metrics. Owned by the event-loop thread.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from time import time
from typing import Any, NamedTuple

from headrace.core.identity import Identity, Permission
from headrace.engine.admission import Admission
from headrace.engine.documents import reason_of
from headrace.engine.engine import Engine
from headrace.engine.host import Certificate
from headrace.engine.model import Model
from headrace.engine.version import ModelVersion, State
from headrace.observability.statistics import LATENCY_BOUNDS, Histogram
from headrace.placement.choice import InstanceKind
from headrace.placement.cores import threads_for
from headrace.repository.config import parameter

_Document = dict[str, Any]

_BUDGET = "--model-memory-budget"  # usually used up: models are unloaded for others
_FULL = 0.8  # share of a limit above which it is degraded
_EXPIRING_SECS = 14 * 86_400  # before its end, a certificate is degraded
_OWN_THREADS = "intra_op_thread_count"  # the parameter by which a model chooses its threads


class _Process(NamedTuple):
    kind: str
    name: str
    pid: int  # 0 if it does not run
    model: str = ""
    version: str = ""


class _Limit(NamedTuple):
    name: str
    option: str
    used: int
    limit: int
    refused: int

    @property
    def full(self) -> bool:
        return self.used > self.limit * _FULL


async def status(engine: Engine, identity: Identity) -> _Document:
    """The document for a client."""
    models: list[_Document] = []
    workers: list[_Process] = []

    def describe(model: Model) -> None:
        name = model.name
        if not model.versions and identity.may(Permission.OBSERVE, name):
            models.append(_absent(model))
        for number in sorted(model.versions):
            version = model.versions[number]
            if identity.may(Permission.OBSERVE, name, version.name):
                further = engine.traffic.reason(name, number)
                models.append(_described(model, version, engine.options.cores, further))
                workers.extend(_workers(version))

    known = sorted(engine.models(), key=lambda model: model.name)
    await engine.pieces.each(known, describe)
    host, memory, now = engine.host, engine.loads.counts(), time()
    front_ends = host.front_ends()
    processes = [
        _Process("server", "server", os.getpid()),
        *(_Process("front end", name, pid) for name, pid in front_ends.items()),
        *workers,
    ]
    uses = await host.uses.of([each.pid for each in processes])
    in_models = sum(entry["memory_bytes"] for entry in models)
    budget = memory.budget if memory else 0
    limits = list(_limits(engine.admission, in_models, budget, max(len(front_ends), 1)))
    certificates = host.certificates()
    # Their addresses name no models, but those who may know of a few are told by model.
    stores = [s for s in engine.control.catalogue.stores if s.trouble and identity.sees_all]
    troubles = {store.trouble for store in stores}
    return {
        "time": now,
        "server": {
            "name": engine.name, "version": engine.version, "id": engine.instance_id,
            "started": host.started, "ready": engine.ready, "addresses": host.addresses,
            "model_control": engine.control.mode.value,
            "traffic_control": engine.traffic.allowed,
        },
        "client": {
            "name": identity.name, "kind": identity.kind,
            "may": [each.value for each in Permission if identity.may_some(each)],
        },
        "degraded": [
            *_server_degraded(engine, identity), *_processes_degraded(processes),
            *_limits_degraded(limits), *_certificates_degraded(certificates, now),
            *(_degraded("store", store.address, store.trouble) for store in stores),
            *(each for entry in models for each in _model_degraded(entry, troubles)),
        ],
        "cores": {
            "available": engine.options.cores,
            "model_threads": sum(entry["threads"] for entry in models),
            "process_threads": sum(use.threads for use in uses),
        },
        "memory": {
            "resident_bytes": sum(use.resident_bytes for use in uses), "model_bytes": in_models,
            "budget_bytes": budget or None, "evictions": memory.evictions if memory else 0,
        },
        "processes": [
            each._asdict() | use._asdict() for each, use in zip(processes, uses, strict=True)
        ],
        "limits": [each._asdict() | {"limit": each.limit or None} for each in limits],
        "certificates": [each._asdict() for each in certificates],
        "answers": [
            {"door": door, "operation": operation, "status": code, "count": count}
            for door, operation, code, count in engine.admission.answers.samples() if count
        ],
        "downloads": list(_downloads(engine, identity)),
        "lost": {
            "log_lines": engine.logs.dropped,
            "audit_entries": sum(engine.audit.lost.values()) if engine.audit else 0,
        },
        "bounds_seconds": [bound / 1e9 for bound in LATENCY_BOUNDS],
        "models": models,
    }  # fmt: skip


def _limits(admission: Admission, in_models: int, budget: int, accepting: int) -> Iterator[_Limit]:
    """The limits; of connections and calls each of the `accepting` processes has its own."""
    of, shares = admission, admission.shares
    connections, calls = shares.connections * accepting, shares.streams * accepting
    yield _Limit("requests", "--max-admitted-requests", of.requests, of.max_requests, of.refused)
    yield _Limit("request bytes", "--max-admitted-bytes", of.bytes, of.max_bytes, of.refused)
    yield _Limit("connections", "--max-connections", of.connections.total(), connections,
                 of.refused_connections)  # fmt: skip
    yield _Limit("gRPC calls", "--max-streams", of.streams, calls, of.refused_streams)
    if budget:
        yield _Limit("model memory", _BUDGET, in_models, budget, 0)


# --- models


def _absent(model: Model) -> _Document:
    """A model without any version, with the members of those with one."""
    state = State.UNAVAILABLE if model.reason else State.LOADING if model.awaited else ""
    return _entry(model.name, "", state, model.reason, model.unloaded)


def _described(model: Model, version: ModelVersion, cores: int, further: str) -> _Document:
    """A version; `further` is a reason why it gets no requests, "" for none."""
    report, counters = version.report, version.report.statistics
    kinds = Counter(instance.kind for instance in report.instances)
    reason = reason_of(model, version, further)
    entry = _entry(version.model, version.name, version.state, reason, model.unloaded)
    entry |= {
        "requests": counters.success_count, "failures": counters.fail_count,
        "failures_by_reason": {why: n for why, n in counters.failures.items() if n},
        "rows": counters.inference_count, "batches": counters.execution_count,
        "last_request": counters.last_inference_ms / 1_000,
        "latency": _counts(counters.request_histogram), "queue": _counts(counters.queue_histogram),
        "compute": _counts(counters.compute_histogram),
    }  # fmt: skip
    if version.ready:
        config = version.config
        own = parameter(config, _OWN_THREADS)
        entry |= {
            "backend": config.backend, "instances": {kind.value: n for kind, n in kinds.items()},
            "threads": _threads(kinds, cores, own), "memory_bytes": report.memory_bytes,
            "gpu_memory_bytes": sum(each.nbytes for each in report.gpu_memory),
            "load_seconds": report.load_seconds, "waiting": report.pending,
            "stalled": len(report.stalled), "overloaded": counters.overloaded,
            "decoupled": version.chain.decoupled,
            "backends": {each.name: each.active for each in report.backends},
            "servers": {each.name: each.serves for each in report.endpoints},
        }  # fmt: skip
    return entry


def _entry(name: str, version: str, state: str, reason: str, unloaded: bool) -> _Document:
    """A version that has done nothing; `unloaded` if it is because a client asked for that."""
    return {
        "name": name, "version": version, "state": str(state), "reason": reason,
        "unloaded": unloaded, "backend": "", "instances": {}, "threads": 0, "memory_bytes": 0,
        "gpu_memory_bytes": 0, "load_seconds": 0.0, "waiting": 0, "stalled": 0,
        "overloaded": False, "decoupled": False, "backends": {}, "servers": {},
        "requests": 0, "failures": 0, "failures_by_reason": {}, "rows": 0, "batches": 0,
        "last_request": 0.0, "latency": [], "queue": [], "compute": [],
    }  # fmt: skip


def _threads(kinds: Mapping[InstanceKind, int], cores: int, own: str) -> int:
    """Threads that compute for a version: on the event loop none of its own, elsewhere its share
    of the cores for each instance, as it was loaded, or `own` ones.
    """
    local = kinds.get(InstanceKind.THREAD, 0) + kinds.get(InstanceKind.PROCESS, 0)
    each = int(own) if own.isdecimal() and int(own) else threads_for(sum(kinds.values()), cores)
    return local * each


def _counts(histogram: Histogram) -> list[int]:
    """The counts by bound, without zeros at the end: most models are idle, or fast."""
    counts = histogram.within(LATENCY_BOUNDS)
    end = len(counts)
    while end and not counts[end - 1]:
        end -= 1
    return counts[:end]


def _workers(version: ModelVersion) -> Iterator[_Process]:
    pids = version.report.instance_pids
    return (_Process("worker", n, pids[n], version.model, version.name) for n in sorted(pids))


def _downloads(engine: Engine, identity: Identity) -> Iterator[_Document]:
    """Models that are being brought, by their names in their stores; addresses as in `degraded`."""
    for store in engine.control.catalogue.stores:
        for each in store.downloads:
            if identity.may(Permission.OBSERVE, each.model):
                yield {
                    "model": each.model, "store": store.address if identity.sees_all else "",
                    "bytes": each.nbytes, "fetched_bytes": each.done,
                }  # fmt: skip


# --- what is degraded, and why


def _degraded(kind: str, name: str, reason: str, **more: str) -> _Document:
    return {"kind": kind, "name": name, "version": "", "reason": reason, **more}


def _server_degraded(engine: Engine, identity: Identity) -> Iterator[_Document]:
    if reason := engine.readiness.reason:
        # Which may name models that the client may not know of.
        yield _degraded("server", "", reason if identity.sees_all else "not all models are ready")


def _processes_degraded(processes: Sequence[_Process]) -> Iterator[_Document]:
    for each in processes:
        if not each.pid:
            yield _degraded(each.kind, each.name, "its process has ended and is started again")


def _limits_degraded(limits: Sequence[_Limit]) -> Iterator[_Document]:
    for each in limits:
        if each.limit and each.full and each.option != _BUDGET:
            share = f"{each.used / each.limit:.0%} of {each.limit} in use"
            yield _degraded("limit", each.name, f"{share} ({each.option})")


def _certificates_degraded(found: Sequence[Certificate], now: float) -> Iterator[_Document]:
    for each in found:
        left = each.expires - now
        if left < _EXPIRING_SECS:
            days = f"{abs(left) / 86_400:.1f} days"
            text = f"expired {days} ago" if left <= 0 else f"expires in {days}"
            yield _degraded("certificate", each.file, f"{text} (door {each.door})")


def _model_degraded(entry: _Document, told: Collection[str]) -> Iterator[_Document]:
    """The entry of a version, unless its only reason is one of those that were `told`."""
    reason = "" if entry["reason"] in told else entry["reason"]
    if entry["state"] == State.UNAVAILABLE and entry["unloaded"]:
        return
    if entry["overloaded"]:
        reason = reason or "requests are refused: they would wait too long in its queue"
    if entry["stalled"]:
        reason = reason or f"{entry['stalled']} of its instances make no progress"
    if reason:
        yield _degraded("model", entry["name"], reason, version=entry["version"])
