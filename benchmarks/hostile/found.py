"""Cases that `--search` has found and that are mended; each is an attack of `--hostile` and a test.

A line is what the search prints, under a name.
"""

from collections.abc import Mapping

from benchmarks.hostile.case import Case, Change

FOUND: Mapping[str, Case] = {
    "packed-bombs": Case(
        door="grpc",
        operation="ServerReflectionInfo",
        changes=(Change("file_containing_extension.containing_type", "spaces", amount=8_000_000),),
        requests=64,
        compression="gzip",
        frame=64,
    ),
}
