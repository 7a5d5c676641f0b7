"""The commands `headrace explain` and `headrace tune`; `loading` measures the latter's settings."""
