"""The engine: models by name, their life cycle, the stages of calls, and the account.

`engine` is used by doors, through the interfaces in `entrance`. `model` has models and their
versions. A `version` has parts while it is loaded (`running`), a chain that puts the stages of
`chain` before its queue (`version_chain`), and a `report`. `opening` reads a model's directory,
`loading` makes its instances, `lifecycle` replaces and unloads versions, and `control` does so for
clients. `admission` is the account of requests and bytes, `metrics` the table of metrics.
"""
