"""Documents about the server and its models, as messages of the protocol.

Both transports answer from these: gRPC sends the message, HTTP its JSON form.
"""

from collections.abc import Callable, Iterable, Iterator

from headrace.core.columns import COLUMNS
from headrace.core.signature import Signature, TensorSpec
from headrace.engine.model import Model
from headrace.engine.report import VersionReport
from headrace.engine.version import ModelVersion, State
from headrace.observability.statistics import CacheCounts, ResponseCounters, VersionStatistics
from headrace.protocol.pb import grpc_service_pb2 as pb

# The extensions of the protocol that this server supports, under the names of their
# specifications.
EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


def model_metadata(version: ModelVersion, versions: Iterable[str]) -> pb.ModelMetadataResponse:
    """The inputs and outputs of a version; `versions` are those to be listed."""
    signature, config = version.chain.signature, version.config
    instances = version.report.instances
    kinds = dict.fromkeys(instance.kind.value for instance in instances)
    properties = {
        "backend": config.backend,
        "instance_kind": ",".join(kinds),
        "instances": str(len(instances)),
    }
    if COLUMNS in config.parameters:
        properties[COLUMNS] = config.parameters[COLUMNS].string_value
    return pb.ModelMetadataResponse(
        name=version.model,
        versions=versions,
        platform=config.platform or config.backend,
        inputs=[_tensor(signature, spec) for spec in signature.inputs],
        outputs=[_tensor(signature, spec) for spec in signature.outputs],
        properties=properties,
    )


def _tensor(signature: Signature, spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=spec.name, datatype=spec.datatype.value, shape=signature.wire_shape(spec)
    )


def statistics(version: ModelVersion) -> pb.ModelStatistics:
    """The counters of a version."""
    counters = version.report.statistics
    return pb.ModelStatistics(
        name=version.model,
        version=version.name,
        last_inference=counters.last_inference_ms,
        inference_count=counters.inference_count,
        execution_count=counters.execution_count,
        inference_stats=_inference(counters),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=rows,
                compute_input=_duration(batch.count, batch.compute_input_ns),
                compute_infer=_duration(batch.count, batch.compute_infer_ns),
                compute_output=_duration(batch.count, batch.compute_output_ns),
            )
            for rows, batch in sorted(counters.batches.items())
        ],
        memory_usage=_memory(version.report),
        response_stats={
            str(ordinal): _response(responses)
            for ordinal, responses in sorted(counters.responses.ordinals.items())
        },
    )


def _memory(report: VersionReport) -> Iterator[pb.MemoryUsage]:
    if report.memory_bytes:
        yield pb.MemoryUsage(type="CPU", id=0, byte_size=report.memory_bytes)
    for on_gpu in report.gpu_memory:
        yield pb.MemoryUsage(type="GPU", id=on_gpu.device, byte_size=on_gpu.nbytes)


def index(
    model: Model, reason: Callable[[str, int], str], ready_only: bool
) -> list[pb.RepositoryIndexResponse.ModelIndex]:
    """Every version of a model with its state, or the name of one without any.

    `reason` returns further remarks on a version, by model and number.
    """
    entry, name = pb.RepositoryIndexResponse.ModelIndex, model.name
    if not model.versions and not ready_only:
        coming = State.LOADING.value if model.awaited else ""
        state = State.UNAVAILABLE.value if model.reason else coming
        return [entry(name=name, state=state, reason=model.reason)]
    versions = [model.versions[number] for number in sorted(model.versions)]
    return [
        entry(
            name=name,
            version=version.name,
            state=version.state.value,
            reason=reason_of(model, version, reason(name, version.number)),
        )
        for version in versions
        if version.ready or not ready_only
    ]


def reason_of(model: Model, version: ModelVersion, further: str) -> str:
    """The reason why a version is not as it should be; `further` is one of its traffic."""
    own = version.chain.obstacle or version.reason or version.report.detour
    return own or further or model.source.trouble


def _response(counters: ResponseCounters) -> pb.InferResponseStatistics:
    return pb.InferResponseStatistics(
        compute_infer=_duration(counters.compute_infer.count, counters.compute_infer.ns),
        compute_output=_duration(counters.compute_output.count, counters.compute_output.ns),
        success=_duration(counters.success.count, counters.success.ns),
        fail=_duration(counters.fail.count, counters.fail.ns),
        empty_response=_duration(counters.empty_response.count, counters.empty_response.ns),
        cancel=_duration(counters.cancel.count, counters.cancel.ns),
    )


def _inference(counters: VersionStatistics) -> pb.InferStatistics:
    done, cache = counters.success_count, counters.cache or CacheCounts()
    computed = done - cache.hits.count
    return pb.InferStatistics(
        success=_duration(done, counters.success_ns),
        fail=_duration(counters.fail_count, counters.fail_ns),
        queue=_duration(done, counters.queue_ns),
        compute_input=_duration(computed, counters.compute_input_ns),
        compute_infer=_duration(computed, counters.compute_infer_ns),
        compute_output=_duration(computed, counters.compute_output_ns),
        cache_hit=_duration(cache.hits.count, cache.hits.ns),
        cache_miss=_duration(cache.misses.count, cache.misses.ns),
    )


def _duration(count: int, ns: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=ns)
