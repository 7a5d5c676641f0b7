"""Front ends without cyclic garbage collection; see `tests.support.uncollected`."""

import os
import sys

if "headrace.plugins.frontends" in sys.orig_argv:
    from tests.support.uncollected import UNCOLLECTED, front_end_socket, listen

    listen(front_end_socket(os.environ[UNCOLLECTED]))
