"""What start-up shows of the models."""

import sys

from headrace.engine.model import ModelVersion


def print_models(versions: list[ModelVersion], unavailable: list[tuple[str, str]]) -> None:
    """Print the table of models; `unavailable` are those without any version, or `name/number`."""
    rows = [("model", "version", "backend", "instances", "state", "load")]
    for version in versions:
        instances = backend = ""
        if version.ready:
            kinds = [str(instance.kind) for instance in version.instances]
            instances = ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))
            backend = version.config.backend
            if gpus := {gpu for group in version.config.instance_group for gpu in group.gpus}:
                instances += f" (GPU {', '.join(map(str, sorted(gpus)))})"
        rows.append(
            (version.model, version.name, backend, instances, str(version.state),
             f"{version.load_seconds:.2f} s" if version.ready else "")
        )  # fmt: skip
    rows += [(name, "", "", "", "UNAVAILABLE", "") for name, _ in unavailable if "/" not in name]
    if len(rows) == 1:
        print("no model is loaded", flush=True)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    sys.stdout.flush()
