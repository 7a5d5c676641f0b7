"""One front end: `python -m headrace.doors.frontends DESCRIPTOR [private]`, by the engine."""

import sys

from headrace.placement.isolation import make_private

if __name__ == "__main__":
    if sys.argv[2:] == ["private"]:
        make_private()  # the engine has told of what the kernel refuses
    # Imported late: nothing is in this process's memory before it is private.
    from headrace.doors.frontends.process import main

    sys.exit(main(int(sys.argv[1])))
