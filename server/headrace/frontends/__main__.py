"""`python -m headrace.frontends DESCRIPTOR`: one front end, started by the engine's process."""

import sys

from headrace.frontends.process import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
