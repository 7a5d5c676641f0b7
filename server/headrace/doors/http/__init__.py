"""The HTTP door: routes over the table of operations, on uvicorn's connection class.

`server` and `protocol` are connections, `fast` answers plain infer requests on them. `app` has the
routes for all other requests: `infer`, `generate`, and the operations. `exchange` is one infer
request of any route, `head` its head.
"""
