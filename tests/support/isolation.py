"""Requirements of tests of isolated models: root, Landlock, an interpreter for every user."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from headrace.workers.landlock import LEAST_ABI, abi

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="to run models as another user takes root, and unshare for its interpreter",
)
needs_landlock = pytest.mark.skipif(
    abi() < LEAST_ABI, reason=f"a sandbox takes Landlock {LEAST_ABI}, this kernel has {abi()}"
)
# Root's home may contain the interpreter, and is root's alone. The server of the tests sees another
# directory in its place, with the interpreter alone.
_READABLE = """
    mount --bind "$1" "$3" && mount -t tmpfs -o mode=755 none "$2" && mkdir -p "$1" &&
    mount --bind "$3" "$1" && shift 3 && exec "$@"
"""


def readable_interpreter(folder: Path) -> tuple[str, ...]:
    """The words before a command that let every user read its interpreter; `folder` is empty."""
    home = Path(sys.base_prefix)
    private = [path for path in home.parents if not path.stat().st_mode & 0o001]
    if not private:
        return ()
    given = str(home), str(private[-1]), str(folder)
    return ("unshare", "--mount", "--propagation=private", "sh", "-ec", _READABLE, "sh", *given)
