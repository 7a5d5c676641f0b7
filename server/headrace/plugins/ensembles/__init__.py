"""Ensembles: models made of steps, each of which runs another model.

`graph` reads and checks the steps, `progress` decides what runs when, `scheduler` runs the steps of
requests, and `backend` makes it a model of the server. See docs/ensembles.md.
"""
