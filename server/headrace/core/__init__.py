"""Value types shared by every other package, without I/O; and the registry of plugins.

In reading order: `call` is a request on its way, `tensors` and `datatypes` are its values,
`signature` is a model's inputs and outputs with the check of a call, `errors` is the tree of all
errors, `limits` are limits as values, `model_spec` is what a backend loads. `plugins` finds
extensions and optional parts by name.
"""
