"""Every setting of the server, once: its name, type, default and meaning.

Command line, environment, settings file and `docs/configuration.md` all come from the fields below.
A setting is `http_port` here, `--http-port` on the command line, `HEADRACE_HTTP_PORT` in the
environment and `http-port` in a settings file (TOML); the first of these that is given wins, in
this order. Names are Triton's wherever Triton has the option.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from headrace.core.model_spec import EnvironmentOptions
from headrace.observability.logs import FORMATS, LogSettings
from headrace.observability.metrics_options import MetricsOptions
from headrace.observability.trace_settings import TraceConfig
from headrace.options import ENV_PREFIX, Option, SettingsError, Value, setting
from headrace.trace_options import old_options, read_trace_config
from headrace.wire.header_rules import Category, HeaderRules

_CATEGORIES = ", ".join(f"`{category}`" for category in Category)
_MANY_CORES = 4  # from which on front ends can leave the models enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator can decide; sizes in bytes, times in seconds unless a name says more."""

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
    allow_in_process_python: bool = setting(
        False,
        "Run Python models in the server's own process where their configuration says so, by the"
        " parameter `execution`; one that hangs or crashes takes the server with it",
    )
    exit_on_error: bool = setting(
        True, "Exit if a model cannot be loaded, instead of serving the rest"
    )
    strict_readiness: bool = setting(True, "Be ready only if every model is")
    # Environments of models
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
    # HTTP
    allow_http: bool = setting(True, "Answer over HTTP")
    http_address: str = setting("127.0.0.1", "Address to listen on for HTTP")
    http_port: int = setting(8000, "Port for HTTP; 0 picks a free one")
    http_fast_path: bool = setting(
        True,
        "Answer infer requests in front of the ASGI application; the answers are the same",
    )
    http_keep_alive_secs: int = setting(75, "How long an idle HTTP connection is kept", least=1)
    http_body_timeout_secs: int = setting(
        60, "How long the next part of a request may be awaited, before 408", least=1
    )
    http_header_forward_pattern: str = setting(
        "",
        "Have models see request headers whose names this regular expression matches, as parameters"
        " of their requests",
    )
    http_restricted_api: list[str] = setting(  # noqa: RUF009
        [],
        "Answer these categories of requests only with this header, `CATEGORIES:HEADER=VALUE`;"
        f" categories, with commas between, are {_CATEGORIES}",
        between="\n",
    )
    # gRPC
    allow_grpc: bool = setting(True, "Answer over gRPC")
    grpc_address: str = setting("127.0.0.1", "Address to listen on for gRPC")
    grpc_port: int = setting(8001, "Port for gRPC; 0 picks a free one")
    grpc_transport: str = setting(
        "native",
        "What speaks gRPC: this server's own event loop, or the grpcio library, which is slower",
        choices=("native", "grpcio"),
    )
    grpc_use_ssl: bool = setting(False, "Encrypt gRPC with TLS")
    grpc_use_ssl_mutual: bool = setting(
        False, "With TLS, take only clients with a certificate signed by the root certificate"
    )
    grpc_server_cert: str = setting("", "PEM file with the server's certificate for gRPC")
    grpc_server_key: str = setting("", "PEM file with the key of that certificate")
    grpc_root_cert: str = setting(
        "", "PEM file with the root certificates that clients' certificates are held against"
    )
    grpc_header_forward_pattern: str = setting(
        "",
        "Have models see metadata of calls whose names this regular expression matches, as"
        " parameters of their requests",
    )
    grpc_restricted_protocol: list[str] = setting(  # noqa: RUF009
        [],
        "Answer these categories of calls only with the metadata `triton-grpc-protocol-KEY`,"
        " `CATEGORIES:KEY=VALUE`, with the categories of `--http-restricted-api`",
        between="\n",
    )
    # Metrics
    allow_metrics: bool = setting(True, "Answer Prometheus scrapes")
    metrics_address: str = setting("127.0.0.1", "Address to listen on for metrics")
    metrics_port: int = setting(8002, "Port for metrics; 0 picks a free one")
    metrics_interval_ms: int = setting(
        2000, "How often the machine's CPU and the memory of models are looked at", least=1
    )
    metrics_config: list[str] = setting(  # noqa: RUF009
        [],
        "Which metrics of latencies there are: `counter_latencies` (true), `histogram_latencies`"
        " (false) or `summary_latencies` (false) `=true` or `=false`, `summary_quantiles=0.5,0.99`",
        between=";",
    )
    allow_cpu_metrics: bool = setting(True, "Have the machine's CPU and memory among the metrics")
    # Shared memory
    allow_client_shm: bool = setting(
        False,
        "Let clients register shared memory of this machine, and have tensors in it;"
        " whoever reaches the server can then read and write what its user can of `/dev/shm`",
    )
    client_shm_prefix: str = setting(
        "", "Of `/dev/shm`, let clients register only keys that begin so"
    )
    # Limits
    max_request_bytes: int = setting(
        64 << 20,
        "Largest request, over HTTP also once it is decompressed, with the inputs that it has in"
        " shared memory, and largest gRPC message",
        "http-max-input-size",
        least=1,
    )
    max_admitted_requests: int = setting(
        10_000,
        "Requests under way in the whole server;"
        " more are refused with 503 / UNAVAILABLE; 0: no limit",
    )
    max_admitted_bytes: int = setting(
        1 << 30,
        "Bytes of all requests under way; more are refused with 503 / UNAVAILABLE; 0: no limit",
    )
    # Processes
    frontends: str = setting(
        "0",
        "Processes that accept, decode and encode for the one that runs the models;"
        " 0: that one does it all; `auto`: by the number of cores",
        form=("auto|[0-9]|[1-5][0-9]|6[0-4]", "auto or a number from 0 to 64"),
    )
    # Life cycle
    id: str = setting("headrace", "The server's name in its metadata")
    shutdown_delay_secs: int = setting(
        0, "After SIGTERM, how long the server is not ready but still takes requests"
    )
    exit_timeout_secs: int = setting(30, "How long shutdown waits for requests under way")
    # Logs
    log_verbose: int = setting(0, "1 or more for debugging output")
    log_info: bool = setting(True, "Write information")
    log_warning: bool = setting(True, "Write warnings")
    log_error: bool = setting(True, "Write errors")
    log_format: str = setting("default", "Form of a log line", choices=FORMATS)
    log_file: str = setting("", "File to write the log to instead of standard error")
    access_log: bool = setting(False, "Write a line for every request")

    # Traces
    trace_config: list[str] = setting(  # noqa: RUF009
        [],
        "What of requests is traced, and where to: `level=`, `rate=`, `count=`, `mode=triton` with"
        " `triton,file=` and `triton,log-frequency=`, or `mode=opentelemetry` with"
        " `opentelemetry,url=`, `opentelemetry,resource=NAME=VALUE` and `opentelemetry,bsp_...=`;"
        " once for each",
        between="\n",
    )
    trace_file: str = setting("", "The same as `--trace-config triton,file=`")
    trace_level: list[str] = setting(  # noqa: RUF009
        [], "The same as `--trace-config level=`, also several times", between=","
    )
    trace_rate: int = setting(1000, "The same as `--trace-config rate=`")
    trace_count: int = setting(-1, "The same as `--trace-config count=`", least=-1)
    trace_log_frequency: int = setting(0, "The same as `--trace-config triton,log-frequency=`")

    def frontend_count(self, cores: int) -> int:
        """How many front ends to start on so many cores.

        One would have as much to do as the engine's process has without any, so `auto` starts none
        or two and more: a quarter of the cores, the rest being for models.
        """
        if self.frontends != "auto":
            return int(self.frontends)
        return 0 if cores < _MANY_CORES else min(max(cores // 4, 2), 8)

    @property
    def http_rules(self) -> HeaderRules:
        """What headers of HTTP requests decide."""
        return HeaderRules(self.http_header_forward_pattern, self.http_restricted_api)

    @property
    def grpc_rules(self) -> HeaderRules:
        """What metadata of calls decide."""
        return HeaderRules(self.grpc_header_forward_pattern, self.grpc_restricted_protocol)

    @property
    def metrics(self) -> MetricsOptions:
        """Which metrics of latencies there are; raises `ValueError`."""
        return MetricsOptions.of(self.metrics_config)

    @property
    def traces(self) -> TraceConfig:
        """What is traced, and where to; raises `SettingsError`."""
        old = old_options(
            self.trace_file, self.trace_level, self.trace_rate, self.trace_count,
            self.trace_log_frequency,
        )  # fmt: skip
        try:
            return read_trace_config([*old, *self.trace_config], os.environ)
        except ValueError as error:
            raise SettingsError(f"--trace-config: {error}") from None

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
        try:
            _ = self.metrics
        except ValueError as error:
            raise SettingsError(f"--metrics-config: {error}") from None
        _ = self.traces
        for rules, forward, restricted in (
            (self.http_rules, "--http-header-forward-pattern", "--http-restricted-api"),
            (self.grpc_rules, "--grpc-header-forward-pattern", "--grpc-restricted-protocol"),
        ):
            try:
                rules.pattern()
            except ValueError as error:
                raise SettingsError(f"{forward} {rules.forward!r}: {error}") from None
            try:
                rules.keys()
            except ValueError as error:  # without the values, which are secrets
                raise SettingsError(f"{restricted}: {error}") from None

    @property
    def environments(self) -> EnvironmentOptions:
        """The settings of models' environments."""
        return EnvironmentOptions(
            self.environment_cache, self.wheelhouse, self.environment_build_timeout_secs
        )

    @property
    def logs(self) -> LogSettings:
        """The settings of logging."""
        return LogSettings(
            self.log_verbose,
            self.log_info,
            self.log_warning,
            self.log_error,
            self.log_format,
            self.log_file,
        )


OPTIONS: tuple[Option, ...] = tuple(Option.of(declared) for declared in fields(Settings))
# Kubernetes puts such variables into every pod for a Service that is called "headrace" or alike.
_LINK_NAME = re.compile(r"HEADRACE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")
_LINK_VALUES = ("tcp://", "udp://", "sctp://")
CONFIG_FILE_ENV = ENV_PREFIX + "CONFIG_FILE"
URL_ENV = ENV_PREFIX + "URL"  # no setting: where commands find the server


def from_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """Settings in the environment, by field; raises `SettingsError` for unknown HEADRACE_ names."""
    by_env = {option.env: option for option in OPTIONS}
    found: dict[str, Value] = {}
    for name, value in environment.items():
        if not name.startswith(ENV_PREFIX) or name in (CONFIG_FILE_ENV, URL_ENV):
            continue
        if value.startswith(_LINK_VALUES) or _LINK_NAME.fullmatch(name):
            continue
        option = by_env.get(name)
        if option is None:
            raise SettingsError(unknown("environment variable", name, [*by_env, CONFIG_FILE_ENV]))
        found[option.field] = option.parse(value, name)
    return found


def from_file(path: Path) -> dict[str, Value]:
    """Settings in a TOML file, by field; raises `SettingsError` naming the file."""
    by_name = {name: option for option in OPTIONS for name in (option.name, *option.aliases)}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"settings file {path}: {error}") from error
    found: dict[str, Value] = {}
    for name, value in document.items():
        option = by_name.get(name.replace("_", "-"))
        if option is None:
            raise SettingsError(f"settings file {path}: {unknown('setting', name, by_name)}")
        found[option.field] = option.parse(value, f"settings file {path}: {name}")
    return found


def unknown(what: str, name: str, known: list[str] | Mapping[str, object]) -> str:
    """The message for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, known, 1)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
