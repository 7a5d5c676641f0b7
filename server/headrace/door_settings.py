"""The settings of doors: HTTP, gRPC, metrics, and memory shared with clients."""

from dataclasses import dataclass

from headrace.observability.series import MetricsOptions
from headrace.options import setting
from headrace.transports.grpc.options import LEVELS
from headrace.wire.header_rules import GRPC_PREFIX, Category, HeaderRules

_CATEGORIES = ", ".join(f"`{category}`" for category in Category)


@dataclass(frozen=True, kw_only=True)
class DoorSettings:
    """What an operator can decide of how clients reach the server."""

    # HTTP and gRPC
    restricted_api: list[str] = setting(  # noqa: RUF009
        [],
        "Answer these categories of requests, over HTTP and over gRPC, only with this header or"
        " metadata, `CATEGORIES:HEADER=VALUE`; categories, with commas between, are"
        f" {_CATEGORIES}",
        between="\n",
    )
    # HTTP
    allow_http: bool = setting(True, "Answer over HTTP")
    http_address: str = setting("127.0.0.1", "Address to listen on for HTTP")
    http_port: int = setting(8000, "Port for HTTP; 0 picks a free one")
    reuse_http_port: bool = setting(
        False, "Let several servers listen on the port for HTTP, if all of them have this set"
    )
    http_fast_path: bool = setting(
        True,
        "Answer infer requests in front of the ASGI application; the answers are the same",
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
    http_restricted_api: list[str] = setting(  # noqa: RUF009
        [],
        "The same as `--restricted-api` for HTTP alone, as Triton has it",
        between="\n",
    )
    http_allowed_origin: list[str] = setting(  # noqa: RUF009
        [],
        "Let web pages of this origin, `SCHEME://HOST[:PORT]`, have browsers change models and"
        " settings, beside those of loopback names and of the address that is listened on; `*`:"
        " of all",
        between=",",
    )
    # gRPC
    allow_grpc: bool = setting(True, "Answer over gRPC")
    grpc_address: str = setting("127.0.0.1", "Address to listen on for gRPC")
    grpc_port: int = setting(8001, "Port for gRPC; 0 picks a free one")
    reuse_grpc_port: bool = setting(
        False, "Let several servers listen on the port for gRPC, if all of them have this set"
    )
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
        20_000,
        "Milliseconds that the answer may take, before the connection is closed",
        least=1,
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
    allow_gpu_metrics: bool = setting(True, "Have the GPUs among the metrics, where there are any")
    # Shared memory
    allow_client_shm: bool = setting(
        False,
        "Let clients register shared memory of this machine, and have tensors in it;"
        " whoever reaches the server can then read and write what its user can of `/dev/shm`",
    )
    client_shm_prefix: str = setting(
        "", "Of `/dev/shm`, let clients register only keys that begin so"
    )

    @property
    def http_rules(self) -> HeaderRules:
        """What headers of HTTP requests decide."""
        return HeaderRules(
            self.http_header_forward_pattern, self.http_restricted_api, self.http_allowed_origin,
            self.http_address, restricted_at_both=self.restricted_api,
        )  # fmt: skip

    @property
    def grpc_rules(self) -> HeaderRules:
        """What metadata of calls decide."""
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
    def metrics(self) -> MetricsOptions:
        """Which metrics of latencies there are; raises `ValueError`."""
        return MetricsOptions.of(self.metrics_config)
