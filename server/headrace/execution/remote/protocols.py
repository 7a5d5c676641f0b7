"""The client of each endpoint of a model, by its protocol and scheme."""

from headrace.core.plugins import resolve
from headrace.execution.remote.connection import Declared, ProtocolClient
from headrace.execution.remote.options import Endpoint, RemoteOptions


class ProtocolClients:
    """The clients of one model's endpoints, made where time may be taken for it.

    `model` is what the model is called here, which errors name. `declared` is told to those that
    need it.
    """

    def __init__(
        self, options: RemoteOptions, model: str, declared: Declared | None = None
    ) -> None:
        """Raises `InvalidOption`."""
        self.model = model
        self.options = options
        self.declared = declared or Declared()
        self._made = {url.scheme: self._make(url.scheme) for url in options.urls}

    def of(self, endpoint: Endpoint) -> ProtocolClient:
        """That of an endpoint."""
        return self._made[endpoint.scheme]

    def _make(self, scheme: str) -> ProtocolClient:
        # What a client needs is imported here: it takes memory and time, which servers without
        # such models need not spend.
        options, model = self.options, self.model
        if scheme in ("grpc", "grpcs"):
            made: ProtocolClient = resolve(options.protocol.grpc)(options, model)
            return made
        from headrace.execution.remote.http_client import HttpClient

        kind, declared = resolve(options.protocol.rest), self.declared
        return HttpClient(options, model, lambda: kind(options, model, declared), scheme == "https")
