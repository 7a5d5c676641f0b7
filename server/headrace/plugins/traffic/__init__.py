"""The traffic between a model's versions: splits, copies for a shadow, and roll-back by itself.

`rules` are what a configuration or a client asks for, `decisions` what follows from them, as plain
functions over values; `router` stands for a model's versions and divides its calls, `model` keeps
the rules of one model and watches how its versions do, `control` those of all models.
"""
