"""Every setting of the server, once: name, type, default and meaning.

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
from typing import TYPE_CHECKING, Any

from headrace.api.header_rules import GRPC_PREFIX, HeaderRules
from headrace.api.operations import Category
from headrace.core.cache_options import CacheOptions
from headrace.core.limits import ExecutionLimits, ResidencyOptions, Shares
from headrace.doors.grpc.options import LEVELS, GrpcOptions
from headrace.doors.listeners import CLOSED
from headrace.doors.tls import TLS_DOORS, VERSIONS, TlsFiles
from headrace.observability.audit import AuditOptions
from headrace.observability.capture import KEYS, CaptureOptions
from headrace.observability.logs import FORMATS, LogSettings
from headrace.observability.trace_settings import TraceConfig, old_options, read_trace_config
from headrace.options import ENV_PREFIX, Option, SettingsError, Value, setting
from headrace.placement.upstream.triton_options import TritonOptions
from headrace.protocol.http2.keep_alive import KeepAlive
from headrace.protocol.proxies import TrustedProxies

if TYPE_CHECKING:
    from headrace.core.model_spec import EnvironmentOptions, IsolationOptions
    from headrace.observability.statistics import MetricsOptions
    from headrace.repository.store import StoreOptions

_CATEGORIES = ", ".join(f"`{category}`" for category in Category)
_ALIKE = 0.7  # similarity above which a name is suggested
_MANY_CORES = 4  # cores from which on front ends leave enough for models

# Settings of TLS, which each of `TLS_DOORS` has.
_MUTUAL = "Require client certificates signed by a root certificate"
_CERTIFICATES = (
    "PEM files of server certificates with their chains; clients that name a host get the first"
    " for it, others the first of all"
)
_KEYS = "PEM files of the certificates' keys, in the same order"
_ROOTS = "PEM file of the root certificates for client certificates, which clients may send then"
_REVOKED = "PEM file of the roots' lists of revoked client certificates"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The operator's settings; sizes in bytes, times in seconds unless a name says otherwise."""

    # Options that most servers set, shown first in the help.
    model_repository: list[str] = setting(
        [],
        "Model repositories to serve: directories, or stores such as `s3://BUCKET/PREFIX`; required"
        " unless model files are given",
        "model-store",
        metavar="DIR",
        section="Common options",
    )
    model_control_mode: str = setting(
        "none",
        "`none` loads all models at startup; `poll` also follows changes in the repositories;"
        " `explicit` lets clients load and unload models",
        choices=("none", "poll", "explicit"),
    )
    http_address: str = setting(
        "127.0.0.1", "Address to listen on for HTTP; `none`: only on `--http-unix-socket`"
    )
    http_port: int = setting(8000, "Port for HTTP; 0 picks a free one", most=65_535)
    grpc_address: str = setting(
        "127.0.0.1", "Address to listen on for gRPC; `none`: only on `--grpc-unix-socket`"
    )
    grpc_port: int = setting(8001, "Port for gRPC; 0 picks a free one", most=65_535)
    metrics_port: int = setting(8002, "Port for metrics; 0 picks a free one", most=65_535)
    trusted_proxies: list[str] = setting(
        [],
        "Networks of proxies whose `Forwarded` and `X-Forwarded-For` say which client sends a"
        " request, for quotas and the access log; `unix`: all clients of Unix sockets",
        between=",",
        metavar="CIDR",
    )
    proxy_protocol: bool = setting(
        False,
        "Expect a header of the PROXY protocol, version 2, at the beginning of connections of these"
        " proxies, over HTTP and gRPC",
    )
    frontends: str = setting(
        "0",
        "Front-end processes that accept connections, decode and encode; 0 does all this in the"
        " process that runs the models; `auto` goes by the number of cores",
        form=("auto|[0-9]|[1-5][0-9]|6[0-4]", "auto or a number from 0 to 64"),
    )
    strict_readiness: bool = setting(
        False,
        "Report the server as ready only while all its models are loaded; otherwise it is ready"
        " once loading was tried for each of them. A loaded model reports its own readiness",
    )
    log_verbose: int = setting(0, "Verbosity of debug messages; 0 writes none")

    model_file: list[str] = setting(
        [],
        "Model files to serve without a repository (`.onnx`, `.py`, or saved by a supported"
        " library); on the command line `--model-file` may be omitted",
        metavar="FILE",
        section="Models",
    )
    model_name: str = setting(
        "",
        "Name of the model if a single model file is served, or a directory that is a model itself;"
        " by default the file's or the directory's name",
        metavar="NAME",
    )
    load_model: list[str] = setting(
        [],
        "Models to load at startup with `--model-control-mode explicit`, which loads no others;"
        " `*` loads all",
        between=",",
        metavar="MODEL",
    )
    load_overrides: str = setting(
        "config",
        "Contents that load requests may carry: `none`; `config`, a configuration; `files`, also"
        " files of models that are pure data (ONNX); `code`, any file, which lets clients that may"
        " load models run code on this machine",
        choices=("none", "config", "files", "code"),
    )
    max_override_bytes: int = setting(
        1 << 30, "Total bytes of the files from load requests that loaded models use"
    )
    model_namespacing: bool = setting(
        False,
        "Serve models of the same name from several repositories, each as `NAME@REPOSITORY`;"
        " without this option such a name is unavailable",
    )
    reload: bool = setting(
        True, "Reload model files that are served without a repository when they change"
    )
    repository_poll_secs: int = setting(
        15,
        "Seconds between scans of the repositories with `--model-control-mode poll`, where the file"
        " system does not report changes",
        least=1,
    )
    model_config_name: str = setting(
        "",
        "Read a model's `configs/<name>.pbtxt` instead of its `config.pbtxt`, where the former"
        " exists",
    )
    disable_auto_complete_config: bool = setting(
        False, "Use configurations as written; complete nothing from the model's file"
    )
    default_max_batch_size: int = setting(
        64,
        "`max_batch_size` of models that can batch and whose configuration does not set it",
        least=1,
    )
    trust_model_code: bool = setting(
        False,
        "Load files that can run code when loaded, such as `model.joblib`, for all models;"
        " otherwise only for models whose configuration declares them trusted",
    )
    model_load_thread_count: int = setting(4, "Models that are loaded concurrently", least=1)
    model_load_retry_count: int = setting(0, "Retries when loading a version fails")
    model_load_timeout_secs: int = setting(
        0,
        "Timeout for loading one version, including building its environment; a worker process that"
        " exceeds it is killed, loading in the server's process is abandoned; 0: no limit",
    )
    exit_on_error: bool = setting(
        True, "Exit if a model cannot be loaded, instead of serving the others"
    )
    allow_traffic_control: bool = setting(
        False,
        "Let clients change how requests are divided between the versions of a model; always"
        " allowed with `--model-control-mode explicit`",
    )

    store_cache: str = setting(
        "",
        "Directory for models of stores, which servers of one machine may share;"
        " by default `headrace/stores` in `$XDG_CACHE_HOME` or `~/.cache`",
        metavar="DIR",
        section="Stores",
    )
    store_cache_bytes: int = setting(
        0,
        "Bytes of models to keep in the cache; if a download exceeds this, the least recently used"
        " ones that no server has loaded are removed; 0: no limit",
    )
    store_offline: bool = setting(
        False, "Serve what is in the cache of stores, and connect to none of them"
    )
    store_archive_files: int = setting(100_000, "Files that an archive may have", least=1)
    store_archive_bytes: int = setting(1 << 30, "Bytes that any archive may unpack to", least=1)
    store_archive_ratio: int = setting(
        200, "Times its own bytes that an archive may unpack to, if that is more", least=1
    )
    require_signature: str = setting(
        "",
        "Serve only models whose manifest is signed by one of the public keys in this PEM file, and"
        " lists all their files",
        metavar="KEYFILE",
    )

    load_on_request: bool = setting(
        False,
        "Load a model on its first request instead of at startup",
        section="Loading on request",
    )
    model_memory_budget: int = setting(
        0,
        "Bytes of memory for all loaded models; beyond it, the least recently used models are"
        " unloaded, and loaded again on request; 0: no limit",
    )
    load_wait_secs: int = setting(
        30, "Seconds that a request waits for its model to be loaded on request", least=1
    )
    minimum_residency_secs: int = setting(
        60, "Seconds that a model loaded on request stays loaded, even if others need its memory"
    )
    unload_after_idle_secs: int = setting(
        0,
        "Unload models that had no request for this many seconds; they are loaded again on request;"
        " 0: never",
    )
    pin_model: list[str] = setting(
        [],
        "With loading on request, models to load at startup and never unload",
        between=",",
        metavar="MODEL",
    )

    allow_in_process_python: bool = setting(
        False,
        "Run Python models in the server's own process if their configuration asks for this with"
        " the parameter `execution`; a model that hangs or crashes then takes the server down",
        section="Execution",
    )
    execution_limit_secs: int = setting(
        600,
        "Timeout of a batch, for streams from one response to the next; beyond it, the worker is"
        " killed and restarted, and an ONNX run on a thread is terminated; a model's parameter of"
        " the same name overrides this; 0: no limit",
    )
    stall_secs: int = setting(
        60,
        "Seconds without progress in a batch until its instance counts as stalled; a model is not"
        " ready while all its instances are stalled; a stalled worker that no request waits for is"
        " killed and restarted; a model's parameter of the same name overrides this; 0: never",
    )
    pinned_memory_pool_byte_size: int = setting(
        256 << 20, "Bytes of page-locked memory for copies to and from GPUs; 0: none"
    )

    worker_env: list[str] = setting(
        [],
        "Environment variables to pass to Python models besides the standard ones, by name or by"
        " pattern such as `SHOP_*`; the server's own, `HEADRACE_*`, are never passed",
        between=",",
        section="Python environments",
    )
    environment_cache: str = setting(
        "",
        "Directory for the environments of Python models;"
        " by default `headrace/environments` in `$XDG_CACHE_HOME` or `~/.cache`",
        metavar="DIR",
    )
    environment_cache_bytes: int = setting(
        20 << 30,
        "Bytes of environments to keep in the cache; if a build exceeds this, the least recently"
        " used environments that are not in use are removed; 0: no limit",
    )
    wheelhouse: str = setting(
        "",
        "Directory of wheels to build environments from, instead of a package index",
        metavar="DIR",
    )
    environment_build_timeout_secs: int = setting(
        1800, "Timeout for building one environment", least=1
    )

    worker_user: list[str] = setting(
        [],
        "User to run Python models as, by name or `UID:GID`: the first one given, or the one of"
        " these that a model's parameter `worker_user` names; without this option a model may name"
        " any user but root; needs a server that runs as root",
        between=",",
        metavar="USER",
        section="Isolation of models",
    )
    worker_sandbox: str = setting(
        "off",
        "Let Python models read only their own files, their environment and the system's programs"
        " and libraries, and write only to a directory of their own: `preferred`, where the kernel"
        " has Landlock; `required`, or not start",
        choices=("off", "preferred", "required"),
    )
    sandbox_read: list[str] = setting(
        [],
        "Further files or directories that models in a sandbox may read",
        metavar="PATH",
    )
    sandbox_write: list[str] = setting(
        [],
        "Further files or directories that models in a sandbox may read and write, such as"
        " `/dev/shm`",
        metavar="PATH",
    )
    worker_processes: int = setting(
        4096,
        "Processes and threads that the user of confined models may have in total; not enforced"
        " for root; 0: no limit",
    )
    scratch_bytes: int = setting(
        1 << 30,
        "Bytes that a confined model may have in its directory for temporary files; beyond it, its"
        " worker is killed and restarted",
        least=1 << 20,
    )

    access: str = setting(
        "",
        "TOML file of roles and of who has them: API keys, tokens, certificates and users of Unix"
        " sockets; followed when it changes; without it, every client may do everything",
        metavar="FILE",
        section="HTTP and gRPC",
    )

    control_address: str = setting(
        "",
        "Address for operations that change models or settings, over HTTP, `HOST:PORT` or"
        " `unix:PATH`, with TLS if HTTP has it; the other doors are without them then",
        form=(r"(unix:.+|(\[[0-9a-fA-F:.]+\]|[^:]+):[0-9]{1,5})?", "HOST:PORT or unix:PATH"),
        metavar="ADDRESS",
    )

    restricted_api: list[str] = setting(
        [],
        "Require a header (HTTP) or metadata (gRPC) for these categories of operations,"
        " `CATEGORIES:HEADER=VALUE`; categories, separated by commas, are"
        f" {_CATEGORIES}",
        between="\n",
    )

    door: list[str] = setting(
        [],
        "Further doors, of installed packages, each with the address to open it at",
        between=",",
        metavar="NAME=ADDRESS",
    )
    inboxes: str = setting(
        "",
        "TOML file of inboxes: take messages from brokers, and send the answers back; the same as"
        " `--door inboxes=FILE`",
        metavar="FILE",
    )

    unix_socket_mode: str = setting(
        "660",
        "Permissions of the Unix sockets, in octal; whoever may write to one can connect",
        form=("0?[0-7]{3}", "an octal mode such as 660"),
        metavar="MODE",
    )

    unix_socket_memory: bool = setting(
        True,
        "Let clients of the Unix sockets hand over large tensors in memory of their own, through a"
        " further socket at PATH`.memory`; together at most `--max-admitted-bytes`",
    )

    allow_http: bool = setting(True, "Serve HTTP", section="HTTP")
    http_unix_socket: str = setting(
        "",
        "Path of a Unix socket to listen on for HTTP as well; a socket that a killed server left is"
        " replaced, one in use or any other file is refused",
        metavar="FILE",
    )
    reuse_http_port: bool = setting(
        False, "Let several servers share the HTTP port; all of them must set this"
    )
    http_fast_path: bool = setting(
        True, "Answer infer requests without the ASGI application; responses are the same"
    )
    http_keep_alive_secs: int = setting(
        75, "Seconds until an idle HTTP connection is closed", least=1
    )
    http_max_connection_age_secs: int = setting(
        0,
        "Close HTTP connections of this age, give or take a tenth, after their next response;"
        " 0: no limit",
    )
    http_body_timeout_secs: int = setting(
        60, "Seconds to wait for the next part of a request's body, before 408", least=1
    )
    http_header_forward_pattern: str = setting(
        "",
        "Forward request headers whose name matches this regular expression to models, as request"
        " parameters",
    )
    http_restricted_api: list[str] = setting(
        [], "Like `--restricted-api`, for HTTP alone, in Triton's form", between="\n"
    )
    http_allowed_origin: list[str] = setting(
        [],
        "Allow web pages of this origin, `SCHEME://HOST[:PORT]`, to change models and settings from"
        " a browser, besides loopback names and the address listened on; `*`: any origin",
        between=",",
    )

    http_use_ssl: bool = setting(False, "Encrypt HTTP with TLS", section="HTTP with TLS")
    http_use_ssl_mutual: bool = setting(False, _MUTUAL)
    http_server_cert: list[str] = setting([], _CERTIFICATES, between=",", metavar="FILE")
    http_server_key: list[str] = setting([], _KEYS, between=",", metavar="FILE")
    http_root_cert: str = setting("", _ROOTS, metavar="FILE")
    http_crl: str = setting("", _REVOKED, metavar="FILE")

    allow_grpc: bool = setting(True, "Serve gRPC", section="gRPC")
    grpc_unix_socket: str = setting(
        "",
        "Path of a Unix socket to listen on for gRPC as well, without TLS; always of the native"
        " transport",
        metavar="FILE",
    )
    reuse_grpc_port: bool = setting(
        False, "Let several servers share the gRPC port; all of them must set this"
    )
    grpc_transport: str = setting(
        "native",
        "gRPC implementation: on the server's own event loop, or the grpcio library, which is"
        " slower and needs the extra `grpcio`",
        choices=("native", "grpcio"),
    )
    grpc_header_forward_pattern: str = setting(
        "",
        "Forward call metadata whose name matches this regular expression to models, as request"
        " parameters",
    )
    grpc_restricted_protocol: list[str] = setting(
        [],
        "Like `--restricted-api`, for gRPC alone, in Triton's form: `CATEGORIES:KEY=VALUE` requires"
        " the metadata `triton-grpc-protocol-KEY`",
        between="\n",
    )
    grpc_infer_response_compression_level: str = setting(
        "none",
        "Compression level of inference responses, for clients that accept compression",
        choices=tuple(LEVELS),
    )

    grpc_use_ssl: bool = setting(False, "Encrypt gRPC with TLS", section="gRPC with TLS")
    grpc_use_ssl_mutual: bool = setting(False, _MUTUAL)
    grpc_server_cert: list[str] = setting([], _CERTIFICATES, between=",", metavar="FILE")
    grpc_server_key: list[str] = setting([], _KEYS, between=",", metavar="FILE")
    grpc_root_cert: str = setting("", _ROOTS, metavar="FILE")
    grpc_crl: str = setting("", _REVOKED, metavar="FILE")

    grpc_keepalive_time: int = setting(
        7_200_000,
        "Milliseconds of silence after which a client is sent a PING",
        least=1,
        section="gRPC keep-alive",
    )
    grpc_keepalive_timeout: int = setting(
        20_000, "Milliseconds until an unanswered PING closes the connection", least=1
    )
    grpc_keepalive_permit_without_calls: bool = setting(
        False, "Permit keep-alive PINGs, from both sides, while there is no call"
    )
    grpc_http2_max_pings_without_data: int = setting(
        2, "Consecutive PINGs without data, after which one per minute is sent; 0: no limit"
    )
    grpc_http2_min_recv_ping_interval_without_data: int = setting(
        300_000,
        "Least milliseconds between two PINGs of a client without data; a sooner one is a strike",
    )
    grpc_http2_max_ping_strikes: int = setting(
        2, "PING strikes before the connection is closed; 0: no limit"
    )
    grpc_max_connection_age: int = setting(
        0,
        "Milliseconds, give or take a tenth, after which a connection accepts no more calls;"
        " 0: no limit",
    )
    grpc_max_connection_age_grace: int = setting(
        0, "Milliseconds for the calls under way then; 0: no limit"
    )
    grpc_max_connection_idle_secs: int = setting(
        3600, "Seconds until a gRPC connection without calls is closed; 0: no limit"
    )
    grpc_max_stream_idle_secs: int = setting(
        3600,
        "Seconds until a gRPC stream without a request is ended; five, or a minute after its last"
        " request, while the server is near a limit; 0: no limit; of the native transport only",
    )

    max_request_bytes: int = setting(
        64 << 20,
        "Largest request, decompressed and with its inputs in shared memory, and largest gRPC"
        " message; by default at most 1/32 of the cgroup's memory limit",
        "http-max-input-size",
        least=1,
        section="Limits",
    )
    max_response_bytes: int = setting(
        256 << 20,
        "Largest response, as the model gives it and as it is sent; larger ones fail with 500 /"
        " RESOURCE_EXHAUSTED; 0: no limit but --max-connection-share; by default at most 1/32 of"
        " the cgroup's memory limit",
    )
    max_object_bytes: int = setting(
        512 << 20,
        "Memory that the elements of the BYTES inputs of a request of more than 64 KiB may take as"
        " objects: 80 bytes each, 24 if empty; also that of an Arrow table's columns that are"
        " converted; it counts as admitted bytes; 0: no limit of its own",
    )
    max_admitted_requests: int = setting(
        10_000,
        "Requests under way in the whole server; more are refused with 503 / UNAVAILABLE;"
        " 0: no limit",
    )
    max_admitted_bytes: int = setting(
        1 << 30,
        "Bytes of all requests under way; more are refused with 503 / UNAVAILABLE; 0: no limit;"
        " by default at most 1/8 of the cgroup's memory limit",
    )
    max_connection_share: int = setting(
        50,
        "Percentage of these two limits for one connection; 64 requests and 64 MiB are always"
        " allowed",
        least=1,
        most=100,
    )
    max_address_share: int = setting(
        100,
        "Percentage of these two limits for all connections from one address; keep 100, no limit,"
        " behind a load balancer",
        least=1,
        most=100,
    )
    max_model_share: int = setting(
        80,
        "Percentage of these two limits for the requests of one model, if the server has others;"
        " several busy models together leave room as well; 64 requests and 8 MiB are always"
        " allowed; 100: no limit",
        least=1,
        most=100,
    )
    overload_delay_ms: int = setting(
        1_000,
        "Milliseconds in the queue of an overloaded model, or 8 runs if that is longer, after which"
        " a request is refused with 503 / UNAVAILABLE; a model is overloaded when its requests have"
        " waited for so long for a while and its queue grows; a model's parameter of the same name"
        " overrides this; its queue policy or priorities replace it; 0: never",
    )
    fair_share: bool = setting(
        False,
        "Share the queue of each model between clients by their quotas' weights, in rows, instead"
        " of by arrival; a model's parameter of the same name overrides this",
    )
    cache_config: list[str] = setting(
        [],
        "Keep answers of models with `response_cache { enable: true }`: `local,size=` bytes of this"
        " process, and on a Redis server, `redis,host=`, with `port=`, `user=`, `password=`, `db=`,"
        " `tls=`, `ttl_secs=` and `timeout_ms=`; may be repeated",
        between="\n",
        metavar="PLACE,NAME=VALUE",
    )
    response_cache_byte_size: int = setting(0, "Same as `--cache-config local,size=`")
    rate_limit: str = setting(
        "off",
        "`execution_count` runs instances with a `rate_limiter` only while the resources that they"
        " need are free; `off` ignores it",
        choices=("off", "execution_count"),
    )
    rate_limit_resource: list[str] = setting(
        [],
        "Units of a resource of `rate_limiter`, of each device or of one; otherwise as many as the"
        " instance that needs most",
        between=",",
        metavar="NAME:COUNT[:DEVICE]",
    )
    max_connections: int = setting(
        10_000,
        "Client connections in each process that accepts them, at most 3/4 of its limit of open"
        " files; more are closed at once; 0: no limit",
    )
    max_streams: int = setting(
        20_000,
        "Open gRPC calls in each process that accepts connections, beyond the first 8 of each"
        " connection and counted by 32; more are refused; 0: no limit; of the native transport"
        " only",
    )
    max_connection_streams: int = setting(
        1024, "Open gRPC calls of one connection; more are refused", least=1
    )
    progress_timeout_secs: int = setting(
        60,
        "Seconds without progress in sending a gRPC message or reading a response, after which the"
        " call or connection is aborted; progress means 1 KiB/s",
        least=1,
    )

    allow_client_shm: bool = setting(
        False,
        "Let clients register shared memory of this machine for tensors; every client can then"
        " read and write what the server's user can in `/dev/shm`",
        section="Shared memory",
    )
    client_shm_prefix: str = setting(
        "", "Let clients register only keys in `/dev/shm` with this prefix"
    )

    id: str = setting("headrace", "Server name in its metadata", section="Process and shutdown")
    allow_debugging: bool = setting(
        False,
        "Let processes of the same user, including Python models, read this server's memory and"
        " environment, for debuggers and profilers, and let the kernel write core dumps",
    )
    shutdown_delay_secs: int = setting(
        0, "Seconds after SIGTERM during which the server is not ready but still accepts requests"
    )
    exit_timeout_secs: int = setting(30, "Seconds that shutdown waits for requests under way")

    allow_metrics: bool = setting(True, "Serve Prometheus metrics", section="Metrics")
    metrics_address: str = setting("127.0.0.1", "Address to listen on for metrics")
    metrics_interval_ms: int = setting(
        2000, "Milliseconds between samples of CPU usage and of the models' memory", least=1
    )
    metrics_config: list[str] = setting(
        [],
        "Latency metrics: `counter_latencies=BOOL` (default true), `histogram_latencies=BOOL` and"
        " `summary_latencies=BOOL` (default false), `summary_quantiles=0.5,0.99`;"
        " `histogram_buckets=0.001,0.01` (seconds) and `native_histograms=BOOL` (default false)"
        " for all histograms of durations",
        between=";",
    )
    allow_cpu_metrics: bool = setting(True, "Include the machine's CPU and memory in the metrics")
    allow_gpu_metrics: bool = setting(True, "Include the machine's GPUs in the metrics")

    metrics_use_ssl: bool = setting(False, "Encrypt metrics with TLS", section="Metrics with TLS")
    metrics_use_ssl_mutual: bool = setting(False, _MUTUAL)
    metrics_server_cert: list[str] = setting([], _CERTIFICATES, between=",", metavar="FILE")
    metrics_server_key: list[str] = setting([], _KEYS, between=",", metavar="FILE")
    metrics_root_cert: str = setting("", _ROOTS, metavar="FILE")
    metrics_crl: str = setting("", _REVOKED, metavar="FILE")

    flight_use_ssl: bool = setting(
        False, "Encrypt Arrow Flight with TLS", section="Arrow Flight with TLS"
    )
    flight_use_ssl_mutual: bool = setting(False, _MUTUAL)
    flight_server_cert: list[str] = setting([], _CERTIFICATES, between=",", metavar="FILE")
    flight_server_key: list[str] = setting([], _KEYS, between=",", metavar="FILE")
    flight_root_cert: str = setting("", _ROOTS, metavar="FILE")
    flight_crl: str = setting("", _REVOKED, metavar="FILE")

    tls_min_version: str = setting(
        VERSIONS[0], "Oldest version of TLS that doors accept", choices=VERSIONS, section="TLS"
    )
    tls_ciphers: str = setting(
        "",
        "Ciphers of TLS 1.2 as OpenSSL's list, which may name no others; by default those with"
        " forward secrecy and authenticated encryption, see [tls.md](tls.md)",
        metavar="LIST",
    )

    log_info: bool = setting(True, "Write informational messages", section="Logs")
    log_warning: bool = setting(True, "Write warnings")
    log_error: bool = setting(True, "Write errors")
    log_format: str = setting("default", "Format of log lines", choices=FORMATS)
    log_file: str = setting(
        "", "File to write the log to, instead of standard error", metavar="FILE"
    )
    log_tail_lines: int = setting(
        500,
        "Records of the log that are kept in memory for those who may see them, as in the console;"
        " none without an access file, if HTTP listens on other addresses than this machine's own",
        most=10_000,
    )
    access_log: bool = setting(False, "Log every request")

    audit_log: str = setting(
        "",
        "File to record changes of models and settings in, and who asked for them; `-`: standard"
        " output",
        metavar="FILE",
        section="Audit",
    )
    audit_infer: int = setting(
        0, "Record one in so many inference requests as well; 1: every one, 0: none"
    )
    audit_max_bytes: int = setting(
        100 << 20,
        "Size from which on the audit log is renamed to FILE`.1`, and begun anew; 0: no limit",
    )
    audit_files: int = setting(10, "Renamed audit logs to keep")

    capture: str = setting(
        "",
        "File to write requests and responses to, as JSON lines, or in Parquet if its name ends in"
        " .parquet",
        metavar="FILE",
        section="Capture of payloads",
    )
    capture_rate: int = setting(
        1, "Capture one request in so many, or one value of the key in so many", least=1
    )
    capture_key: str = setting(
        "",
        "Capture all or none of the requests with an equal `id`, `header:NAME` or `parameter:NAME`",
    )
    capture_models: list[str] = setting(
        [], "Pattern of the models to capture, such as `fraud-*`; none: all", metavar="PATTERN"
    )
    capture_redact: list[str] = setting(
        [],
        "Pattern of tensors whose data are left out: TENSOR or MODEL/TENSOR; or of parameters:"
        " `parameter:NAME`",
        metavar="PATTERN",
    )
    capture_payload_bytes: int = setting(
        1 << 20, "Bytes of a request and its responses above which tensors are left out", least=1
    )
    capture_max_bytes: int = setting(
        100 << 20,
        "Size from which on the file is renamed to FILE`.1`, and begun anew, or of a Parquet part;"
        " 0: no limit",
    )
    capture_files: int = setting(10, "Renamed files or parts to keep")

    trace_config: list[str] = setting(
        [],
        "Which requests to trace, and where to: `level=`, `rate=`, `count=`, `mode=triton` with"
        " `triton,file=` and `triton,log-frequency=`, or `mode=opentelemetry` with"
        " `opentelemetry,url=`, `opentelemetry,resource=NAME=VALUE` and `opentelemetry,bsp_...=`;"
        " beside the rate `slow-ms=`, `failed=true` and `chosen=id:PATTERN`, `header:NAME` or"
        " `parameter:NAME`;"
        " may be repeated",
        between="\n",
        section="Traces",
    )
    trace_file: str = setting("", "Same as `--trace-config triton,file=`", metavar="FILE")
    trace_level: list[str] = setting(
        [], "Same as `--trace-config level=`; may be repeated", between=","
    )
    trace_rate: int = setting(1000, "Same as `--trace-config rate=`")
    trace_count: int = setting(-1, "Same as `--trace-config count=`", least=-1)
    trace_log_frequency: int = setting(0, "Same as `--trace-config triton,log-frequency=`")

    triton_server: str = setting(
        "tritonserver",
        "Triton's executable, a path or a name on `PATH`",
        section="Managed Triton processes",
    )
    triton_processes: str = setting(
        "1",
        "Number of Triton processes, or `per-gpu` for one per GPU",
        form=("per-gpu|[1-9]|[1-5][0-9]|6[0-4]", "per-gpu or a number from 1 to 64"),
    )
    triton_gpus: list[str] = setting(
        [], "GPUs for Triton, by number or UUID; default: all", between=","
    )
    triton_option: list[str] = setting(
        [], "Further option for Triton, such as `--log-verbose=1`; may be repeated", between="\n"
    )
    triton_environment: list[str] = setting(
        [], "Environment variables to pass to Triton besides the standard ones", between=","
    )
    triton_start_timeout_secs: int = setting(
        120, "Timeout for a Triton to become live; then it is killed and restarted", least=1
    )
    triton_exit_timeout_secs: int = setting(
        10, "Timeout for a Triton to exit at shutdown; then it is killed", least=1
    )
    triton_hang_secs: int = setting(
        60, "Seconds without an answer after which a Triton is killed and restarted; 0: never"
    )

    @property
    def tritons(self) -> TritonOptions:
        """Options of managed Triton processes."""
        gpus = [gpu.strip() for part in self.triton_gpus for gpu in part.split(",") if gpu.strip()]
        return TritonOptions(
            self.triton_server, self.triton_processes, gpus, self.triton_option,
            self.triton_environment, self.triton_start_timeout_secs, self.triton_exit_timeout_secs,
            self.triton_hang_secs,
        )  # fmt: skip

    @property
    def execution_limits(self) -> ExecutionLimits:
        """Default execution limits, which a model may override."""
        return ExecutionLimits(self.execution_limit_secs, self.stall_secs)

    @property
    def stores(self) -> "StoreOptions":
        """Options of stores."""
        from headrace.repository.store import StoreOptions  # with numpy

        return StoreOptions(
            self.store_cache, self.store_cache_bytes, self.store_offline, self.store_archive_files,
            self.store_archive_bytes, self.store_archive_ratio,
        )  # fmt: skip

    @property
    def residency(self) -> ResidencyOptions | None:
        """Options of loading on request; None if models are loaded at start."""
        if not (self.load_on_request or self.model_memory_budget or self.unload_after_idle_secs):
            return None
        return ResidencyOptions(
            self.model_memory_budget, self.load_wait_secs, self.minimum_residency_secs,
            self.unload_after_idle_secs, frozenset(self.pin_model), frozenset(self.load_model),
        )  # fmt: skip

    @property
    def cache(self) -> CacheOptions | None:
        """The places of answers; None without a response cache; raises `ValueError`."""
        return CacheOptions.of(self.cache_config, self.response_cache_byte_size)

    @property
    def environments(self) -> "EnvironmentOptions":
        """Settings of Python environments; raises `ValueError` for invalid names."""
        from headrace.core.model_spec import EnvironmentOptions, variable_names  # with numpy

        return EnvironmentOptions(
            self.environment_cache, self.wheelhouse, self.environment_build_timeout_secs,
            tuple(name for given in self.worker_env for name in variable_names(given)),
            self.environment_cache_bytes,
        )  # fmt: skip

    @property
    def isolation(self) -> "IsolationOptions":
        """Settings that confine Python models."""
        from headrace.core.model_spec import IsolationOptions  # with numpy

        return IsolationOptions(
            tuple(self.worker_user), self.worker_sandbox, tuple(self.sandbox_read),
            tuple(self.sandbox_write), self.worker_processes, self.scratch_bytes,
        )  # fmt: skip

    def isolation_report(self) -> tuple[list[str], list[str]]:
        """Protections from models, and missing ones; raises `ValueError` if one is required."""
        from headrace.placement.confinement import isolation_report

        return isolation_report(self.isolation)

    @property
    def http_rules(self) -> HeaderRules:
        """Header rules of the HTTP door."""
        return HeaderRules(
            self.http_header_forward_pattern, self.http_restricted_api, self.http_allowed_origin,
            self.http_address, restricted_at_both=self.restricted_api,
            scheme="https" if self.http_use_ssl else "http",
        )  # fmt: skip

    @property
    def grpc_rules(self) -> HeaderRules:
        """Metadata rules of the gRPC door."""
        return HeaderRules(
            self.grpc_header_forward_pattern, self.grpc_restricted_protocol, prefix=GRPC_PREFIX,
            restricted_at_both=self.restricted_api,
        )  # fmt: skip

    @property
    def doors(self) -> list[str]:
        """Further doors, as in `door`."""
        return [*self.door, *([f"inboxes={self.inboxes}"] if self.inboxes else [])]

    @property
    def open_at_one_door(self) -> list[str]:
        """Warnings about categories that are restricted at only one of two open doors."""
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
        """The latency metrics to keep; raises `ValueError`."""
        from headrace.observability.statistics import MetricsOptions  # with numpy

        return MetricsOptions.of(self.metrics_config)

    def shares(self, files: int) -> Shares:
        """One client's shares of the limits, in a process with this limit of open files."""
        most = files * 3 // 4
        connections = min(self.max_connections, most) if self.max_connections else most
        return Shares(
            self.max_connection_share, self.max_address_share, connections, self.max_model_share,
            self.max_streams,
        )  # fmt: skip

    def frontend_count(self, cores: int) -> int:
        """The number of front ends to start on this number of cores.

        A single one would have as much to do as the engine's process has without any, so `auto`
        starts none, or at least two: a quarter of the cores, leaving the rest for models.
        """
        if self.frontends != "auto":
            return int(self.frontends)
        return 0 if cores < _MANY_CORES else min(max(cores // 4, 2), 8)

    @property
    def traces(self) -> TraceConfig:
        """Trace settings and destinations; raises `ValueError`."""
        old = old_options(
            self.trace_file, self.trace_level, self.trace_rate, self.trace_count,
            self.trace_log_frequency,
        )  # fmt: skip
        return read_trace_config([*old, *self.trace_config], os.environ)

    def check(self) -> None:
        """Raise `SettingsError` for combinations that are invalid."""
        if not self.model_repository and not self.model_file:
            raise SettingsError("give --model-repository DIR, or a model file")
        if self.model_name and len([*self.model_repository, *self.model_file]) > 1:
            raise SettingsError(
                "--model-name is for one model file, or one directory that is a model: give one"
            )
        if wrong := [given for given in self.doors if not all(given.partition("="))]:
            raise SettingsError(f"--door must be NAME=ADDRESS, got {wrong[0]!r}")
        names = [given.partition("=")[0] for given in self.doors]
        if twice := [name for name in names if names.count(name) > 1]:
            raise SettingsError(f"--door: '{twice[0]}' is given twice")
        if self.proxy_protocol and not self.trusted_proxies:
            raise SettingsError("--proxy-protocol needs --trusted-proxies, which send it")
        if self.proxy_protocol and self.grpc_transport == "grpcio":
            raise SettingsError("--proxy-protocol needs --grpc-transport=native")
        if self.load_model and self.model_control_mode != "explicit":
            raise SettingsError(
                "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
            )
        if "*" in self.load_model and len(self.load_model) > 1:
            raise SettingsError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )
        if not (self.allow_http or self.allow_grpc or self.inboxes):
            raise SettingsError(
                "--allow-http and --allow-grpc are both false: nothing could be asked"
            )
        for door, address, unix in (
            ("http", self.http_address, self.http_unix_socket),
            ("grpc", self.grpc_address, self.grpc_unix_socket),
        ):
            if unix and not getattr(self, f"allow_{door}"):
                raise SettingsError(f"--{door}-unix-socket is of a closed door: --allow-{door}")
            if address == CLOSED and not unix:
                raise SettingsError(
                    f"--{door}-address={CLOSED} needs --{door}-unix-socket;"
                    f" --allow-{door}=false closes the door"
                )
        if self.allow_grpc and self.grpc_transport == "grpcio" and find_spec("grpc") is None:
            raise SettingsError(
                "--grpc-transport=grpcio needs grpcio: pip install 'headrace[grpcio]'"
            )
        if self.audit_infer and not self.audit_log:
            raise SettingsError("--audit-infer needs --audit-log FILE")
        if self.allow_grpc and self.grpc_transport == "grpcio" and self.grpc_use_ssl:
            for name, default in (("grpc_crl", ""), ("tls_min_version", VERSIONS[0])):
                if getattr(self, name) != default:
                    raise SettingsError(
                        f"--{name.replace('_', '-')} is not for --grpc-transport=grpcio, whose"
                        f" library has no such setting: use the native transport"
                    )
        http, grpc = self.http_rules, self.grpc_rules
        checks: tuple[tuple[str, Callable[[], object]], ...] = (
            ("--metrics-config:", lambda: self.metrics),
            ("--capture-key:", lambda: self.capturing),
            ("--cache-config:", lambda: self.cache),
            ("--trace-config:", lambda: self.traces),
            ("--trusted-proxies:", lambda: TrustedProxies(self.trusted_proxies)),
            ("--worker-env: expected", lambda: self.environments),
            ("isolation of models:", self.isolation_report),
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
        """Options of the gRPC transports."""
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
            self.grpc_max_connection_idle_secs, self.grpc_max_stream_idle_secs,
            self.max_connection_streams,
        )  # fmt: skip

    def tls(self, door: str) -> TlsFiles | None:
        """The TLS files of a door; None without TLS, or if it is none of `TLS_DOORS`."""

        def own(name: str) -> Any:
            return getattr(self, f"{door}_{name}")

        if door not in TLS_DOORS or not own("use_ssl"):
            return None
        return TlsFiles(
            door, own("server_cert"), own("server_key"), own("root_cert"), own("use_ssl_mutual"),
            own("crl"), self.tls_min_version, self.tls_ciphers,
        )  # fmt: skip

    @property
    def audit(self) -> AuditOptions | None:
        """Options of the audit log; None without one."""
        if not self.audit_log:
            return None
        return AuditOptions(
            self.audit_log, self.audit_infer, self.audit_max_bytes, self.audit_files
        )

    @property
    def capturing(self) -> CaptureOptions | None:
        """Options of the capture of payloads, None without one; raises `ValueError`."""
        kind, colon, name = self.capture_key.partition(":")
        if self.capture_key and (kind not in KEYS or (kind == "id") == bool(name)):
            raise ValueError(
                f"expected id, header:NAME or parameter:NAME, got {self.capture_key!r}"
            )
        if not self.capture:
            return None
        key = f"{kind}{colon}{name.lower() if kind == 'header' else name}"
        return CaptureOptions(
            self.capture, self.capture_rate, key, tuple(self.capture_models) or ("*",),
            tuple(self.capture_redact), self.capture_payload_bytes, self.capture_max_bytes,
            self.capture_files,
        )  # fmt: skip

    @property
    def logs(self) -> LogSettings:
        """The settings of logging."""
        # Without access control everyone who reaches the server has every right.
        known = self.access or self.http_address in (CLOSED, "127.0.0.1", "::1", "localhost")
        return LogSettings(
            self.log_verbose, self.log_info, self.log_warning, self.log_error, self.log_format,
            self.log_file, self.log_tail_lines if known else 0,
        )  # fmt: skip


def limits_by_memory(memory: int) -> dict[str, Value]:
    """The limits derived from `memory` available bytes; none if there is plenty.

    Requests in flight are decoded and answered, too, beside the models; and JSON takes up to
    fifteen times its text when decoded.
    """
    shares = {
        "max_request_bytes": memory // 32,
        "max_response_bytes": memory // 32,
        "max_admitted_bytes": memory // 8,
    }
    defaults = {name: getattr(Settings, name) for name in shares}
    return {name: max(share, 1) for name, share in shares.items() if share < defaults[name]}


OPTIONS: tuple[Option, ...] = tuple(Option.of(declared) for declared in fields(Settings))
# For the help: the options by section title.
SECTIONS: dict[str, list[Option]] = {}
for _option in OPTIONS:
    if _option.section:
        SECTIONS[_option.section] = []
    SECTIONS[next(reversed(SECTIONS))].append(_option)
# Options with which other commands find and build environments.
ENVIRONMENT_OPTIONS = tuple(
    option for option in SECTIONS["Python environments"] if option.field != "worker_env"
)
# Kubernetes sets such variables in every pod for a Service named "headrace" or similar.
_LINK_NAME = re.compile(r"HEADRACE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")
_LINK_VALUES = ("tcp://", "udp://", "sctp://")
CONFIG_FILE_ENV = ENV_PREFIX + "CONFIG_FILE"
URL_ENV = ENV_PREFIX + "URL"  # not a setting: the server's address for commands


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
    """Settings parsed by argparse into `given`, by field, else those of `brought`."""
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
    import tomllib  # rarely needed

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
    """The message for an unknown name, with the most similar known one."""
    near = difflib.get_close_matches(name, known, 1, _ALIKE)
    return f"unknown {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
