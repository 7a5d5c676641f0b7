"""Placement in worker processes, each running one instance of a Python model.

`worker_set` has the workers of a version, watched and replaced; `worker_instance` is a worker as an
instance, `conversation` its exchange with the model, `batch_frames` the conversion of batches to
frames, `worker_process` the process. The code in that process is `headrace.workers`; `environment`
asks plugins for its interpreter.
"""
