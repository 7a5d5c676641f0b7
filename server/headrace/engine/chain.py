"""The stages that a call passes before the queue of its version; see `ModelVersion.compose`.

A stage is a function of a call: it passes it on to the next one, keeps it, or ends it by what it
raises. Here are those that keep nothing of a call. Owned by the event-loop thread.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

from headrace.core import plugins
from headrace.core.call import DEADLINE_PARAMETER, FORWARD_PARAMETER, Call, Submit
from headrace.core.errors import InvalidRequest
from headrace.core.signature import Signature
from headrace.engine.shared_calls import placeholders

Compose = Callable[[Submit], Submit]  # from what takes calls next to the stage before it


@dataclass(frozen=True, slots=True)
class StageModel:
    """A version for which stages are composed: `parameters` are those of its configuration."""

    name: str
    version: int
    parameters: Mapping[str, str]
    signature: Signature


class StagePlugin:
    """What a plugin derives a stage from that every call passes before the queue of its version.

    Made once, without arguments, when the server starts. `parameters` are those of models'
    configurations that have a meaning for it.
    """

    parameters: Collection[str] = ()

    def compose(self, model: StageModel) -> Compose | None:
        """The stage of one version, which gets checked calls; None for a model that has none.

        Called on a loading thread; what it returns is called on the event-loop thread, again when
        the version's chain changes. Raises `InvalidOption` for a parameter.
        """
        raise NotImplementedError


def load_stages() -> dict[str, StagePlugin]:
    """The stages of all plugins, by name."""
    return plugins.load(plugins.STAGES, make_stage)


def make_stage(plugin: Any) -> StagePlugin:
    """The stage that a plugin makes; raises `TypeError` if that is none."""
    made = plugin()
    if not isinstance(made, StagePlugin):
        raise TypeError(f"expected a {StagePlugin.__module__}.StagePlugin, got {made!r}")
    return made


def check(signature: Signature, submit: Submit, special: Submit) -> Submit:
    """The stage that checks calls, before `submit`, and says how many rows they have.

    Those of which more is asked than what a model does go to `special`.
    """

    def stage(call: Call) -> None:
        if call.shared is not None:
            call.inputs |= placeholders(call.shared)
        try:
            call.rows = signature.check(call)
        except InvalidRequest as error:
            id = call.id or "<id_unknown>"
            raise InvalidRequest(f"[request id: {id}] {error}") from None
        if call.classes is None:
            submit(call)
        else:
            special(call)

    return stage


def tell_servers(headers: Sequence[str], submit: Submit) -> Submit:
    """The stage for a model that other servers run: what they are told of a call's client.

    Its headers of these names, in lower case, and until when it waits become part of the call.
    """
    names = [(name, FORWARD_PARAMETER + name) for name in headers]

    def stage(call: Call) -> None:
        for name, parameter in names:
            # A front end has put them in already.
            if parameter not in call.parameters and (value := call.header(name)):
                call.parameters[parameter] = value
        if seconds := call.remaining():
            call.parameters[DEADLINE_PARAMETER] = monotonic_ns() + int(seconds * 1e9)
        submit(call)

    return stage
