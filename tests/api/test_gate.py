"""The gate: who may request what, decided by the head of a request, and by its model."""

from collections.abc import Callable, Sequence

import pytest

from headrace.api.gate import Gate, check
from headrace.api.header_rules import HeaderRules
from headrace.api.operations import NAMED, OPERATIONS, Category
from headrace.core.errors import Forbidden, NotFound, Restricted, ServerError, Unauthenticated
from headrace.core.identity import ANYONE, NOBODY, Identity, PeerFacts, Permission, Role

READER = Role("reader", frozenset({Permission.READ}), ["a*", "b/2"])
SCORER = Role("scorer", frozenset({Permission.INFER}), ["a*"])
KNOWN = Identity("known", "key", [READER])


class FakeAccess:
    """Knows one key."""

    challenge = "Bearer"
    quotas = None

    def __init__(self) -> None:
        self.watchers: list[Callable[[], object]] = []
        self.anonymous: Identity | None = None

    def identify(self, authorization: Sequence[bytes], peer: PeerFacts) -> Identity:
        if list(authorization) == [b"Bearer key"]:
            return KNOWN
        if not authorization and self.anonymous is not None:
            return self.anonymous
        raise Unauthenticated("unknown key")

    def watch(self, changed: Callable[[], object]) -> None:
        self.watchers.append(changed)

    async def close(self) -> None:
        raise NotImplementedError


def values(**headers: str) -> Callable[[str], Sequence[bytes]]:
    return lambda name: [headers[name].encode()] if name in headers else []


def test_without_access_everyone_may_do_everything() -> None:
    gate = Gate()
    assert all(gate.enter(each, values(), changes=True) is ANYONE for each in OPERATIONS)
    check(ANYONE, Permission.ADMIN)


def test_a_client_is_identified_and_needs_a_role() -> None:
    gate = Gate(access=FakeAccess())
    metadata, infer = NAMED["ModelMetadata"], NAMED["ModelInfer"]
    assert gate.enter(metadata, values(authorization="Bearer key")) is KNOWN
    with pytest.raises(Forbidden, match="'known' has no role that permits 'infer'"):
        gate.enter(infer, values(authorization="Bearer key"))
    for wrong in (values(), values(authorization="Bearer other")):
        with pytest.raises(Unauthenticated) as caught:
            gate.enter(metadata, wrong)
        assert caught.value.challenge == "Bearer"
        assert gate.enter(NAMED["ServerLive"], wrong) is NOBODY
        assert gate.known(Category.METADATA, wrong) is NOBODY


def test_an_anonymous_client_without_a_role_is_told_to_prove_itself() -> None:
    access = FakeAccess()
    access.anonymous = Identity("anonymous", "anonymous", [SCORER])
    gate = Gate(access=access)
    assert gate.enter(NAMED["ModelInfer"], values()) is access.anonymous
    with pytest.raises(Unauthenticated, match="has no role that permits 'read'; it has to send"):
        gate.enter(NAMED["ModelMetadata"], values())


def test_a_required_header_comes_first() -> None:
    gate = Gate(HeaderRules(restricted=["metadata:x-key=right"]), FakeAccess())
    metadata = NAMED["ModelMetadata"]
    with pytest.raises(Restricted, match="This API is restricted, expecting header 'x-key'"):
        gate.enter(metadata, values(authorization="Bearer key"))
    given = {"authorization": "Bearer key", "x-key": "right"}
    assert gate.enter(metadata, lambda name: [given[name].encode()]) is KNOWN
    assert gate.known(Category.METADATA, values(authorization="Bearer key")) is NOBODY


def test_a_door_that_only_reads() -> None:
    gate = Gate(read_only=True)
    for name, changes, has in (
        ("RepositoryModelLoad", True, False),
        ("SystemSharedMemoryRegister", True, False),
        ("LogSettings", True, False),
        ("LogSettings", False, True),
        ("RepositoryIndex", False, True),
        ("ModelInfer", True, True),
    ):
        try:
            gate.enter(NAMED[name], values(), changes=changes)
            found = True
        except NotFound:
            found = False
        assert found is has, name


def test_changes_are_told() -> None:
    access, told = FakeAccess(), list[int]()
    gate = Gate(access=access)

    def tell() -> None:
        told.append(gate.changes)

    gate.watch(tell)
    before = gate.changes
    gate.change(HeaderRules(forward="x"))
    access.watchers[0]()
    assert told == [before + 1, before + 2]
    gate.unwatch(tell)
    access.watchers[0]()
    assert len(told) == 2


@pytest.mark.parametrize(
    ("permission", "model", "version", "error"),
    [
        (Permission.READ, "ab", "", None),
        (Permission.READ, "ab", "7", None),
        (Permission.READ, "b", "2", None),
        (Permission.READ, "b", "", Forbidden),
        (Permission.READ, "b", "1", Forbidden),
        (Permission.INFER, "ab", "", Forbidden),
        (Permission.READ, "c", "", NotFound),
        (Permission.INFER, "c", "1", NotFound),
        (Permission.READ, "", "", Forbidden),
        (Permission.OPEN, "", "", None),
    ],
)
def test_models(
    permission: Permission, model: str, version: str, error: type[ServerError] | None
) -> None:
    if error is None:
        check(KNOWN, permission, model, version)
    else:
        with pytest.raises(error):
            check(KNOWN, permission, model, version)


def test_a_hidden_model_is_refused_like_an_unknown_one() -> None:
    with pytest.raises(NotFound, match=r"^Request for unknown model: 'c' is not found$"):
        check(KNOWN, Permission.READ, "c")
