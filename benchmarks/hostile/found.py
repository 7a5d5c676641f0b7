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
    "many-fields": Case(
        door="grpc",
        operation="ModelStreamInfer",
        changes=(Change("id", "spaces", amount=1_000_000),),
        messages=15,
        frame=16_384,
        ending="cut",
    ),
    "padded-load": Case(
        door="http",
        operation="RepositoryModelLoad",
        changes=(Change("parameters.bytes_param", "spaces", amount=8_000_000),),
        connections=8,
        requests=2,
        ending="cut",
        unread=True,
        explicit=True,
    ),
    "held-requests": Case(
        door="http",
        operation="ModelInfer",
        changes=(
            Change("inputs.contents.uint64_contents", "text", content="0", amount=6553),
            Change("parameters.double_param", "lists", amount=65_536),
        ),
        model="python",
        requests=304,
    ),
    "long-metadata": Case(
        door="grpc",
        operation="ModelStatistics",
        changes=(Change("head", "long", content="grpc-trace-bin", amount=7000),),
        connections=8,
        requests=10_000,
        compression="gzip",
        frame=1024,
    ),
    "refused-inputs": Case(
        door="grpc",
        operation="ModelStreamInfer",
        changes=(Change("inputs.name", "repeat", amount=8_000_000),),
        messages=15,
        compression="gzip",
        ending="abort",
    ),
    "refused-outputs": Case(
        door="grpc",
        operation="ModelStreamInfer",
        changes=(Change("outputs.parameters.uint64_param", "repeat", amount=65_536),),
        connections=2,
        requests=64,
        messages=25,
        compression="deflate",
    ),
    "many-parameters": Case(
        door="http",
        operation="ModelInfer",
        changes=(Change("parameters", "repeat", amount=256),),
        connections=16,
        requests=250,
        pause=0.001,
        unread=True,
    ),
    "datatypes-again": Case(
        door="grpc",
        operation="ModelStreamInfer",
        changes=(Change("inputs.datatype", "entries", amount=4096),),
        connections=2,
        requests=692,
    ),
    "packed-outputs": Case(
        door="grpc",
        operation="ModelInfer",
        changes=(Change("outputs", "text", content="\x00", amount=1_000_000),),
        connections=8,
        requests=1922,
        compression="gzip",
        write=100,
        ending="half",
    ),
    "bytes-in-frames": Case(
        door="grpc",
        operation="ModelInfer",
        changes=(Change("inputs.contents.bytes_contents", "spaces", amount=65_536),),
        model="python",
        connections=8,
        frame=1,
    ),
    "chunked-bodies": Case(
        door="http",
        operation="ModelInfer",
        changes=(Change("parameters.int64_param", "entries", amount=2_000_000),),
        connections=32,
        requests=4,
        compression="gzip",
        write=16_384,
        frame=1024,
        ending="abort",
    ),
    "deep-parameter": Case(
        door="http",
        operation="ModelInfer",
        changes=(Change("parameters.string_param", "nest", amount=1_000_000),),
    ),
}
