"""Instances of models: what takes a batch and reports back on the event-loop thread."""
