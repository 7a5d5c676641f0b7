"""Upstreams: models that other servers run, their endpoints, and the clients for them."""
