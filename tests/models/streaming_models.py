"""Source texts of decoupled Python models."""

from tests.models.python_models import tensors

_DECOUPLED = "max_batch_size: 8\nmodel_transaction_policy { decoupled: true }\n"

# Answers each request in a thread of its own: TEXT and a number, COUNT times. Parameters of the
# request: `final` makes the last answer the final one, `fail` sends an error at the end.
TELLER = """
    import json
    import threading

    import numpy as np
    import triton_python_backend_utils as pb_utils

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                threading.Thread(target=self.tell, args=(request,)).start()

        def tell(self, request):
            sender = request.get_response_sender()
            wanted = json.loads(request.parameters() or "{}")
            [text] = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy().item())
            for number in range(count):
                out = pb_utils.Tensor("OUT", np.array([[text + b"%d" % number]], object))
                index = pb_utils.Tensor("INDEX", np.array([[number]], np.int32))
                last = wanted.get("final") and number == count - 1
                sender.send(pb_utils.InferenceResponse([out, index]), FINAL if last else 0)
            if wanted.get("fail"):
                error = pb_utils.TritonError("as asked", pb_utils.TritonError.NOT_FOUND)
                sender.send(pb_utils.InferenceResponse(error=error), FINAL)
            elif not (wanted.get("final") and count):
                sender.send(flags=FINAL)
"""
TELLER_CONFIG = (
    _DECOUPLED
    + tensors("input", ("TEXT", "STRING", "1"), ("COUNT", "INT32", "1"))
    + tensors("output", ("OUT", "STRING", "1"), ("INDEX", "INT32", "1"))
)

# Sends SIZE bytes repeatedly, up to half a gigabyte, until its client disconnects. The file
# FILE has the number of sent responses; FILE.cancelled exists once it has seen the end.
FLOOD = """
    import threading
    from pathlib import Path

    import numpy as np
    import triton_python_backend_utils as pb_utils

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    MOST = 512 << 20


    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                threading.Thread(target=self.flood, args=(request,)).start()

        def flood(self, request):
            sender = request.get_response_sender()
            [file] = pb_utils.get_input_tensor_by_name(request, "FILE").as_numpy().ravel()
            size = int(pb_utils.get_input_tensor_by_name(request, "SIZE").as_numpy().item())
            text = np.array([[b"x" * size]], object)
            sent = 0
            with open(file, "w") as note:
                while not sender.is_cancelled() and sent * size < MOST:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]))
                    sent += 1
                    note.seek(0)
                    note.write(str(sent))
                    note.flush()
            if sender.is_cancelled():
                Path(file.decode() + ".cancelled").touch()
            sender.send(flags=FINAL)
"""
FLOOD_CONFIG = (
    _DECOUPLED
    + tensors("input", ("FILE", "STRING", "1"), ("SIZE", "INT32", "1"))
    + tensors("output", ("OUT", "STRING", "1"))
)
