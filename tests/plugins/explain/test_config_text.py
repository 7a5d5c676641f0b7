"""Other settings in the text of a `config.pbtxt`: all else stays as it was written."""

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidConfig
from headrace.plugins.explain.config_text import changed, policy_in, rewritten, settings_in
from headrace.plugins.explain.searching import TunedSettings
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import parse_config
from headrace.scheduling.policy import BatchPolicy

PRESENT = TunedSettings(8, 0, 1)
WHOLE = """\
# The model of the shop.
name: "m"  # not "max_batch_size: 9"
max_batch_size: 8  # rows
dynamic_batching {
  preferred_batch_size: [4, 8]
  # two levels
  priority_levels: 2
}
instance_group [
  {
    kind: KIND_CPU
  }
]
parameters { key: "max_batch_size" value { string_value: "instance_group { count: 5 }" } }
"""


@pytest.mark.parametrize(("wanted", "text", "expected"), [
    (PRESENT, WHOLE, WHOLE),
    (TunedSettings(16, 0, 1), WHOLE, WHOLE.replace("size: 8", "size: 16").replace("8]", "16]")),
    (TunedSettings(4, 0, 1), WHOLE, WHOLE.replace("size: 8", "size: 4").replace("4, 8]", "4]")),
    (TunedSettings(8, 0, 1, 0, 2), WHOLE, WHOLE.replace("4, 8]", "2]")),
    (TunedSettings(16, 0, 1, 0, 4), WHOLE,
        WHOLE.replace("size: 8", "size: 16").replace("4, 8]", "4]")),
    (TunedSettings(8, 500, 1, 0, 4), "", "dynamic_batching { preferred_batch_size: [4]"
        " max_queue_delay_microseconds: 500 }\n"),
    (TunedSettings(8, 500, 1), WHOLE, WHOLE.replace(
        "levels: 2\n", "levels: 2\n  max_queue_delay_microseconds: 500\n")),
    (TunedSettings(8, 0, 3), WHOLE, WHOLE.replace("KIND_CPU\n", "KIND_CPU\n    count: 3\n")),
    (TunedSettings(8, 0, 1, 2), WHOLE, WHOLE
        + 'parameters { key: "intra_op_thread_count" value { string_value: "2" } }\n'),
    (TunedSettings(16, 500, 2), "", "max_batch_size: 16\n"
        "dynamic_batching { max_queue_delay_microseconds: 500 }\ninstance_group { count: 2 }\n"),
    (TunedSettings(8, 500, 1), "dynamic_batching { }", "dynamic_batching {"
        " max_queue_delay_microseconds: 500 }"),
    (TunedSettings(8, 500, 1), "dynamic_batching < max_queue_delay_microseconds: 1 >",
        "dynamic_batching < max_queue_delay_microseconds: 500 >"),
    (TunedSettings(2, 0, 1), "max_batch_size: 8; dynamic_batching { preferred_batch_size: 4 }",
        "max_batch_size: 2; dynamic_batching { }"),
    (TunedSettings(2, 0, 1), "dynamic_batching { preferred_batch_size: 1"
        " preferred_batch_size: 4 # 4\n}", "dynamic_batching { preferred_batch_size: [1] # 4\n}\n"
        "max_batch_size: 2\n"),
    (TunedSettings(8, 0, 1, 2),
        'parameters [{key: "intra_op_thread_count", value: {string_value: "4"}}]',
        'parameters [{key: "intra_op_thread_count", value { string_value: "2" }}]'),
    (TunedSettings(8, 0, 2), "instance_group [ { count: 1, kind: KIND_CPU } ]  # one",
        "instance_group [ { count: 2, kind: KIND_CPU } ]  # one"),
])  # fmt: skip
def test_texts(wanted: TunedSettings, text: str, expected: str) -> None:
    assert rewritten(text, "m/config.pbtxt", PRESENT, wanted) == expected


def test_an_invalid_text_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"config\.pbtxt:1: .*max_batch"):
        rewritten("max_batch: 8", "config.pbtxt", PRESENT, TunedSettings(16, 0, 1))


_SIZES = st.integers(1, 32)
_SETTINGS = st.builds(
    TunedSettings,
    _SIZES,
    st.integers(0, 5000),
    st.integers(1, 8),
    st.integers(0, 4),
    st.integers(0, 4),
)


@st.composite
def configurations(draw: st.DrawFn) -> ModelConfig:
    """Configurations as their authors may write them, with fields beside those that are tuned."""
    config = ModelConfig(name=draw(st.sampled_from(["", "m", 'a "b" # c', "{ }"])))
    if draw(st.booleans()):
        config.max_batch_size = 8
    if draw(st.booleans()):
        config.dynamic_batching.SetInParent()
        config.dynamic_batching.preferred_batch_size.extend(draw(st.lists(_SIZES, max_size=3)))
        config.dynamic_batching.priority_levels = draw(st.integers(0, 3))
        if draw(st.booleans()):
            config.dynamic_batching.priority_queue_policy[1].max_queue_size = 7
    if draw(st.booleans()):
        group = config.instance_group.add(name="count: 7", kind=draw(st.sampled_from([0, 2])))
        group.count = draw(st.integers(0, 1))
    for name in draw(st.lists(st.sampled_from(["intra_op_thread_count", "x", "value"]))):
        config.parameters[name].string_value = draw(st.sampled_from(["", "1", '"}', "key: 'x'"]))
    config.input.add(name="INPUT0", dims=[-1, 2])
    return config


@given(configurations(), _SETTINGS, st.booleans())
def test_texts_of_any_configuration(
    config: ModelConfig, wanted: TunedSettings, single: bool
) -> None:
    text = text_format.MessageToString(config, as_one_line=single)
    found = rewritten(text, "config.pbtxt", PRESENT, wanted)
    assert parse_config(found, "config.pbtxt").config == changed(config, PRESENT, wanted)
    assert rewritten(found, "config.pbtxt", wanted, wanted) == found


def test_settings_in_a_configuration() -> None:
    config = parse_config(WHOLE.replace("kind", "count: 2 kind"), "").config
    assert settings_in(config) == TunedSettings(8, 0, 2)
    assert policy_in(config) == BatchPolicy(8, 0, frozenset({4, 8}))
    more = changed(config, settings_in(config), TunedSettings(4, 100, 3, 2))
    assert settings_in(more) == TunedSettings(4, 100, 3, 2)
    assert policy_in(more) == BatchPolicy(4, 100_000, frozenset({4}))
    chosen = changed(config, settings_in(config), TunedSettings(8, 100, 2, 0, 2))
    assert policy_in(chosen) == BatchPolicy(8, 100_000, frozenset({2}))
    assert (more.name, more.dynamic_batching.priority_levels) == ("m", 2)


@pytest.mark.parametrize(("text", "error"), [
    ("sequence_batching { direct { } }", "sequence_batching: its batches"),
    ("ensemble_scheduling { }", "ensemble_scheduling: its batches"),
    ("model_transaction_policy { decoupled: true }", "it is decoupled"),
    ("instance_group { count: 1 } instance_group { count: 2 }", "the model has 2"),
])  # fmt: skip
def test_configurations_that_cannot_be_tuned(text: str, error: str) -> None:
    with pytest.raises(InvalidConfig, match=error):
        settings_in(parse_config(text, "").config)
