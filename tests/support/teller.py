"""Requests to the streaming model `teller`, and its responses."""

import numpy as np

from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.support.client import Input, Parameter, strings
from tests.support.grpc_client import infer_message, parameter


def tell(text: str, count: int, id: str = "", **parameters: Parameter) -> pb.ModelInferRequest:
    """A request to `teller`."""
    inputs = [
        Input("TEXT", strings([text.encode()], [1, 1])),
        Input("COUNT", np.array([[count]], np.int32)),
    ]
    return infer_message("teller", inputs, id=id, parameters=parameters)


def told(message: pb.ModelStreamInferResponse) -> tuple[str, str, bool | None]:
    """Id, text or error of a message, and whether it is the final one."""
    response = message.infer_response
    final = response.parameters.get("triton_final_response")
    text = message.error_message
    if response.outputs:
        assert [output.name for output in response.outputs] == ["OUT", "INDEX"]
        text = response.raw_output_contents[0][4:].decode()
    return response.id, text, None if final is None else bool(parameter(final))
