"""The search for hostile requests: what it composes, how it simplifies, and a short one."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from benchmarks.hostile.case import GRPC, HTTP, Case, Change, from_json, simpler, to_json
from benchmarks.hostile.grammar import (
    MOST_BYTES,
    grpc_message,
    http_body,
    http_target,
    mutated,
    operations,
    paths,
    singles,
)
from benchmarks.hostile.models import write_models
from benchmarks.hostile.replay import http_request
from benchmarks.hostile.search import Outcome
from benchmarks.hostile.wire import connect
from benchmarks.server import started
from headrace.api.operations import OPERATIONS
from headrace.protocol.pb import grpc_service_pb2 as pb

MANY = Case(
    HTTP, "ModelInfer", (Change("id", "text", "\\", 4_000_000), Change("inputs", "null")),
    connections=8, compression="gzip", pause=0.1,
)  # fmt: skip


def test_every_operation_and_field_is_searched() -> None:
    first = list(singles(Random(1)))
    for door in (HTTP, GRPC):
        tried = {each.operation for each in first if each.door == door}
        assert tried == {each.name for each in operations(door)}
    assert {each.name for each in OPERATIONS} == {each.operation for each in first}
    changed = {c.field for each in first if each.operation == "ModelInfer" for c in each.changes}
    assert changed == set(paths(Case(GRPC, "ModelInfer")))
    assert {f.name for f in pb.ModelInferRequest.DESCRIPTOR.fields} <= changed
    assert "inputs.parameters.string_param" in changed


@pytest.mark.slow
def test_cases_can_be_sent() -> None:
    random = Random(2)
    for case in islice(singles(random), 60):
        case = mutated(replace(case, changes=case.changes[:1]), random)
        data = grpc_message(case) if case.door == GRPC else http_body(case)
        assert len(data) <= MOST_BYTES * 1.5, case
        if case.door == HTTP:
            assert http_target(case)[1].startswith("/v2")


def test_a_change_over_either_door() -> None:
    text = Change("id", "text", "\\", 3)
    assert b'"id":"\\\\\\"' in http_body(Case(HTTP, "ModelInfer", (text,)))
    read = pb.ModelInferRequest.FromString(grpc_message(Case(GRPC, "ModelInfer", (text,))))
    assert (read.id, list(read.inputs[0].shape)) == ("\\\\\\", [1, 64])
    many = Case(GRPC, "ModelInfer", (Change("inputs.shape", "repeat", amount=4),))
    assert len(pb.ModelInferRequest.FromString(grpc_message(many)).inputs[0].shape) == 8
    deep = Change("inputs.parameters", "nest", amount=2)
    assert b'"parameters":[[{' in http_body(Case(HTTP, "ModelInfer", (deep,)))


def test_a_case_is_read_from_what_is_written() -> None:
    assert from_json(to_json(MANY)) == MANY
    assert eval(repr(MANY), {"Case": Case, "Change": Change}) == MANY


def test_simpler_cases_come_to_an_end() -> None:
    case, steps = MANY, 0
    while case := next(simpler(case), None):  # type: ignore[assignment]
        steps += 1
    assert steps < 20


@pytest.mark.parametrize(("outcome", "bad"), [
    (Outcome(0.05, 0.5, 60 << 20, 0, 0, 9, True), False),
    (Outcome(0.11, 0.5, 0, 0, 0, 9, True), True),
    (Outcome(0.05, 1.1, 0, 0, 0, 9, True), True),
    (Outcome(0.05, 0.5, 65 << 20, 0, 0, 9, True), True),
    (Outcome(0.05, 0.5, 65 << 20, 1 << 20, 0, 9, True), False),
    (Outcome(0.05, 0.5, 0, 0, 5, 9, True), True),
    (Outcome(0.05, 0.5, 0, 0, 0, 9, False), True),
])  # fmt: skip
def test_bounds_of_an_outcome(outcome: Outcome, bad: bool) -> None:
    assert (outcome.badness > 1) is bad
    assert bool(outcome.missed()) is bad


@pytest.mark.slow
def test_unchanged_requests_are_answered_well(tmp_path: Path) -> None:
    write_models(tmp_path)
    with started(tmp_path, None) as target:
        for model in ("mlp", "echo", "text", "python", "whole"):
            with connect(target.http) as made:
                made.sendall(http_request(Case(HTTP, "ModelInfer", model=model)))
                assert made.recv(65_536).startswith(b"HTTP/1.1 200"), model


@pytest.mark.slow
@pytest.mark.whole
def test_a_short_search() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "scripts/bench", "--hostile", "--search", "0.1", "--frontends", "1"],
        cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert "operations with 1 front ends" in done.stdout
    assert "Case(door=" in done.stdout
