"""The stages that a call passes before the queue of its version; see `ModelVersion.compose`.

A stage is a function of a call: it passes it on to the next one, keeps it, or ends it by what it
raises. Here are those that keep nothing of a call. Owned by the event-loop thread.
"""

from collections.abc import Sequence
from time import monotonic_ns

from headrace.core.errors import InvalidRequest
from headrace.core.parameter_names import DEADLINE_PARAMETER, FORWARD_PARAMETER
from headrace.core.requests import Call, Submit
from headrace.core.signature import Signature
from headrace.engine.shared_calls import placeholders


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
