"""Stores: models from object stores and databases, through a cache on local disk.

`remote` is what every store here is made of: places with files of models, how they are brought
completely or not at all, and when they are asked again. `cache` keeps what was brought, `objects`,
`database` and `web` are the places, `signatures` says who has published a model.
"""
