"""Every route and procedure belongs to a category; one that does not is not served."""

from collections.abc import AsyncIterator, Iterator

import pytest

from headrace.core.tensors import Buffer
from headrace.transports.grpc import categories as grpc_categories
from headrace.transports.grpc.call import Handlers, RpcContext
from headrace.transports.http import categories as http_categories
from headrace.transports.http.infer import Route
from headrace.transports.http.restricted import restricted_routes
from headrace.wire.header_rules import AllowedOrigins, Category, HeaderRules, Key
from headrace.wire.pb import grpc_service_pb2 as pb
from tests.transports.fakes import FakeEngine

_KEY = Key("x", "y")


def test_a_route_without_a_category_is_not_served() -> None:
    route = restricted_routes({}, AllowedOrigins())
    with pytest.raises(LookupError, match="/v2/anything has no category in"):
        route("/v2/anything", lambda: None)


def test_what_parts_of_a_path_are_called_does_not_matter() -> None:
    assert http_categories.category_of("/v2/models/{m}/versions/{v}/stats") is Category.STATISTICS


def test_the_bare_routes_are_inference() -> None:
    engine = FakeEngine()
    bare = http_categories.inference_routes(engine, 1, HeaderRules())
    restricted = http_categories.inference_routes(
        engine, 1, HeaderRules(restricted=["inference:x=y"])
    )
    paths = [
        path.replace("{}", "1")
        for path, category in http_categories.CATEGORIES.items()
        if category is Category.INFERENCE
    ]
    for routes in (bare, restricted):
        assert all(list(_claiming(routes, path)) for path in paths)
    assert {type(route) for route in restricted} == {http_categories.RestrictedInference}


def _claiming(routes: list[Route], path: str) -> Iterator[Route]:
    for route in routes:
        if route.claims("POST", path):
            yield route


def test_every_procedure_of_the_protocol_has_a_category() -> None:
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in service.methods:
        assert grpc_categories.CATEGORIES[f"/{service.full_name}/{method.name}"] is not None


def test_a_procedure_without_a_category_is_not_served() -> None:
    async def unary(data: Buffer, call: RpcContext) -> bytes:
        raise NotImplementedError

    def stream(requests: AsyncIterator[Buffer], call: RpcContext) -> AsyncIterator[bytes]:
        raise NotImplementedError

    check = "/grpc.health.v1.Health/Check"
    good = Handlers({}, {check: unary}, {}, {}, {})
    assert grpc_categories.restricted(good, {Category.HEALTH: _KEY}).keys == {check: _KEY}
    assert not grpc_categories.restricted(good, {Category.INFERENCE: _KEY}).keys
    for handlers in (
        Handlers({}, {"/a/B": unary}, {}, {}, {}),
        Handlers({}, {}, {"/a/B": stream}, {}, {}),
        Handlers({}, {}, {}, {"/a/B": stream}, {}),
    ):
        with pytest.raises(LookupError, match="/a/B has no category in"):
            grpc_categories.restricted(handlers, {})


def test_every_category_is_there_over_both_protocols() -> None:
    assert set(Category) | {None} == set(http_categories.CATEGORIES.values())
    assert set(Category) | {None} == set(grpc_categories.CATEGORIES.values())
