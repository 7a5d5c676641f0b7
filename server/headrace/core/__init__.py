"""Value types shared by every other package; no I/O."""
