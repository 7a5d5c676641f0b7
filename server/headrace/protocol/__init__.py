"""Codecs: bytes of each protocol to values and back, without I/O, blocking or a clock."""
