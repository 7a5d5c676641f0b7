"""The memory of large batches, given back by an instance that goes on with smaller ones.

ONNX Runtime's arena and the buffers of batches keep what the largest batch took. An instance
without batches gives it back; one that is in use all the time never would, although a single
client may have sent that batch.
"""

_LARGE = 16 << 20  # bytes of a batch's tensors that matter


class Footprint:
    """The memory that recent batches needed. Owned by the event-loop thread."""

    def __init__(self, rest_secs: float) -> None:
        """Memory is kept for `rest_secs` after the last batch that needed it."""
        self._rest_secs = rest_secs
        self._most = 0  # bytes of the largest batch since memory was given back
        self._secs = 0.0  # since a batch of about that size

    def ran(self, nbytes: int) -> None:
        """Note a batch with `nbytes` of inputs and outputs."""
        if 2 * nbytes >= self._most:
            self._most = max(self._most, nbytes)
            self._secs = 0.0

    def look(self, elapsed: float) -> bool:
        """True if memory is to be given back now; `elapsed` seconds after the last look."""
        self._secs += elapsed
        if self._most < _LARGE or self._secs < self._rest_secs:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Begin anew: memory was given back."""
        self._most, self._secs = 0, 0.0
