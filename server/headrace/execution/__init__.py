"""Floor 3: instances of models: what takes a batch and reports back on the event-loop thread."""
