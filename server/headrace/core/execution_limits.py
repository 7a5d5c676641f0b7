"""How long an execution may take before something is done about it.

The server's settings are the defaults; a model's configuration overrides them by parameters of the
same names.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.errors import InvalidOption

_MOST_SECS = 1e6


@dataclass(frozen=True, slots=True)
class ExecutionLimits:
    """Seconds without progress; 0 switches a limit off.

    Progress is the end of a batch, a response within it, or a call of another model. After
    `execution_secs` the execution is ended, if it can be. After `stall_secs` its instance counts as
    stalled; and an execution in a worker that nobody has waited for in so long is ended.
    """

    execution_secs: float = 0.0
    stall_secs: float = 0.0

    def of(self, parameters: Mapping[str, str]) -> "ExecutionLimits":
        """A model's own, with these as defaults; raises `InvalidOption` naming the wrong one."""
        return ExecutionLimits(
            seconds(parameters, "execution_limit_secs", self.execution_secs),
            seconds(parameters, "stall_secs", self.stall_secs),
        )


def seconds(parameters: Mapping[str, str], name: str, default: float) -> float:
    """A time among a configuration's parameters; raises `InvalidOption`."""
    text = parameters.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < _MOST_SECS:
        expected = "a number of seconds, 0 for no limit"
        raise InvalidOption(f"parameters['{name}']", f"expected {expected}, got {text!r}")
    return value
