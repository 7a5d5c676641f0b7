"""The engine: models by name, their life cycle, the stages of calls, and the account.

`engine` is used by doors, through the interfaces in `doors`. `model` has models and their versions,
of which `ModelVersion.compose` puts the stages of `chain` before a version's queue. `opening` reads
a model's directory, `loading` makes its instances, `lifecycle` replaces and unloads versions, and
`control` does so for clients. `admission` is the account of requests and bytes, `metrics` the table
of metrics.
"""
