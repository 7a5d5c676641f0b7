"""Other settings in a configuration, as a message and as the text of its `config.pbtxt`.

The text keeps its comments, order and all other fields: only the fields that change are replaced,
removed or added. The result is parsed, and must be the changed message.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import NamedTuple

from headrace.core.errors import InvalidConfig
from headrace.plugins.explain.searching import TunedSettings
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.repository.config import TOKEN, parameter, parse_config
from headrace.scheduling.policy import BatchPolicy

_SIZE, _DELAY, _PREFERRED, _COUNT, _THREADS = (
    "max_batch_size", "max_queue_delay_microseconds", "preferred_batch_size", "instances",
    "intra_op_thread_count",
)  # fmt: skip


def settings_in(config: ModelConfig) -> TunedSettings:
    """The settings of a completed configuration; raises `InvalidConfig` if they cannot be tuned.

    The number of instances is that of the only group, on each of its devices.
    """
    if (choice := config.WhichOneof("scheduling_choice")) not in (None, "dynamic_batching"):
        raise InvalidConfig(f"{choice}: its batches are not formed by one queue")
    if config.model_transaction_policy.decoupled:
        raise InvalidConfig("model_transaction_policy: it is decoupled")
    if len(config.instance_group) != 1:
        found = len(config.instance_group)
        raise InvalidConfig(f"instance_group: one group can be tuned, the model has {found}")
    threads = parameter(config, _THREADS)
    return TunedSettings(
        config.max_batch_size, config.dynamic_batching.max_queue_delay_microseconds,
        config.instance_group[0].count, int(threads) if threads.isdecimal() else 0,
    )  # fmt: skip


def policy_in(config: ModelConfig) -> BatchPolicy:
    """The rule by which batches are formed with a completed configuration."""
    batching = config.dynamic_batching
    delay = batching.max_queue_delay_microseconds * 1_000
    return BatchPolicy(config.max_batch_size, delay, frozenset(batching.preferred_batch_size))


def changed(config: ModelConfig, present: TunedSettings, wanted: TunedSettings) -> ModelConfig:
    """A copy of a configuration, completed or as written, with what differs in `wanted`.

    A preferred batch size that is the largest follows that, and those beyond it are left out; if
    one is wanted, it is the only one.
    """
    found, changes = deepcopy(config), wanted.changes(present)
    batching = found.dynamic_batching
    if _SIZE in changes:
        found.max_batch_size = wanted.max_batch_size
    if _SIZE in changes or _PREFERRED in changes:
        kept = _preferred(batching.preferred_batch_size, present, wanted)
        if kept != list(batching.preferred_batch_size):
            batching.preferred_batch_size[:] = kept
    if _DELAY in changes:
        batching.max_queue_delay_microseconds = wanted.max_queue_delay_microseconds
    if _COUNT in changes:
        group = found.instance_group[0] if found.instance_group else found.instance_group.add()
        group.count = wanted.instances
    if _THREADS in changes:
        found.parameters[_THREADS].string_value = str(wanted.intra_op_thread_count)
    return found


def rewritten(text: str, name: str, present: TunedSettings, wanted: TunedSettings) -> str:
    """The text of a `config.pbtxt` with what differs in `wanted`.

    Raises `InvalidConfig` if the text, of the file `name`, is invalid.
    """
    config, changes = parse_config(text, name).config, wanted.changes(present)
    expected, found = changed(config, present, wanted), text
    if _SIZE in changes:
        found = _set(found, [_SIZE], f"{_SIZE}: {wanted.max_batch_size}")
    kept = list(expected.dynamic_batching.preferred_batch_size)
    if kept != list(config.dynamic_batching.preferred_batch_size):
        line = f"{_PREFERRED}: {kept}" if kept else ""
        found = _set(found, ["dynamic_batching", _PREFERRED], line)
    if _DELAY in changes:
        line = f"{_DELAY}: {wanted.max_queue_delay_microseconds}"
        found = _set(found, ["dynamic_batching", _DELAY], line)
    if _COUNT in changes:
        found = _set(found, ["instance_group", "count"], f"count: {wanted.instances}")
    if _THREADS in changes:
        entry = f'key: "{_THREADS}" value {{ string_value: "{wanted.intra_op_thread_count}" }}'
        if _THREADS in config.parameters:
            value = entry.partition(" value ")[2]
            found = _set(found, ["parameters", "value"], f"value {value}", _of_threads)
        else:
            found = _added(found, 0, len(found), f"parameters {{ {entry} }}")
    same = parse_config(found, name).config == expected
    assert same, f"{name} was changed in another way. This is a bug."
    return found


def _preferred(sizes: Sequence[int], present: TunedSettings, wanted: TunedSettings) -> list[int]:
    size = wanted.max_batch_size
    if wanted.preferred_batch_size != present.preferred_batch_size:
        return [wanted.preferred_batch_size]
    moved = [size if each == present.max_batch_size else each for each in sizes]
    return list(dict.fromkeys(each for each in moved if each <= size))


class _Field(NamedTuple):
    """A field of a message in a text, with the ranges of the messages between its braces."""

    name: str
    start: int
    end: int
    messages: Sequence[tuple[int, int]]


def _fields(text: str, start: int, end: int) -> Iterator[_Field]:
    """The fields of the message between two positions of a valid text."""
    tokens = [
        (match.group(), match.start(), match.end())
        for match in TOKEN.finditer(text, start, end)
        if match.lastgroup != "skip"
    ]
    at = 0
    while at < len(tokens):
        (name, first, _), at = tokens[at], at + 1
        if name in ",;":
            continue
        at += tokens[at][0] == ":"
        opened, messages = list[int](), list[tuple[int, int]]()
        while True:
            (token, begin, _), at = tokens[at], at + 1
            if token in "{<[":
                opened.append(begin)
            elif token in "}>]":
                since = opened.pop()
                if token != "]" and all(text[each] == "[" for each in opened):
                    messages.append((since + 1, begin))
            if not opened:
                break
        while at < len(tokens) and tokens[at][0][0] in "\"'":
            at += 1  # adjacent strings are one value
        yield _Field(name, first, tokens[at - 1][2], messages)


def _any(_message: str) -> bool:
    return True


def _of_threads(message: str) -> bool:
    """True for the entry of `parameters` that has the number of threads."""
    fields = _fields(message, 0, len(message))
    return any(
        each.name == "key" and message[: each.end].endswith((f'"{_THREADS}"', f"'{_THREADS}'"))
        for each in fields
    )


def _set(
    text: str,
    path: Sequence[str],
    line: str,
    of: Callable[[str], bool] = _any,
    within: tuple[int, int] | None = None,
) -> str:
    """Replace the field at a path by `line`, "" for none; add it if the text has none.

    Of several messages at the path, the last one for which `of` holds is changed.
    """
    name, *rest = path
    start, end = within or (0, len(text))
    found = [each for each in _fields(text, start, end) if each.name == name]
    if rest:
        inner = [each for one in found for each in one.messages if of(text[slice(*each)])]
        if inner:
            return _set(text, rest, line, within=inner[-1])
        return _added(text, start, end, f"{name} {{ {line} }}")
    if not found:
        return _added(text, start, end, line)
    for each in reversed(found[1:] if line else found):
        text = _cut(text, each)
    return text[: found[0].start] + line + text[found[0].end :] if line else text


def _cut(text: str, gone: _Field) -> str:
    """Remove a field with its separator, and its line if nothing else is there."""
    before, after = text[: gone.start], text[gone.end :].lstrip(" \t")
    if after[:1] in (",", ";"):
        after = after[1:].lstrip(" \t")
    alone = not before.rpartition("\n")[2].strip() and after.startswith("\n")
    return before.rpartition("\n")[0] + after if alone else before + after


def _added(text: str, start: int, end: int, line: str) -> str:
    """Add a field to the end of a message: on a line of its own if its other fields have some."""
    body = text[start:end].rstrip()
    if end == len(text):
        return f"{text[:start]}{body}\n{line}\n" if body else f"{text[:start]}{line}\n"
    lines = [one for one in body.splitlines()[1:] if one.strip()]
    gap = "\n" + lines[-1][: len(lines[-1]) - len(lines[-1].lstrip())] if lines else " "
    rest = text[start + len(body) : end] or " "
    return f"{text[:start]}{body}{gap}{line}{rest}{text[end:]}"
