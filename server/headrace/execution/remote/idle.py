"""Parameters of a model on other servers that mean something, but not beside the others."""

from collections.abc import Iterator, Mapping

_TLS = ("tls_root_cert", "tls_cert", "tls_key")


def idle_parameters(parameters: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names of those that change nothing, and why."""
    endpoints = parameters.get("endpoints", "") + "," + parameters.get("fail_over", "")
    if "s://" not in endpoints:
        for name in _TLS:
            if parameters.get(name):
                yield name, "has no effect without TLS: endpoints are grpcs:// or https:// then"
    if parameters.get("http_tensors") and "http" not in endpoints:
        yield "http_tensors", "has no effect without an endpoint at http:// or https://"
    if parameters.get("forward") == "transparent":
        yield (
            "forward",
            "'transparent' passes no bytes on untouched any more: requests are read here, and go on"
            " one by one, as with batching 'off'",
        )
    hedging = [name for name in ("hedge_after", "hedge_percent") if parameters.get(name)]
    if hedging:  # one warning for both
        yield hedging[0], "has no effect any more: no call is made to a second server as well"
