"""TraceSetting: trace settings, told and changed."""

from headrace.engine.tracing import Tracing
from headrace.transports.grpc.call import Unary
from headrace.transports.grpc.unary import answers
from headrace.wire.pb import grpc_service_pb2 as pb


def trace_setting_handler(tracing: Tracing) -> Unary:
    """The procedure."""

    def answer(message: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        changes = {name: list(setting.value) for name, setting in message.settings.items()}
        tracing.change(message.model_name, changes)
        response = pb.TraceSettingResponse()
        for name, values in tracing.document(message.model_name).items():
            response.settings[name].value.extend(values)
        return response

    return answers(pb.TraceSettingRequest, answer)
