"""Upstreams' properties of a model, beside its configuration."""

import pytest
from google.protobuf import text_format

from headrace.placement.upstream import model
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
