"""Instances of models: what takes a batch and reports back on the event-loop thread.

A backend (`backend`) loads a model; its instances run in a placement (`placement`): in this process
(`local`, `in_process`), in workers (`worker_set` with an instance for each worker in
`worker_instance`, its talk with the model in `conversation`, its process in `worker_process`), or
on other servers (`remote`). Environments of workers are found or built in `environments`; Tritons
that this server starts are in `triton`. Each process that is started is a `ChildProcess`.
"""
