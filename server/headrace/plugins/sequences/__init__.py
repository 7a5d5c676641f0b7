"""Sequences of models of this server: requests that share a state, in Triton's words.

`configuration.py` reads `sequence_batching`, `controls.py` makes the tensors that a model is given
besides its clients' inputs, `decisions.py` decides which request runs next and on which instance,
`scheduler.py` acts on that in front of the version's batcher, and `slots.py` gives each request its
place in a batch.
"""

from headrace.plugins.sequences.configuration import SequenceBatching

__all__ = ["SequenceBatching"]
