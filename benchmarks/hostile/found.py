"""Cases that `--search` has found and that are mended; each is an attack of `--hostile` and a test.

A line is what the search prints, under a name.
"""

from collections.abc import Mapping

from benchmarks.hostile.case import Case

FOUND: Mapping[str, Case] = {}
