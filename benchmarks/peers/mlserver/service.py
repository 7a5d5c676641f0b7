"""An MLServer runtime for ONNX files."""

# It runs in the peer's own environment, whose packages the type checker does not have.
# mypy: ignore-errors

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxRuntime(MLModel):
    """One session, with one thread: the server has one core."""

    async def load(self) -> bool:
        """Open the model's file."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            self.settings.parameters.uri, options, providers=["CPUExecutionProvider"]
        )
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer one request."""
        array = NumpyCodec.decode_input(payload.inputs[0])
        (result,) = self._session.run(["output"], {"input": array})
        output = NumpyCodec.encode_output("output", result)
        return InferenceResponse(model_name=self.name, model_version="1", outputs=[output])
