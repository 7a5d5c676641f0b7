"""One front end: `python -m headrace.plugins.frontends DESCRIPTOR [private]`."""

import sys

from headrace.core.process import make_private

if __name__ == "__main__":
    if sys.argv[2:] == ["private"]:
        make_private()  # the engine logs what the kernel refuses
    # Imported late, so that nothing is in this process's memory before it is private.
    from headrace.plugins.frontends.process import main

    sys.exit(main(int(sys.argv[1])))
