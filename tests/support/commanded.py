"""Requests to models that do what their input `COMMAND` says, and their answers `TOLD`."""

import json
from collections.abc import Mapping
from typing import Any

from tests.support.client import Client, Input, Parameter, strings
from tests.support.grpc_client import GrpcClient, infer_message, read_answer
from tests.support.grpc_stream import Stream


def ask(client: Client, model: str, do: str, **more: object) -> Any:
    command = json.dumps({"do": do, **more}).encode()
    answer = client.infer(model, {"COMMAND": strings([command], [1, 1])})
    return json.loads(answer["TOLD"][0, 0])


def stream_of(
    client: GrpcClient, model: str, *commands: Mapping[str, object], **parameters: Parameter
) -> list[Any]:
    """Messages for some commands on one stream."""
    with Stream(client) as stream:
        for index, command in enumerate(commands):
            array = strings([json.dumps(command).encode()], [1, 1])
            inputs = [Input("COMMAND", array)]
            stream.send(infer_message(model, inputs, id=str(index), parameters=parameters))
        stream.half_close()
        return stream.rest()


def values(messages: list[Any], id: str = "0") -> list[object]:
    """Values of the responses to one request, errors as text."""
    found: list[object] = []
    for message in messages:
        if message.infer_response.id == id:
            if message.error_message:
                found.append(message.error_message)
                continue
            answer = read_answer(message.infer_response)
            found.append(json.loads(answer["TOLD"][0, 0]))
    return found
