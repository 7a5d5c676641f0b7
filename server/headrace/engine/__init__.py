"""Floor 5: what a transport may call."""
