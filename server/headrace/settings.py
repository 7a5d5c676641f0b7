"""Every setting of the server, once: its name, type, default and meaning.

Command line, environment, settings file and `docs/configuration.md` all come from the fields below.
A setting is `http_port` here, `--http-port` on the command line, `HEADRACE_HTTP_PORT` in the
environment and `http-port` in a settings file (TOML); the first of these that is given wins, in
this order. Names are Triton's wherever Triton has the option.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from headrace.core.shares import Shares
from headrace.door_settings import DoorSettings
from headrace.model_settings import ModelSettings
from headrace.observability.logs import FORMATS, LogSettings
from headrace.observability.trace_settings import TraceConfig
from headrace.options import ENV_PREFIX, Option, SettingsError, Value, setting
from headrace.trace_options import old_options, read_trace_config
from headrace.transports.grpc.options import GrpcOptions
from headrace.wire.header_rules import HeaderRules
from headrace.wire.http2.keep_alive import KeepAlive

_ALIKE = 0.7  # from which on a name is taken for another one that was spelt wrongly
_MANY_CORES = 4  # from which on front ends can leave the models enough


@dataclass(frozen=True, kw_only=True)
class Settings(DoorSettings, ModelSettings):
    """What an operator can decide; sizes in bytes, times in seconds unless a name says more.

    The parts stand in files of their own; all names are of one space.
    """

    # Limits
    max_request_bytes: int = setting(
        64 << 20,
        "Largest request, over HTTP also once it is decompressed, with the inputs that it has in"
        " shared memory, and largest gRPC message; unless given, at most a 32nd of the memory"
        " that the cgroup allows",
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
    # Processes
    frontends: str = setting(
        "0",
        "Processes that accept, decode and encode for the one that runs the models;"
        " 0: that one does it all; `auto`: by the number of cores",
        form=("auto|[0-9]|[1-5][0-9]|6[0-4]", "auto or a number from 0 to 64"),
    )
    allow_debugging: bool = setting(
        False,
        "Let other processes of the same user, so also Python models, read this server's memory and"
        " environment, for debuggers and profilers, and let the kernel dump its core",
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

    def shares(self, files: int) -> Shares:
        """What one client may take, in a process that may open so many files."""
        most = files * 3 // 4
        connections = min(self.max_connections, most) if self.max_connections else most
        return Shares(
            self.max_connection_share, self.max_address_share, connections, self.max_model_share
        )

    def frontend_count(self, cores: int) -> int:
        """How many front ends to start on so many cores.

        One would have as much to do as the engine's process has without any, so `auto` starts none
        or two and more: a quarter of the cores, the rest being for models.
        """
        if self.frontends != "auto":
            return int(self.frontends)
        return 0 if cores < _MANY_CORES else min(max(cores // 4, 2), 8)

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
        try:
            _ = self.environments
        except ValueError as error:
            raise SettingsError(f"--worker-env: expected {error}") from None
        try:
            self.http_rules.allowed_origins()
        except ValueError as error:
            raise SettingsError(f"--http-allowed-origin: {error}") from None
        try:
            HeaderRules(restricted_at_both=self.restricted_api).keys()
        except ValueError as error:  # without the values, which are secrets
            raise SettingsError(f"--restricted-api: {error}") from None
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
            except ValueError as error:
                raise SettingsError(f"{restricted}: {error}") from None

    @property
    def grpc_options(self) -> GrpcOptions:
        """What can be set of gRPC's transports."""
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
            keep_alive,
            self.grpc_infer_response_compression_level,
            self.progress_timeout_secs,
            self.grpc_max_connection_idle_secs,
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


def limits_by_memory(memory: int) -> dict[str, Value]:
    """The limits that follow from `memory` bytes that the server may use, none if it has plenty.

    What is under way is decoded and answered, too, beside the models; and JSON takes up to fifteen
    times its text.
    """
    shares = {"max_request_bytes": memory // 32, "max_admitted_bytes": memory // 8}
    defaults = {name: getattr(Settings, name) for name in shares}
    return {name: max(share, 1) for name, share in shares.items() if share < defaults[name]}


OPTIONS: tuple[Option, ...] = tuple(Option.of(declared) for declared in fields(Settings))
_SECTIONS = {  # by the option that each begins with
    "model-repository": "Models", "environment-cache": "Environments of models",
    "triton-server": "Tritons that this server starts",
    "restricted-api": "HTTP and gRPC", "allow-http": "HTTP", "allow-grpc": "gRPC",
    "allow-metrics": "Metrics", "allow-client-shm": "Shared memory",
    "max-request-bytes": "Limits", "frontends": "Processes",
    "id": "Life cycle", "log-verbose": "Logs", "trace-config": "Traces",
}  # fmt: skip


def _sections() -> dict[str, list[Option]]:
    found: dict[str, list[Option]] = {}
    for option in OPTIONS:
        if option.name in _SECTIONS:
            section = found[_SECTIONS[option.name]] = []
        section.append(option)
    return found


SECTIONS = _sections()  # for people: the options by the title of what they are about
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
    import tomllib  # which few starts need

    by_name = {name: option for option in OPTIONS for name in (option.name, *option.aliases)}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
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
    near = difflib.get_close_matches(name, known, 1, _ALIKE)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
