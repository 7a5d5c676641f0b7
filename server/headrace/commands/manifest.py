"""`headrace models manifest`: write down what a model's files hold, or check them against that."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import LoadFailed
from headrace.repository.model_files import NAME, Digests, read_manifest, write_manifest


def write_manifests(directories: Sequence[Path], check: bool, as_json: bool) -> int:
    """Write or check the manifests of directories, and report; 0 if all is well."""
    reports = [_report(directory, check) for directory in directories]
    if as_json:
        print(json.dumps(reports, indent=2))
    for report in reports:
        for problem in report["problems"]:
            print(f"error: {report['directory']}: {problem}", file=sys.stderr)
        if not (as_json or report["problems"]):
            done = f"as {NAME} says" if check else f"{NAME} written"
            print(f"{report['directory']}: {done}, files: {len(report['files'])}")
    return int(any(report["problems"] for report in reports))


def _report(directory: Path, check: bool) -> dict[str, Any]:
    report: dict[str, Any] = {"directory": str(directory), "files": {}, "problems": []}
    try:
        if not directory.is_dir():
            raise LoadFailed("it is no directory of a model or of a version")
        if check and not (directory / NAME).is_file():
            raise LoadFailed(f"there is no {NAME}")
        report["files"] = read_manifest(directory) if check else write_manifest(directory)
        report["problems"] = Digests().problems(directory) if check else []
    except LoadFailed as error:
        report["problems"] = [str(error)]
    except OSError as error:
        report["problems"] = [f"{error.filename}: {error.strerror}"]
    return report
