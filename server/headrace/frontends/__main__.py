"""`python -m headrace.frontends DESCRIPTOR [private]`: one front end, started by the engine."""

import sys

from headrace.execution.isolation import make_private

if __name__ == "__main__":
    if sys.argv[2:] == ["private"]:
        make_private()  # the engine has told of what the kernel refuses
    # Imported late: nothing is in this process's memory before it is private.
    from headrace.frontends.process import main

    sys.exit(main(int(sys.argv[1])))
