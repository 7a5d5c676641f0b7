"""The protocol's bytes to values and back, without I/O, waiting or a clock."""
