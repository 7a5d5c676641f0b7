"""Stores: models from object stores and databases, through a cache on local disk.

`remote` is what places with models have in common. `objects`, `database`, `web` and the like are
such places, `remote_store` makes a store of one, and asks again when it is out of reach. `download`
brings models completely or not at all, `cache` keeps what was brought, `signatures` says who has
published a model.
"""
