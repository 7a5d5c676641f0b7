"""Floor 0: the vocabulary that every other package speaks. Values only; nothing here does I/O."""
