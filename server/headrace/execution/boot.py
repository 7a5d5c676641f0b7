"""The command that makes a fresh interpreter a worker."""

from pathlib import Path

from headrace import __version__
from headrace.workers.limits import Limits

_PACKAGES = Path(__file__).parents[1]
# The package without what its root imports, and without whatever else lies beside it: the worker
# may belong to another environment. Nothing is imported from the working directory. Limits are set
# and signs of life are given before anything large is imported.
_BOOT = (
    "import sys,types;"
    "given=sys.argv[1:];sys.argv[:]=[''];"  # as in Triton: models may read the command line
    "sys.path[:]=[p for p in sys.path if p];"
    "m=types.ModuleType('headrace');m.__path__=[given[1]];m.__version__=given[4];sys.modules['headrace']=m;"
    "from headrace.workers.limits import apply_limits;apply_limits(given[3]);"
    "from headrace.workers.heartbeat import beat;beat(int(given[2]));"
    "from headrace.workers.main import main;main(int(given[0]))"
)


def command(python: str, socket: int, heartbeat: int, limits: Limits) -> list[str]:
    """What to run; `socket` and `heartbeat` are descriptors that the process inherits."""
    given = str(socket), str(_PACKAGES), str(heartbeat), limits.encode(), __version__
    return [python, "-c", _BOOT, *given]
