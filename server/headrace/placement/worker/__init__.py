"""Placement in worker processes, each of which runs one instance of a Python model.

`worker_set` has the workers of a version, watched and replaced; `worker_instance` is one of them to
the scheduler, `conversation` its talk with the model, `batch_frames` how batches become frames,
`worker_process` the process. What runs in it is `headrace.workers`; which interpreter it is,
`environment` asks plugins.
"""
