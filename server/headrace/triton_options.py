"""What people bring from Triton's command line, and this server has no setting for.

An option about Triton's own threads, pools, GPU memory or polling is taken, and said to be without
effect: what clients see is the same. One that would change answers, or who may ask, is refused.
"""

_LOOP = "one event loop answers all connections"
_NO_POOL = "messages are not pooled"
_NO_GPU = "this process uses no GPU memory"

# By option, why it has no effect.
WITHOUT_EFFECT = {
    "--http-thread-count": _LOOP,
    "--grpc-infer-thread-count": _LOOP,
    "--grpc-infer-allocation-pool-size": _NO_POOL,
    "--grpc-max-response-pool-size": _NO_POOL,
    "--buffer-manager-thread-count": "tensors are not copied by threads",
    "--host-policy": "cores are divided over models by the CPU limit",
    "--pinned-memory-pool-byte-size": _NO_GPU,
    "--cuda-memory-pool-byte-size": _NO_GPU,
    "--cuda-virtual-address-size": _NO_GPU,
    "--min-supported-compute-capability": _NO_GPU,
    "--model-load-gpu-limit": _NO_GPU,
    "--enable-peer-access": _NO_GPU,
    "--allow-gpu-metrics": "there are no metrics of GPUs",
}

# By option, what to do instead, where there is something.
NOT_OFFERED = dict.fromkeys(
    (
        "--cache-config", "--cache-directory", "--response-cache-byte-size", "--rate-limit",
        "--rate-limit-resource", "--backend-directory", "--repoagent-directory",
        "--allow-sagemaker",
        "--sagemaker-port", "--allow-vertex-ai",
    ),
    "",
) | {
    "--strict-model-config": "--disable-auto-complete-config does what its value true did",
    "--backend-config": "settings of a backend lie in a model's parameters;"
    " --default-max-batch-size is an option of its own",
}  # fmt: skip
