"""What has to hold where this server and those that it asks share memory."""

from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidOption
from headrace.execution.remote.protocol_options import V2

if TYPE_CHECKING:
    from headrace.execution.remote.options import Url

_PARAMETER = "parameters['shared_memory']"


def check_sharing(urls: Sequence["Url"], protocol: str) -> None:
    """Whether models that are asked so can share memory; raises `InvalidOption`."""
    if protocol != V2:
        raise InvalidOption(_PARAMETER, f"is of the protocol {V2}, not {protocol}")
    for url in urls:
        if not url.scheme.startswith("grpc"):
            raise InvalidOption(_PARAMETER, f"is for servers that are asked over gRPC, not {url}")


def check_local(url: "Url", address: str) -> None:
    """Whether an address of a server is that of this machine for itself; raises `InvalidOption`."""
    if not ip_address(address.partition("%")[0]).is_loopback:
        raise InvalidOption(
            _PARAMETER,
            f"{url} has the address {address}: expected one of this machine for itself, such as"
            " 127.0.0.1",
        )
