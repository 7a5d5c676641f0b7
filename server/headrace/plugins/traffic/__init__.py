"""Traffic between a model's versions: splits, shadow copies, and automatic roll-back.

`rules` are the rules from configurations and clients, `decisions` their consequences, as pure
functions; `router` divides the calls between a model's versions, `model` has the rules of one model
and watches its versions, `control` those of all models.
"""
