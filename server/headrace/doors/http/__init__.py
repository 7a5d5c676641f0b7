"""The HTTP door: plain infer requests on their connections, all others by an ASGI application.

`server` listens, `connection` reads, answers plain infer requests and holds the limits, `outgoing`
is what it writes. `asgi` calls the application: `routes` are probes, `infer` and `generate`, and
`app` behind them, of FastAPI, has all other operations. `exchange` is one infer request of any
route, `head` its head.
"""
