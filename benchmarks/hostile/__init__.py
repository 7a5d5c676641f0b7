"""Attacks on a server and what they do to it: `scripts/bench --hostile`."""
