"""Every setting of the server, once: its name, type, default and meaning.

Command line, environment, settings file and `docs/configuration.md` all come from the fields below.
A setting is `http_port` here, `--http-port` on the command line, `HEADRACE_HTTP_PORT` in the
environment and `http-port` in a settings file (TOML); the first of these that is given wins, in
this order. Names are Triton's wherever Triton has the option.
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.api.header_rules import GRPC_PREFIX, HeaderRules
from headrace.api.operations import Category
from headrace.core.limits import ExecutionLimits, Shares
from headrace.doors.grpc.options import LEVELS, GrpcOptions, TlsFiles
from headrace.engine.residency import ResidencyOptions
from headrace.observability.logs import FORMATS, LogSettings
from headrace.observability.trace_settings import TraceConfig, old_options, read_trace_config
from headrace.options import ENV_PREFIX, Option, SettingsError, Value, setting
from headrace.placement.upstream.triton_options import TritonOptions
from headrace.protocol.http2.keep_alive import KeepAlive

if TYPE_CHECKING:
    from headrace.core.model_spec import EnvironmentOptions
    from headrace.observability.series import MetricsOptions

_CATEGORIES = ", ".join(f"`{category}`" for category in Category)
_ALIKE = 0.7  # from which on a name is taken for another one that was spelt wrongly
_MANY_CORES = 4  # from which on front ends can leave the models enough


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Decisions of an operator; sizes in bytes, times in seconds unless a name says more."""

    model_repository: list[str] = setting(
        [],
        "Directories with models, one or more; required unless model files are given",
        "model-store",
        metavar="DIR",
        section="Models",
    )
    model_file: list[str] = setting(
        [],
        "Model files (`.onnx`, `.py`, or a library's) to serve without a repository;"
        " on the command line also without the option",
        metavar="FILE",
    )
    model_control_mode: str = setting(
        "none",
        "Who decides which models are served: `none` loads all at start-up and changes nothing,"
        " `poll` follows the repositories, `explicit` has clients load and unload",
        choices=("none", "poll", "explicit"),
    )
    load_model: list[str] = setting(
        [],
        "Models to load at start-up with `--model-control-mode explicit`, which loads no others;"
        " `*` for all",
        between=",",
        metavar="MODEL",
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
        0, "Unload models that nobody has asked for in so long, and load them on request; 0: never"
    )
    pin_model: list[str] = setting(
        [],
        "Of models that are loaded on request, those that are loaded at start and always stay",
        between=",",
        metavar="MODEL",
    )
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

    worker_env: list[str] = setting(
        [],
        "Names of environment variables that Python models see beside the usual ones, also patterns"
        " such as `SHOP_*`; never the server's own, `HEADRACE_*`",
        between=",",
        section="Environments of models",
    )
    environment_cache: str = setting(
        "",
        "Directory where the environments of Python models are kept;"
        " by default `headrace/environments` in `$XDG_CACHE_HOME` or `~/.cache`",
        metavar="DIR",
    )
    wheelhouse: str = setting(
        "",
        "Directory with wheels that environments are built from, without any package index",
        metavar="DIR",
    )
    environment_installer: str = setting(
        "auto",
        "What installs packages of Python models; `auto` is uv where it is installed and pip has no"
        " settings of its own, else pip",
        choices=("auto", "uv", "pip"),
    )
    environment_build_timeout_secs: int = setting(
        1800, "How long building one environment may take", least=1
    )

    triton_server: str = setting(
        "tritonserver",
        "Triton's program, for models that are to run in one; found on `PATH`",
        section="Tritons that this server starts",
    )
    triton_processes: str = setting(
        "1",
        "How many processes of it: a number, or `per-gpu` for one for each GPU",
        form=("per-gpu|[1-9]|[1-5][0-9]|6[0-4]", "per-gpu or a number from 1 to 64"),
    )
    triton_gpus: list[str] = setting(
        [], "The GPUs that they may use, by number or UUID; all if none is named", between=","
    )
    triton_option: list[str] = setting(
        [], "Further options for them, such as `--log-verbose=1`; once for each", between="\n"
    )
    triton_environment: list[str] = setting(
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

    restricted_api: list[str] = setting(
        [],
        "Answer these categories of requests, over HTTP and over gRPC, only with this header or"
        " metadata, `CATEGORIES:HEADER=VALUE`; categories, with commas between, are"
        f" {_CATEGORIES}",
        between="\n",
        section="HTTP and gRPC",
    )

    allow_http: bool = setting(True, "Answer over HTTP", section="HTTP")
    http_address: str = setting("127.0.0.1", "Address to listen on for HTTP")
    http_port: int = setting(8000, "Port for HTTP; 0 picks a free one", most=65_535)
    reuse_http_port: bool = setting(
        False, "Let several servers listen on the port for HTTP, if all of them have this set"
    )
    http_fast_path: bool = setting(
        True, "Answer infer requests in front of the ASGI application; the answers are the same"
    )
    http_keep_alive_secs: int = setting(75, "How long an idle HTTP connection is kept", least=1)
    http_max_connection_age_secs: int = setting(
        0,
        "How old an HTTP connection may be, give or take a tenth: the next answer is its last;"
        " 0: no limit",
    )
    http_body_timeout_secs: int = setting(
        60, "How long the next part of a request may be awaited, before 408", least=1
    )
    http_header_forward_pattern: str = setting(
        "",
        "Have models see request headers whose names this regular expression matches, as parameters"
        " of their requests",
    )
    http_restricted_api: list[str] = setting(
        [], "The same as `--restricted-api` for HTTP alone, as Triton has it", between="\n"
    )
    http_allowed_origin: list[str] = setting(
        [],
        "Let web pages of this origin, `SCHEME://HOST[:PORT]`, have browsers change models and"
        " settings, beside those of loopback names and of the address that is listened on; `*`:"
        " of all",
        between=",",
    )

    allow_grpc: bool = setting(True, "Answer over gRPC", section="gRPC")
    grpc_address: str = setting("127.0.0.1", "Address to listen on for gRPC")
    grpc_port: int = setting(8001, "Port for gRPC; 0 picks a free one", most=65_535)
    reuse_grpc_port: bool = setting(
        False, "Let several servers listen on the port for gRPC, if all of them have this set"
    )
    grpc_transport: str = setting(
        "native",
        "What speaks gRPC: this server's own event loop, or the slower grpcio library (the extra"
        " `grpcio`)",
        choices=("native", "grpcio"),
    )
    grpc_use_ssl: bool = setting(False, "Encrypt gRPC with TLS")
    grpc_use_ssl_mutual: bool = setting(
        False, "With TLS, take only clients with a certificate signed by the root certificate"
    )
    grpc_server_cert: str = setting(
        "", "PEM file with the server's certificate for gRPC", metavar="FILE"
    )
    grpc_server_key: str = setting("", "PEM file with the key of that certificate", metavar="FILE")
    grpc_root_cert: str = setting(
        "",
        "PEM file with the root certificates that clients' certificates are held against",
        metavar="FILE",
    )
    grpc_header_forward_pattern: str = setting(
        "",
        "Have models see metadata of calls whose names this regular expression matches, as"
        " parameters of their requests",
    )
    grpc_restricted_protocol: list[str] = setting(
        [],
        "The same as `--restricted-api` for gRPC alone, as Triton has it: `CATEGORIES:KEY=VALUE`"
        " asks for the metadata `triton-grpc-protocol-KEY`",
        between="\n",
    )
    grpc_infer_response_compression_level: str = setting(
        "none",
        "How hard to compress inference answers for clients that take them compressed",
        choices=tuple(LEVELS),
    )
    grpc_keepalive_time: int = setting(
        7_200_000,
        "Milliseconds without a sign of life after which a client is sent a PING",
        least=1,
    )
    grpc_keepalive_timeout: int = setting(
        20_000, "Milliseconds that the answer may take, before the connection is closed", least=1
    )
    grpc_keepalive_permit_without_calls: bool = setting(
        False, "Allow such PINGs, of both sides, also while no call is under way"
    )
    grpc_http2_max_pings_without_data: int = setting(
        2, "PINGs in a row without data between, after which one a minute is sent; 0: no limit"
    )
    grpc_http2_min_recv_ping_interval_without_data: int = setting(
        300_000,
        "Milliseconds between two PINGs of a client without data between; sooner is a strike",
    )
    grpc_http2_max_ping_strikes: int = setting(
        2, "Strikes, beyond which the connection is closed; 0: no limit"
    )
    grpc_max_connection_age: int = setting(
        0,
        "Milliseconds, give or take a tenth, after which a connection takes no more calls; 0: no"
        " limit",
    )
    grpc_max_connection_age_grace: int = setting(
        0, "Milliseconds that calls under way have then; 0: no limit"
    )
    grpc_max_connection_idle_secs: int = setting(
        3600, "How long a gRPC connection without calls is kept; 0: no limit"
    )

    allow_metrics: bool = setting(True, "Answer Prometheus scrapes", section="Metrics")
    metrics_address: str = setting("127.0.0.1", "Address to listen on for metrics")
    metrics_port: int = setting(8002, "Port for metrics; 0 picks a free one", most=65_535)
    metrics_interval_ms: int = setting(
        2000, "How often the machine's CPU and the memory of models are looked at", least=1
    )
    metrics_config: list[str] = setting(
        [],
        "Which metrics of latencies there are: `counter_latencies` (true), `histogram_latencies`"
        " (false) or `summary_latencies` (false) `=true` or `=false`, `summary_quantiles=0.5,0.99`",
        between=";",
    )
    allow_cpu_metrics: bool = setting(True, "Have the machine's CPU and memory among the metrics")
    allow_gpu_metrics: bool = setting(True, "Have the GPUs among the metrics, where there are any")

    allow_client_shm: bool = setting(
        False,
        "Let clients register shared memory of this machine, and have tensors in it;"
        " whoever reaches the server can then read and write what its user can of `/dev/shm`",
        section="Shared memory",
    )
    client_shm_prefix: str = setting(
        "", "Of `/dev/shm`, let clients register only keys that begin so"
    )

    max_request_bytes: int = setting(
        64 << 20,
        "Largest request, over HTTP also once it is decompressed, with the inputs that it has in"
        " shared memory, and largest gRPC message; unless given, at most a 32nd of the memory"
        " that the cgroup allows",
        "http-max-input-size",
        least=1,
        section="Limits",
    )
    max_admitted_requests: int = setting(
        10_000,
        "Requests under way in the whole server;"
        " more are refused with 503 / UNAVAILABLE; 0: no limit",
    )
    max_admitted_bytes: int = setting(
        1 << 30,
        "Bytes of all requests under way; more are refused with 503 / UNAVAILABLE; 0: no limit;"
        " unless given, at most an eighth of the memory that the cgroup allows",
    )
    max_connection_share: int = setting(
        50,
        "Percent of these two limits that one connection may take; it may have 64 requests and"
        " 64 MiB in any case",
        least=1,
        most=100,
    )
    max_address_share: int = setting(
        100,
        "The same for all connections from one address; 100, no limit, for where all clients come"
        " through one load balancer",
        least=1,
        most=100,
    )
    max_model_share: int = setting(
        80,
        "Percent of these two limits that the requests of one model may take while the server has"
        " others, of which several busy ones leave room as well; a model may have 64 requests and"
        " 8 MiB in any case; 100: no limit",
        least=1,
        most=100,
    )
    max_connections: int = setting(
        10_000,
        "Connections of clients in each process that has them, at most three quarters of the files"
        " that it may open; more are closed at once; 0: no limit",
    )
    progress_timeout_secs: int = setting(
        60,
        "How long a client may make no progress in sending a gRPC message, or in reading an answer,"
        " before its call or connection is given up; progress is 1 KiB/s",
        least=1,
    )

    frontends: str = setting(
        "0",
        "Processes that accept, decode and encode for the one that runs the models;"
        " 0: that one does it all; `auto`: by the number of cores",
        form=("auto|[0-9]|[1-5][0-9]|6[0-4]", "auto or a number from 0 to 64"),
        section="Processes",
    )
    allow_debugging: bool = setting(
        False,
        "Let other processes of the same user, so also Python models, read this server's memory and"
        " environment, for debuggers and profilers, and let the kernel dump its core",
    )

    id: str = setting("headrace", "The server's name in its metadata", section="Life cycle")
    shutdown_delay_secs: int = setting(
        0, "After SIGTERM, how long the server is not ready but still takes requests"
    )
    exit_timeout_secs: int = setting(30, "How long shutdown waits for requests under way")

    log_verbose: int = setting(0, "1 or more for debugging output", section="Logs")
    log_info: bool = setting(True, "Write information")
    log_warning: bool = setting(True, "Write warnings")
    log_error: bool = setting(True, "Write errors")
    log_format: str = setting("default", "Form of a log line", choices=FORMATS)
    log_file: str = setting(
        "", "File to write the log to instead of standard error", metavar="FILE"
    )
    access_log: bool = setting(False, "Write a line for every request")

    trace_config: list[str] = setting(
        [],
        "What of requests is traced, and where to: `level=`, `rate=`, `count=`, `mode=triton` with"
        " `triton,file=` and `triton,log-frequency=`, or `mode=opentelemetry` with"
        " `opentelemetry,url=`, `opentelemetry,resource=NAME=VALUE` and `opentelemetry,bsp_...=`;"
        " once for each",
        between="\n",
        section="Traces",
    )
    trace_file: str = setting("", "The same as `--trace-config triton,file=`", metavar="FILE")
    trace_level: list[str] = setting(
        [], "The same as `--trace-config level=`, also several times", between=","
    )
    trace_rate: int = setting(1000, "The same as `--trace-config rate=`")
    trace_count: int = setting(-1, "The same as `--trace-config count=`", least=-1)
    trace_log_frequency: int = setting(0, "The same as `--trace-config triton,log-frequency=`")

    @property
    def tritons(self) -> TritonOptions:
        """Options of Tritons that this server starts."""
        gpus = [gpu.strip() for part in self.triton_gpus for gpu in part.split(",") if gpu.strip()]
        return TritonOptions(
            self.triton_server, self.triton_processes, gpus, self.triton_option,
            self.triton_environment, self.triton_start_timeout_secs, self.triton_exit_timeout_secs,
            self.triton_hang_secs,
        )  # fmt: skip

    @property
    def execution_limits(self) -> ExecutionLimits:
        """Longest executions, unless a model says otherwise."""
        return ExecutionLimits(self.execution_limit_secs, self.stall_secs)

    @property
    def residency(self) -> ResidencyOptions | None:
        """Options of loading on request, None if models are loaded at start."""
        if not (self.load_on_request or self.model_memory_budget or self.unload_after_idle_secs):
            return None
        return ResidencyOptions(
            self.model_memory_budget, self.load_wait_secs, self.minimum_residency_secs,
            self.unload_after_idle_secs, frozenset(self.pin_model), frozenset(self.load_model),
        )  # fmt: skip

    @property
    def environments(self) -> "EnvironmentOptions":
        """The settings of models' environments; raises `ValueError` for names that are none."""
        from headrace.core.model_spec import EnvironmentOptions, variable_names  # with numpy

        return EnvironmentOptions(
            self.environment_cache, self.wheelhouse, self.environment_build_timeout_secs,
            tuple(name for given in self.worker_env for name in variable_names(given)),
            self.environment_installer,
        )  # fmt: skip

    @property
    def http_rules(self) -> HeaderRules:
        """Rules on headers of HTTP requests."""
        return HeaderRules(
            self.http_header_forward_pattern, self.http_restricted_api, self.http_allowed_origin,
            self.http_address, restricted_at_both=self.restricted_api,
        )  # fmt: skip

    @property
    def grpc_rules(self) -> HeaderRules:
        """Rules on metadata of gRPC calls."""
        return HeaderRules(
            self.grpc_header_forward_pattern, self.grpc_restricted_protocol, prefix=GRPC_PREFIX,
            restricted_at_both=self.restricted_api,
        )  # fmt: skip

    @property
    def open_at_one_door(self) -> list[str]:
        """Warnings of categories that are restricted at one of two open doors alone."""
        if not (self.allow_http and self.allow_grpc):
            return []
        http, grpc = set(self.http_rules.keys()), set(self.grpc_rules.keys())
        return [
            f"{', '.join(c for c in Category if c in only)}: restricted over {door}, but open to"
            f" all over {other}; --restricted-api restricts both"
            for only, door, other in ((http - grpc, "HTTP", "gRPC"), (grpc - http, "gRPC", "HTTP"))
            if only
        ]

    @property
    def metrics(self) -> "MetricsOptions":
        """Metrics of latencies that are kept; raises `ValueError`."""
        from headrace.observability.series import MetricsOptions  # with numpy

        return MetricsOptions.of(self.metrics_config)

    def shares(self, files: int) -> Shares:
        """Shares of the limits for one client, in a process that may open so many files."""
        most = files * 3 // 4
        connections = min(self.max_connections, most) if self.max_connections else most
        return Shares(
            self.max_connection_share, self.max_address_share, connections, self.max_model_share
        )

    def frontend_count(self, cores: int) -> int:
        """Number of front ends to start on so many cores.

        One would have as much to do as the engine's process has without any, so `auto` starts none
        or two and more: a quarter of the cores, the rest being for models.
        """
        if self.frontends != "auto":
            return int(self.frontends)
        return 0 if cores < _MANY_CORES else min(max(cores // 4, 2), 8)

    @property
    def traces(self) -> TraceConfig:
        """Trace settings and outputs; raises `ValueError`."""
        old = old_options(
            self.trace_file, self.trace_level, self.trace_rate, self.trace_count,
            self.trace_log_frequency,
        )  # fmt: skip
        return read_trace_config([*old, *self.trace_config], os.environ)

    def check(self) -> None:
        """Raise `SettingsError` for what no single setting shows to be wrong."""
        if not self.model_repository and not self.model_file:
            raise SettingsError("give --model-repository DIR, or a model file")
        if self.load_model and self.model_control_mode != "explicit":
            raise SettingsError(
                "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
            )
        if "*" in self.load_model and len(self.load_model) > 1:
            raise SettingsError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )
        if not (self.allow_http or self.allow_grpc):
            raise SettingsError(
                "--allow-http and --allow-grpc are both false: nothing could be asked"
            )
        if self.allow_grpc and self.grpc_transport == "grpcio" and find_spec("grpc") is None:
            raise SettingsError(
                "--grpc-transport=grpcio needs grpcio: pip install 'headrace[grpcio]'"
            )
        http, grpc = self.http_rules, self.grpc_rules
        checks: tuple[tuple[str, Callable[[], object]], ...] = (
            ("--metrics-config:", lambda: self.metrics),
            ("--trace-config:", lambda: self.traces),
            ("--worker-env: expected", lambda: self.environments),
            ("--http-allowed-origin:", http.allowed_origins),
            # Without the values, which are secrets.
            ("--restricted-api:", HeaderRules(restricted_at_both=self.restricted_api).keys),
            (f"--http-header-forward-pattern {http.forward!r}:", http.pattern),
            ("--http-restricted-api:", http.keys),
            (f"--grpc-header-forward-pattern {grpc.forward!r}:", grpc.pattern),
            ("--grpc-restricted-protocol:", grpc.keys),
        )
        for lead, read in checks:
            try:
                read()
            except ValueError as error:
                raise SettingsError(f"{lead} {error}") from None

    @property
    def grpc_options(self) -> GrpcOptions:
        """Options of gRPC's transports."""
        keep_alive = KeepAlive(
            self.grpc_keepalive_time / 1_000,
            self.grpc_keepalive_timeout / 1_000,
            self.grpc_keepalive_permit_without_calls,
            self.grpc_http2_max_pings_without_data,
            self.grpc_http2_min_recv_ping_interval_without_data / 1_000,
            self.grpc_http2_max_ping_strikes,
            self.grpc_max_connection_age / 1_000,
            self.grpc_max_connection_age_grace / 1_000,
        )
        return GrpcOptions(
            keep_alive, self.grpc_infer_response_compression_level, self.progress_timeout_secs,
            self.grpc_max_connection_idle_secs,
        )  # fmt: skip

    @property
    def tls(self) -> TlsFiles | None:
        """Certificate and key of gRPC, None without TLS."""
        if not self.grpc_use_ssl:
            return None
        return TlsFiles(
            self.grpc_server_cert, self.grpc_server_key, self.grpc_root_cert,
            self.grpc_use_ssl_mutual,
        )  # fmt: skip

    @property
    def logs(self) -> LogSettings:
        """The settings of logging."""
        return LogSettings(
            self.log_verbose, self.log_info, self.log_warning, self.log_error, self.log_format,
            self.log_file,
        )  # fmt: skip


def limits_by_memory(memory: int) -> dict[str, Value]:
    """The limits that follow from `memory` bytes that the server may use, none if it has plenty.

    What is under way is decoded and answered, too, beside the models; and JSON takes up to fifteen
    times its text.
    """
    shares = {"max_request_bytes": memory // 32, "max_admitted_bytes": memory // 8}
    defaults = {name: getattr(Settings, name) for name in shares}
    return {name: max(share, 1) for name, share in shares.items() if share < defaults[name]}


OPTIONS: tuple[Option, ...] = tuple(Option.of(declared) for declared in fields(Settings))
# For people: the options by the title of what they are about.
SECTIONS: dict[str, list[Option]] = {}
for _option in OPTIONS:
    if _option.section:
        SECTIONS[_option.section] = []
    SECTIONS[next(reversed(SECTIONS))].append(_option)
# Of these, those by which other commands find and build environments.
ENVIRONMENT_OPTIONS = tuple(
    option for option in SECTIONS["Environments of models"] if option.field != "worker_env"
)
# Kubernetes puts such variables into every pod for a Service that is called "headrace" or alike.
_LINK_NAME = re.compile(r"HEADRACE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")
_LINK_VALUES = ("tcp://", "udp://", "sctp://")
CONFIG_FILE_ENV = ENV_PREFIX + "CONFIG_FILE"
URL_ENV = ENV_PREFIX + "URL"  # no setting: where commands find the server


def from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """Settings in the environment, by field; raises `SettingsError` for unknown HEADRACE_ names."""
    known = {option.env: option for option in OPTIONS}
    found: dict[str, Value] = {}
    for name, value in environment.items():
        if not name.startswith(ENV_PREFIX) or name in (CONFIG_FILE_ENV, URL_ENV):
            continue
        if value.startswith(_LINK_VALUES) or _LINK_NAME.fullmatch(name):
            continue
        if name not in known:
            raise SettingsError(unknown("environment variable", name, [*known, CONFIG_FILE_ENV]))
        found[known[name].field] = known[name].parse(value, name)
    return found


def from_command_line(
    given: object, options: Sequence[Option] = OPTIONS, brought: Mapping[str, str] | None = None
) -> dict[str, Value]:
    """Settings that argparse has put into `given`, by field, else those of `brought`."""
    found: dict[str, Value] = {}
    for option in options:
        value = getattr(given, option.field)
        if value is None and brought:
            value = brought.get(option.field)
        if value is not None:
            found[option.field] = option.parse(value, f"--{option.name}")
    return found


def from_file(path: Path) -> dict[str, Value]:
    """Settings in a TOML file, by field; raises `SettingsError` naming the file."""
    import tomllib  # which few starts need

    by_name = {name: option for option in OPTIONS for name in (option.name, *option.aliases)}
    found: dict[str, Value] = {}
    try:
        for name, value in tomllib.loads(path.read_text(encoding="utf-8")).items():
            if (option := by_name.get(name.replace("_", "-"))) is None:
                raise SettingsError(unknown("setting", name, by_name))
            found[option.field] = option.parse(value, name)
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, SettingsError) as error:
        raise SettingsError(f"settings file {path}: {error}") from error
    return found


def unknown(what: str, name: str, known: list[str] | Mapping[str, object]) -> str:
    """The message for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, known, 1, _ALIKE)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
