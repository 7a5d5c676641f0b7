"""The settings of models: which there are, and how they are loaded."""

from dataclasses import dataclass

from headrace.core.environment_options import EnvironmentOptions, variable_names
from headrace.core.execution_limits import ExecutionLimits
from headrace.engine.residency import ResidencyOptions
from headrace.execution.triton.options import TritonOptions
from headrace.options import setting


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What an operator can decide of models."""

    # Models
    model_repository: list[str] = setting(  # noqa: RUF009 - it calls `field`
        [],
        "Directories with models, one or more; required unless model files are given",
        "model-store",
    )
    model_file: list[str] = setting(  # noqa: RUF009
        [],
        "Model files (`.onnx`, `.py`, or a library's) to serve without a repository;"
        " on the command line also without the option",
    )
    model_control_mode: str = setting(
        "none",
        "Who decides which models are served: `none` loads all at start-up and changes nothing,"
        " `poll` follows the repositories, `explicit` has clients load and unload",
        choices=("none", "poll", "explicit"),
    )
    load_model: list[str] = setting(  # noqa: RUF009
        [],
        "Models to load at start-up with `--model-control-mode explicit`, which loads no others;"
        " `*` for all",
        between=",",
    )
    load_overrides: str = setting(
        "config",
        "What a load request may bring along: `none`; `config`, how a model of the repository is"
        " served; `files`, also models that are data (ONNX); `code`, anything, which lets whoever"
        " may load models run code on this machine",
        choices=("none", "config", "files", "code"),
    )
    max_override_bytes: int = setting(
        1 << 30, "Bytes of files that load requests have brought along and that are in use"
    )
    model_namespacing: bool = setting(
        False,
        "Serve models of one name from several repositories, each as `NAME@REPOSITORY`;"
        " without it such a name is unavailable",
    )
    reload: bool = setting(
        True, "Load model files that are served without a repository again when they change"
    )
    repository_poll_secs: int = setting(
        15,
        "In the mode `poll`, how often repositories are looked at where the file system tells of"
        " no changes by itself",
        least=1,
    )
    model_config_name: str = setting(
        "", "Read `configs/<name>.pbtxt` of a model instead of its `config.pbtxt`, where it has one"
    )
    disable_auto_complete_config: bool = setting(
        False, "Take configurations as written; fill nothing in from the model's file"
    )
    default_max_batch_size: int = setting(
        64,
        "`max_batch_size` of a model that can batch and whose configuration does not say",
        least=1,
    )
    trust_model_code: bool = setting(
        False,
        "Load also those files that can run code when they are loaded, such as `model.joblib`;"
        " without it only where a model's configuration says that it is trusted",
    )
    model_load_thread_count: int = setting(4, "How many models are loaded at once", least=1)
    model_load_retry_count: int = setting(
        0, "How often a version that cannot be loaded is tried again before it is given up"
    )
    model_load_timeout_secs: int = setting(
        0,
        "How long loading one version may take, with building its environment; a worker process"
        " that takes longer is ended, what else does is left to itself; 0: no limit",
    )
    load_on_request: bool = setting(
        False, "Load models when they are asked for, instead of all at start"
    )
    model_memory_budget: int = setting(
        0,
        "Bytes that models in memory may take together; those that were not asked for the longest"
        " are unloaded for others, and loaded on request; 0: no limit",
    )
    load_wait_secs: int = setting(
        30, "How long a request waits for a model that is loaded on request", least=1
    )
    minimum_residency_secs: int = setting(
        60, "How long a model stays after it was loaded on request, whatever else is asked for"
    )
    unload_after_idle_secs: int = setting(
        0,
        "Unload models that nobody has asked for in so long, and load them on request; 0: never",
    )
    pin_model: list[str] = setting(  # noqa: RUF009
        [], "Of models that are loaded on request, those that are loaded at start and always stay",
        between=",",
    )  # fmt: skip
    allow_in_process_python: bool = setting(
        False,
        "Run Python models in the server's own process where their configuration says so, by the"
        " parameter `execution`; one that hangs or crashes takes the server with it",
    )
    execution_limit_secs: int = setting(
        600,
        "How long a batch may take, a stream from one response to the next; then its worker is"
        " killed and started again, and a run of an ONNX model on a thread is ended; a model's"
        " parameter of this name overrides it; 0: no limit",
    )
    stall_secs: int = setting(
        60,
        "How long a batch may make no progress until its instance is stalled; a model is not ready"
        " while all of its instances are; a worker that nobody waits for in so long is killed and"
        " started again; a model's parameter of this name overrides it; 0: never",
    )
    pinned_memory_pool_byte_size: int = setting(
        256 << 20,
        "Bytes of page-locked memory for copies to and from GPUs, where there are any; 0: none",
    )
    exit_on_error: bool = setting(
        True, "Exit if a model cannot be loaded, instead of serving the rest"
    )
    strict_readiness: bool = setting(
        False,
        "Be not ready while any model that is to be served is not loaded; otherwise the server is"
        " ready once every model was tried at start. What a loaded model does is its own readiness",
    )
    allow_traffic_control: bool = setting(
        False,
        "Let clients change how requests are divided between the versions of a model; with explicit"
        " model control they may anyway",
    )
    # Environments of models
    worker_env: list[str] = setting(  # noqa: RUF009
        [],
        "Names of environment variables that Python models see beside the usual ones, also patterns"
        " such as `SHOP_*`; never the server's own, `HEADRACE_*`",
        between=",",
    )
    environment_cache: str = setting(
        "",
        "Directory where the environments of Python models are kept;"
        " by default `headrace/environments` in `$XDG_CACHE_HOME` or `~/.cache`",
    )
    wheelhouse: str = setting(
        "", "Directory with wheels that environments are built from, without any package index"
    )
    environment_build_timeout_secs: int = setting(
        1800, "How long building one environment may take", least=1
    )
    # Tritons that this server starts
    triton_server: str = setting(
        "tritonserver", "Triton's program, for models that are to run in one; found on `PATH`"
    )
    triton_processes: str = setting(
        "1",
        "How many processes of it: a number, or `per-gpu` for one for each GPU",
        form=("per-gpu|[1-9]|[1-5][0-9]|6[0-4]", "per-gpu or a number from 1 to 64"),
    )
    triton_gpus: list[str] = setting(  # noqa: RUF009
        [], "The GPUs that they may use, by number or UUID; all if none is named", between=","
    )
    triton_option: list[str] = setting(  # noqa: RUF009
        [], "Further options for them, such as `--log-verbose=1`; once for each", between="\n"
    )
    triton_environment: list[str] = setting(  # noqa: RUF009
        [], "Names of environment variables that they see beside the usual ones", between=","
    )
    triton_start_timeout_secs: int = setting(
        120, "How long one may take until it is live; then it is killed and started again", least=1
    )
    triton_exit_timeout_secs: int = setting(
        10, "How long one may take to end when the server does; then it is killed", least=1
    )
    triton_hang_secs: int = setting(
        60, "After how long without an answer one is killed and started again; 0: never"
    )

    @property
    def tritons(self) -> TritonOptions:
        """How Triton is started for models that are to run in one."""
        gpus = [gpu.strip() for part in self.triton_gpus for gpu in part.split(",") if gpu.strip()]
        return TritonOptions(
            self.triton_server, self.triton_processes, gpus, self.triton_option,
            self.triton_environment, self.triton_start_timeout_secs, self.triton_exit_timeout_secs,
            self.triton_hang_secs,
        )  # fmt: skip

    @property
    def execution_limits(self) -> ExecutionLimits:
        """How long executions may take, unless a model says otherwise."""
        return ExecutionLimits(self.execution_limit_secs, self.stall_secs)

    @property
    def residency(self) -> ResidencyOptions | None:
        """How models are loaded on request, None if they are not."""
        if not (self.load_on_request or self.model_memory_budget or self.unload_after_idle_secs):
            return None
        return ResidencyOptions(
            self.model_memory_budget,
            self.load_wait_secs,
            self.minimum_residency_secs,
            self.unload_after_idle_secs,
            frozenset(self.pin_model),
            frozenset(self.load_model),
        )

    @property
    def environments(self) -> EnvironmentOptions:
        """The settings of models' environments; raises `ValueError` for names that are none."""
        return EnvironmentOptions(
            self.environment_cache, self.wheelhouse, self.environment_build_timeout_secs,
            tuple(name for given in self.worker_env for name in variable_names(given)),
        )  # fmt: skip
