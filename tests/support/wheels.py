"""Tiny wheels, so that environments are built without a package index."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    modules: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
) -> Path:
    """A pure wheel; `modules` are file contents by path, by default one with the version.

    `requires` are its requirements.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = dict(modules or {f"{name}.py": f"VERSION = {version!r}\n"})
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
