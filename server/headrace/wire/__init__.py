"""Floor 2: the protocol's bytes to values and back, without I/O, waiting or a clock."""
