"""Shared memory with upstreams on this machine: `client` makes calls, `regions` lends memory."""
