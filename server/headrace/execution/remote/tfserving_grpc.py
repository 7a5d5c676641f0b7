"""TensorFlow Serving over gRPC."""

from google.protobuf.message import DecodeError

from headrace.core.errors import ExecutionFailed, InvalidRequest
from headrace.core.tensors import Buffer
from headrace.execution.remote.connection import CallFailed, RemoteDescription, RemoteRequest
from headrace.execution.remote.grpc_client import Description, GrpcDialect, Question
from headrace.execution.remote.options import RemoteOptions
from headrace.wire import tfserving
from headrace.wire.pb import tfserving_pb2 as tf
from headrace.wire.remote_infer import RemoteAnswer
from headrace.wire.remote_status import Failure, Fate

_PREDICTIONS = b"/tensorflow.serving.PredictionService/"
_MODELS = b"/tensorflow.serving.ModelService/"


class TfServingDialect(GrpcDialect):
    """`GrpcDialect` with TensorFlow Serving's procedures."""

    infer_path = _PREDICTIONS + b"Predict"

    def __init__(self, options: RemoteOptions, model: str) -> None:
        """Raises `InvalidOption` for what is no certificate or key."""
        super().__init__(options, model)
        self._signature = options.protocol.signature or tfserving.SIGNATURE
        self._predictions = tfserving.PredictMessages(self._spec(self._signature))

    def describe(self) -> Description:
        """Ask for the model's signature."""
        asked = tf.GetModelMetadataRequest(
            model_spec=self._spec(), metadata_field=[tfserving.SIGNATURE_FIELD]
        )
        path = _PREDICTIONS + b"GetModelMetadata"
        said = self.given(*(yield path, asked.SerializeToString()))
        try:
            metadata = tf.GetModelMetadataResponse.FromString(bytes(said)).metadata
            signatures = tfserving.signatures_of(metadata)
        except (DecodeError, InvalidRequest) as error:
            raise self.nonsense(error) from None
        try:
            return RemoteDescription(tfserving.metadata_of(signatures, self._signature), None)
        except InvalidRequest as error:
            failure = Failure(Fate.ANSWERED, ExecutionFailed(str(error)))
            raise CallFailed(failure, str(error)) from None

    def readiness(self) -> Question:
        """The question in which states the model's versions are."""
        asked = tf.GetModelStatusRequest(model_spec=self._spec())
        return _MODELS + b"GetModelStatus", asked.SerializeToString()

    def is_ready(self, data: Buffer) -> bool:
        """Whether any of them is available; raises `CallFailed`."""
        try:
            return tfserving.available(tf.GetModelStatusResponse.FromString(bytes(data)))
        except DecodeError as error:
            raise self.nonsense(error) from None

    def message(self, request: RemoteRequest) -> list[Buffer]:
        """A PredictRequest; it has no place for an id and parameters."""
        return self._predictions.request(request.inputs, request.outputs)

    def answer(self, data: Buffer) -> RemoteAnswer:
        """What a PredictResponse says; raises `CallFailed`."""
        try:
            return tfserving.read_predictions(data)
        except InvalidRequest as error:
            raise self.nonsense(error) from None

    def _spec(self, signature: str = "") -> tf.ModelSpec:
        options = self.options
        return tfserving.model_spec(
            options.model, options.version, options.protocol.label, signature
        )
