"""Placements: the places where models run, which take batches and return outcomes.

A backend (`backend`) loads a model (`loaded`); its instances run in a placement (`placement`): in
this process (`local`: ONNX Runtime, and trusted Python models), in worker processes (`worker`), or
on upstreams (`upstream`). The engine does not distinguish them. Each started process is a
`ChildProcess`.
"""
