"""The choice of models to unload when memory is short."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.plugins.on_request import EvictionPlan, Resident, idle, make_room, surplus

NOW = 1000.0


def _resident(name: str, nbytes: int = 10, used: float = 0.0, **more: object) -> Resident:
    return Resident(name, nbytes, used, more.pop("loaded", 0.0), **more)  # type: ignore[arg-type]


def test_the_least_recently_used_model_is_chosen() -> None:
    assert make_room([_resident("a")], 10, 20, NOW, 60) == EvictionPlan()
    residents = [_resident("a", used=3), _resident("b", used=1), _resident("c", used=2)]
    assert make_room(residents, 10, 30, NOW, 60).unload == ("b",)
    assert make_room(residents, 20, 30, NOW, 60).unload == ("b", "c")
    # An unused model counts from its load.
    residents = [_resident("a", loaded=500.0), _resident("b", used=400.0)]
    assert make_room(residents, 10, 20, NOW, 60).unload == ("b",)


def test_pinned_busy_and_new_ones_stay() -> None:
    residents = [
        _resident("pinned", pinned=True), _resident("busy", busy=True),
        _resident("new", loaded=NOW - 59), _resident("other", used=900),
    ]  # fmt: skip
    assert make_room(residents, 10, 40, NOW, 60).unload == ("other",)


def test_nothing_is_unloaded_without_effect() -> None:
    residents = [_resident("old"), _resident("new", loaded=NOW - 50)]
    assert make_room(residents, 20, 20, NOW, 60) == EvictionPlan(wait=10.0)
    # Models that are being unloaded are awaited.
    residents = [_resident("going", leaving=True), _resident("other")]
    room = make_room(residents, 10, 20, NOW, 60)
    assert room.unload == ()
    assert room.wait is not None
    room = make_room([_resident("p", pinned=True), _resident("a")], 15, 20, NOW, 60)
    assert "about 15 bytes" in room.problem
    assert "10 of them" in room.problem


def test_models_that_have_grown_or_idle() -> None:
    residents = [_resident("a", 30, used=1), _resident("b", 10, used=2)]
    assert surplus(residents, 40, NOW, 60) == []
    assert surplus(residents, 35, NOW, 60) == ["a"]
    residents = [_resident("a", used=900), _resident("b", used=990), _resident("c", pinned=True)]
    assert idle(residents, NOW, 60) == ["a"]


_residents = st.lists(
    st.builds(
        Resident,
        st.uuids().map(str),
        st.integers(0, 100),
        st.floats(0, NOW),
        st.floats(0, NOW),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
)


@given(_residents, st.integers(0, 200), st.integers(0, 500), st.floats(0, 100))
def test_room_is_made_by_removable_models(
    residents: list[Resident], needed: int, budget: int, minimum: float
) -> None:
    room = make_room(residents, needed, budget, NOW, minimum)
    by_name = {one.name: one for one in residents}
    for name in room.unload:
        one = by_name[name]
        assert not any((one.pinned, one.busy, one.leaving))
        assert NOW - one.loaded >= minimum
    left = sum(one.nbytes for one in residents if one.name not in room.unload and not one.leaving)
    if room.unload or (room.wait is None and not room.problem):
        assert left + needed <= budget
    if room.problem:
        assert (room.unload, room.wait) == ((), None)
