"""Engines and clients that the runners of a process share."""

import os
from pathlib import Path

from headrace.runner.places import places


def test_a_place_is_shared_until_its_last_runner_leaves(models: Path) -> None:
    here = places()
    assert here is places()
    key, first = here.enter(str(models), {})
    _, second = here.enter(str(models), {})
    other, third = here.enter(str(models), {"max_request_bytes": 1000})
    assert first is second
    assert third is not first
    engine = first.models("matrix")
    assert first.opened("matrix") is second.models("matrix") is engine
    assert first.opened("add_sub") is None
    assert first.models("add_sub").ready("add_sub")
    here.leave(other, os.getpid(), lingers=False)
    here.leave(key, os.getpid() + 1, lingers=False)  # a runner of the parent
    here.leave(key, os.getpid(), lingers=False)
    assert first.opened("matrix") is engine
    here.leave(key, os.getpid(), lingers=False)
    assert first.opened("matrix") is None
    assert not {key, other} & set(here.known)


def test_places_of_unpickled_runners_are_kept_for_a_while(models: Path) -> None:
    here = places()
    key, first = here.enter(str(models), {})
    engine = first.models("matrix")
    here.leave(key, os.getpid(), lingers=True)
    again, second = here.enter(str(models), {})
    assert (again, second, first.closing) == (key, first, None)
    assert second.models("matrix") is engine
    here.leave(key, os.getpid(), lingers=False)
    assert first.opened("matrix") is None
