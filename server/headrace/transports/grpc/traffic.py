"""The procedures of `headrace.v1.TrafficService`, which Triton does not have."""

from headrace.engine.engine import Engine
from headrace.transports.grpc.call import Unary
from headrace.transports.grpc.procedures import TRAFFIC
from headrace.transports.grpc.unary import answers
from headrace.wire.documents import to_json
from headrace.wire.pb import traffic_pb2 as pb


def traffic_handlers(engine: Engine) -> dict[str, Unary]:
    """All of them, by full path."""
    traffic = engine.traffic

    def replace(message: pb.SetModelTrafficRequest) -> pb.ModelTrafficResponse:
        traffic.set(message.name, to_json(message.rules))
        return traffic.document(message.name)

    def reset(message: pb.ModelTrafficRequest) -> pb.ModelTrafficResponse:
        traffic.reset(message.name)
        return traffic.document(message.name)

    def promote(message: pb.ModelVersionRequest) -> pb.ModelTrafficResponse:
        traffic.promote(message.name, message.version, message.reason)
        return traffic.document(message.name)

    def roll_back(message: pb.ModelVersionRequest) -> pb.ModelTrafficResponse:
        traffic.roll_back(message.name, message.version, message.reason)
        return traffic.document(message.name)

    table: dict[str, Unary] = {
        "ModelTraffic": answers(pb.ModelTrafficRequest, lambda m: traffic.document(m.name)),
        "SetModelTraffic": answers(pb.SetModelTrafficRequest, replace),
        "ResetModelTraffic": answers(pb.ModelTrafficRequest, reset),
        "PromoteModelVersion": answers(pb.ModelVersionRequest, promote),
        "RollBackModelVersion": answers(pb.ModelVersionRequest, roll_back),
    }
    return {f"/{TRAFFIC}/{name}": handler for name, handler in table.items()}
