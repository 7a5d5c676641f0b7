"""Which dialect an endpoint is spoken to in."""

from headrace.execution.remote.connection import Dialect
from headrace.execution.remote.http_client import Declared, Rest
from headrace.execution.remote.options import TFSERVING, TORCHSERVE, Endpoint, RemoteOptions


class Dialects:
    """The dialects of one model's endpoints, made where time may be taken for it.

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

    def of(self, endpoint: Endpoint) -> Dialect:
        """That of an endpoint."""
        return self._made[endpoint.scheme]

    def _make(self, scheme: str) -> Dialect:
        # Not with the other imports: what a dialect needs takes memory and time, which servers
        # without such models need not spend.
        if scheme in ("grpc", "grpcs") and self.options.protocol.name == TFSERVING:
            from headrace.execution.remote.tfserving_grpc import TfServingDialect

            return TfServingDialect(self.options, self.model)
        if scheme in ("grpc", "grpcs"):
            from headrace.execution.remote.grpc_client import GrpcDialect

            return GrpcDialect(self.options, self.model)
        from headrace.execution.remote.http_client import HttpDialect

        return HttpDialect(self.options, self.model, self._rest(), scheme == "https")

    def _rest(self) -> Rest:
        options, model, declared = self.options, self.model, self.declared
        if options.protocol.name == TFSERVING:
            from headrace.execution.remote.tfserving_rest import TfServingRest

            return TfServingRest(options, model, declared)
        if options.protocol.name == TORCHSERVE:
            from headrace.execution.remote.torchserve_rest import TorchServeRest

            return TorchServeRest(options, model, declared)
        from headrace.execution.remote.v2_rest import V2Rest

        return V2Rest(options, model, declared)
