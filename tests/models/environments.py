"""Models that need packages of their own, and sources of these."""

import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np

from tests.models.python_models import tensors, write_python_model
from tests.support.wheels import write_wheel

# It returns its package's version, its interpreter, and the location of numpy.
TELLING = """
    import json
    import os
    import sys
    from importlib.metadata import version

    import flavour
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            told = {
                "flavour": flavour.VERSION, "prefix": sys.prefix, "numpy": version("numpy"),
                "python": sys.version_info[:2], "path": os.environ["PATH"].split(":")[0],
                "seen": sorted(name for name in os.environ if name.startswith("PIP_")),
                "isolated": not any("fastapi" in os.listdir(p) for p in sys.path if os.path.isdir(p)),
            }
            answer = np.array([json.dumps(told)], object)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", answer)]) for _ in requests]
"""  # noqa: E501


def write_wheelhouse(root: Path) -> Path:
    """A directory with two versions of a package, the second of which needs another package."""
    write_wheel(root, "flavour", "1.0")
    write_wheel(root, "flavour", "2.0", requires=["colour"])
    write_wheel(root, "colour", "1.0")
    return root


def write_telling_model(root: Path, name: str, parameters: str = "", block: str = "") -> Path:
    """A model that reports its environment; its directory."""
    config = tensors("input", ("X", "INT32", "1")) + tensors("output", ("TOLD", "STRING", "1"))
    write_python_model(root, name, f"{block}\n{dedent(TELLING)}", config + parameters)
    return root / name


def parameter(name: str, value: str) -> str:
    """A parameter of a configuration."""
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def write_environment(path: Path) -> Path:
    """An environment without pip, with the package `flavour` 3.0 and this environment's numpy."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    [site] = path.glob("lib/python3*/site-packages")
    (site / "flavour.py").write_text("VERSION = '3.0'\n")
    home = Path(np.__file__).parent
    for part in (home, home.with_name("numpy.libs"), *home.parent.glob("numpy-*.dist-info")):
        if part.is_dir():
            (site / part.name).symlink_to(part)
    return path


def write_archive(path: Path) -> Path:
    """An archive of an environment as conda-pack makes them: it works wherever it is unpacked."""
    folder = path.with_suffix(".d")
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "lib" / "flavour.py").write_text("VERSION = '4.0'\n")
    python = folder / "bin" / "python3"
    # In place of an interpreter, which would be large.
    python.write_text(
        "#!/bin/sh\n"
        'here=$(cd "$(dirname "$0")/.." && pwd)\n'
        f'PYTHONPATH="$here/lib" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (folder / "bin" / "python").symlink_to("python3")
    (folder / "bin" / "conda-unpack").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('adapted').write_text('')\n"
    )
    packed = shutil.make_archive(str(path).removesuffix(".tar.gz"), "gztar", folder)
    shutil.rmtree(folder)
    return Path(packed)
