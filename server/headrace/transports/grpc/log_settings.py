"""LogSettings: the settings of the log, told and changed."""

from headrace.engine.log_control import LogControl
from headrace.transports.grpc.call import Unary
from headrace.transports.grpc.unary import answers
from headrace.wire.pb import grpc_service_pb2 as pb


def log_settings_handler(logs: LogControl) -> Unary:
    """The procedure."""

    def answer(message: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        logs.change({name: _value(setting) for name, setting in message.settings.items()})
        response = pb.LogSettingsResponse()
        for name, value in logs.document().items():
            setting = response.settings[name]
            if isinstance(value, bool):
                setting.bool_param = value
            elif isinstance(value, int):
                setting.uint32_param = value
            else:
                setting.string_param = value
        return response

    return answers(pb.LogSettingsRequest, answer)


def _value(setting: pb.LogSettingsRequest.SettingValue) -> bool | int | str:
    kind = setting.WhichOneof("parameter_choice")
    value: bool | int | str = getattr(setting, kind) if kind else ""
    return value
