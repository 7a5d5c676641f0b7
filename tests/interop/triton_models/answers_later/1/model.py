import queue
import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.requests = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.answer)
        self.thread.start()

    def execute(self, requests):
        for request in requests:
            self.requests.put(request)
        return None

    def answer(self):
        while (request := self.requests.get()) is not None:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            sender = request.get_response_sender()
            sender.send(
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + 1)]),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )

    def finalize(self):
        self.requests.put(None)
        self.thread.join()
