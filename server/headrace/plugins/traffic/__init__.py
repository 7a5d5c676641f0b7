"""Traffic between a model's versions: splits, shadow copies, and automatic roll-back.

`rules` are the rules from configurations and clients, `decisions` their consequences, as pure
functions; `router` divides the calls between a model's versions, `control` has the rules of all
models, watches their versions, and changes rules.
"""
