"""The HTTP door: a FastAPI application over the table of operations, on uvicorn's connection class.

`server` and `protocol` are connections, `fast` answers plain infer requests on them. `routes` are
in front of the application: probes, `infer` and `generate`; `app` has all other operations.
`exchange` is one infer request of any route, `head` its head.
"""
