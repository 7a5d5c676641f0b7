"""Where models run: what takes a batch and reports back on the event-loop thread.

A backend (`backend`) loads a model; its instances run in a placement (`placement`): in this process
(`local`: ONNX Runtime, and Python models that are trusted with it), in worker processes (`worker`),
or on other servers (`upstream`). The engine never asks which. Each process that is started is a
`ChildProcess`.
"""
