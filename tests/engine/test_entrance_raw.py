"""Raw requests, which are decoded where the signature of their model is known."""

from pathlib import Path
from threading import Event

from headrace.core.call import Raw
from headrace.core.limits import Charge, uncharged
from headrace.engine.entrance import submit_raw
from headrace.engine.workbench import LARGE
from headrace.protocol.v2_json import pass_raw
from tests.engine.worlds import FutureCall, World, number, until

LONG = b'{"X": [0.5]' + b" " * LARGE + b"}"


async def test_a_version_is_replaced_while_a_long_request_is_decoded(tmp_path: Path) -> None:
    world, go = World(tmp_path), Event()
    await world.engine.load_all([world.write("m", "1")])

    def hold(charge: Charge) -> None:
        assert go.wait(30)

    world.admission.workbench.do(1, hold, lambda *ended: None, uncharged, None)
    call = FutureCall(pass_raw("m", "", LONG, Raw.GENERATE))
    submit_raw(world.engine.find("m"), call, world.engine)
    assert await world.engine.load(world.write("m", "2")) == ""
    await until(lambda: world.backend.loaded[0].closed)
    go.set()
    assert number(await call.future) == 2
    await world.engine.unload_all()
