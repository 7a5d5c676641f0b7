"""Every route and procedure belongs to a category; others are not served."""

from collections.abc import Iterator

import pytest

from headrace.api.gate import Gate
from headrace.api.header_rules import HeaderRules
from headrace.api.operations import OPERATIONS, Category, by_procedure
from headrace.core.errors import Restricted
from headrace.core.identity import ANYONE, NO_PEER
from headrace.core.tensors import Buffer
from headrace.doors.grpc.call import Handlers, Peer, RpcContext, StreamSession
from headrace.doors.grpc.services import restricted
from headrace.doors.http.generate import inference_routes
from headrace.doors.http.infer import BareRoute
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.doors.fakes import FakeEngine


def test_the_bare_routes_are_inference() -> None:
    routes = inference_routes(FakeEngine(), 1, Gate())
    forms = [
        form.format(name="m", version="1")
        for operation in OPERATIONS
        for route in operation.routes
        for form in route.forms
        if operation.category is Category.INFERENCE
    ]
    assert len(forms) == 6
    assert all(list(_claiming(routes, form)) for form in forms)


def _claiming(routes: list[BareRoute], path: str) -> Iterator[BareRoute]:
    for route in routes:
        if route.claims("POST", path):
            yield route


def test_every_procedure_of_the_protocol_has_a_category() -> None:
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in service.methods:
        assert by_procedure()[f"/{service.full_name}/{method.name}"].category is not None


def test_a_procedure_that_is_not_in_the_table_is_not_served() -> None:
    async def unary(data: Buffer, call: RpcContext) -> bytes:
        raise NotImplementedError

    def stream(peer: Peer) -> StreamSession:
        raise NotImplementedError

    check = "/grpc.health.v1.Health/Check"
    good = Handlers({}, {check: unary}, {})
    health = Gate(HeaderRules(restricted=["health:x=y"]))
    with pytest.raises(Restricted, match="expecting header 'x'"):
        restricted(good, health).enter(check, {}, NO_PEER)
    assert restricted(good, health).enter(check, {"x": "y"}, NO_PEER) is ANYONE
    inference = Gate(HeaderRules(restricted=["inference:x=y"]))
    assert restricted(good, inference).enter(check, {}, NO_PEER) is ANYONE
    for handlers in (
        Handlers({}, {"/a/B": unary}, {}),
        Handlers({}, {}, {"/a/B": stream}),
    ):
        with pytest.raises(LookupError, match="/a/B is not in the table of operations"):
            restricted(handlers, Gate())


def test_every_category_exists() -> None:
    assert {operation.category for operation in OPERATIONS} == set(Category) | {None}
