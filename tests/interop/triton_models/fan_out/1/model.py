import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def ask(self, count):
        request = pb_utils.InferenceRequest(
            model_name="meeting",
            inputs=[pb_utils.Tensor("COUNT", count)],
            requested_output_names=["PRESENT"],
        )
        present = []
        for response in await request.async_exec(decoupled=True):
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            output = pb_utils.get_output_tensor_by_name(response, "PRESENT")
            if output is not None:
                present.append(int(output.as_numpy()[0]))
        return present[-1]

    async def execute(self, requests):
        responses = []
        for request in requests:
            count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()
            together = await asyncio.gather(*[self.ask(count) for _ in range(count[0])])
            output = pb_utils.Tensor("TOGETHER", np.array(together, dtype=np.int32))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
