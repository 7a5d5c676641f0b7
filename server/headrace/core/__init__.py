"""The vocabulary that every other package speaks. Values only; nothing here does I/O."""
