"""Upstreams' properties of a model, beside its configuration."""

from pathlib import Path

import pytest
from google.protobuf import text_format

from headrace.placement.upstream import model
from headrace.placement.upstream.connection import RemoteDescription
from headrace.placement.upstream.options import RemoteOptions
from headrace.placement.upstream.protocols import ProtocolClients
from headrace.placement.upstream.reconciler import Reconciler
from headrace.placement.upstream.triton_options import LoadCounts, TritonControl
from headrace.protocol.pb import grpc_service_pb2 as pb
from headrace.protocol.pb.model_config_pb2 import ModelConfig

OLDEST = (
    "max_batch_size: 4 instance_group { count: 2 } sequence_batching {"
    " max_sequence_idle_microseconds: 5 oldest { max_candidate_sequences: 40"
    ' preferred_batch_size: [ 4 ] } control_input { name: "START" control { } } }'
)


def config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def completed(ours: str, theirs: str) -> tuple[ModelConfig, list[str]]:
    """The completed configuration, and its invalid fields."""
    result, remote = config(ours), config(theirs)
    model.complete(result, remote)
    return result, [path for path, _ in model.problems(result, remote, 0)]


@pytest.mark.parametrize(
    "ours",
    [
        "", "sequence_batching { }", "sequence_batching { oldest { } }",
        "sequence_batching { oldest { max_candidate_sequences: 40 } }",
    ],
)  # fmt: skip
def test_sequence_settings_of_the_upstreams(ours: str) -> None:
    result, problems = completed(ours, OLDEST)
    assert not problems
    assert result.sequence_batching == config(OLDEST).sequence_batching


def test_sequence_idle_time_of_the_configuration() -> None:
    result, problems = completed("sequence_batching { max_sequence_idle_microseconds: 9 }", OLDEST)
    assert not problems
    assert result.sequence_batching.max_sequence_idle_microseconds == 9
    assert result.sequence_batching.oldest.max_candidate_sequences == 40
    rules = model.sequence_rules(config(OLDEST))
    assert rules is not None
    assert (rules.idle_ns, rules.named) == (5_000, True)
    rules = model.sequence_rules(config("sequence_batching { iterative_sequence: true }"))
    assert rules is not None
    assert not rules.named
    assert model.sequence_rules(config("max_batch_size: 4")) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "path"),
    [
        ("sequence_batching { direct { } }", OLDEST, "sequence_batching.direct"),
        (
            "sequence_batching { oldest { max_candidate_sequences: 4 } }", OLDEST,
            "sequence_batching.oldest",
        ),
        ("dynamic_batching { }", OLDEST, "dynamic_batching"),
        ("sequence_batching { }", "", "sequence_batching"),
        ("model_warmup { }", OLDEST, "model_warmup"),
        (
            "model_transaction_policy { decoupled: true }", "",
            "model_transaction_policy.decoupled",
        ),
        (
            "model_warmup { }", "model_transaction_policy { decoupled: true }", "model_warmup",
        ),
    ],
)  # fmt: skip
def test_contradictions(ours: str, theirs: str, path: str) -> None:
    assert path in completed(ours, theirs)[1]


def test_differences_left_out_of_the_configuration_are_reported() -> None:
    found = [path for path, _ in model.problems(ModelConfig(), config(OLDEST), 0)]
    assert found == ["sequence_batching"]
    decoupled = config("model_transaction_policy { decoupled: true }")
    found = [path for path, _ in model.problems(ModelConfig(), decoupled, 0)]
    assert found == ["model_transaction_policy.decoupled"]
    assert completed("", "model_transaction_policy { decoupled: true }")[0] == decoupled
    # A single call is too few for sequences.
    problems = list(model.problems(config(OLDEST), config(OLDEST), 1))
    assert [path for path, _ in problems] == ["parameters['max_in_flight']"]
    assert not list(model.problems(config("sequence_batching { }"), None, 0))


@pytest.mark.parametrize(
    ("text", "servers", "calls"),
    [
        (OLDEST, 1, 160), (OLDEST, 3, 480), (OLDEST, 30, 1024), ("sequence_batching { }", 1, 64),
        ("max_batch_size: 50 sequence_batching { }", 2, 200),
    ],
)  # fmt: skip
def test_calls(text: str, servers: int, calls: int) -> None:
    assert model.calls_for_sequences(config(text), servers) == calls


def described(
    metadata: str, remote: str | None, ours: str = "", **parameters: str
) -> model.RemoteModel:
    """A model as a server describes it, which is not called here."""
    options = RemoteOptions.of({"endpoints": "http://127.0.0.1:1", **parameters}, "m", 0, Path())
    endpoints = options.resolve()
    clients = ProtocolClients(options, "m")
    reconciler = Reconciler(clients, endpoints, config(ours), TritonControl.of({}), LoadCounts())
    reported = text_format.Parse(metadata, pb.ModelMetadataResponse())
    told = None if remote is None else config(remote)
    return model.RemoteModel(reconciler, endpoints[0], RemoteDescription(reported, told))


TENSORS = "inputs { name: 'X' datatype: 'FP32' shape: 4 } outputs { name: 'Y' datatype: 'FP32' }"


@pytest.mark.parametrize(
    ("metadata", "remote", "rows"),
    [
        (TENSORS, "max_batch_size: 4", 4), (TENSORS, "", 0), ("", "max_batch_size: 4", 4),
        (TENSORS, None, None), ("", None, 0), (TENSORS.partition("outputs")[0], None, 0),
    ],
)  # fmt: skip
def test_rows_of_a_batch_as_far_as_a_server_tells(
    metadata: str, remote: str | None, rows: int | None
) -> None:
    assert described(metadata, remote).traits.max_rows == rows


def test_traits_of_a_model_on_upstreams() -> None:
    remote = described(TENSORS, None, forward_headers="X-Tenant")
    assert remote.traits.forward_headers == ("x-tenant",)
    assert remote.traits.alike == remote.forwarding.alike
    assert remote.traits.reads_parameters
    assert remote.traits.exact_shapes
    assert not remote.traits.row_limit  # the model's own
    assert remote.memory(growth=None) == 0


def test_tolerated_differences_are_warnings() -> None:
    remote = described(TENSORS, "max_batch_size: 4", "max_batch_size: 8")
    assert [text.partition(" has it otherwise: ")[2] for text in remote.warnings] == [
        "max_batch_size: 8 asked for, 4 there"
    ]
    assert not described(TENSORS, "max_batch_size: 8", "max_batch_size: 8").warnings
