"""The programs of `examples/clients`, built and run against a real server."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess, onnx_examples

CLIENTS = Path(__file__).parents[2] / "examples" / "clients"
JAVA = Path("/usr/share/java")
GO = Path("/usr/share/gocode/src/google.golang.org/grpc")
# Crates of other releases of Debian may not fit together.
CRATES = Path("/usr/share/cargo/registry")
RUST = tuple(
    CRATES / name
    for name in (
        "hyper-0.14.19", "prost-0.11.6", "prost-build-0.11.6", "serde-1.0.152",
        "serde_derive-1.0.152", "serde_json-1.0.87", "tokio-1.24.2",
    )
)  # fmt: skip
# The class path of Java's programs, in the folder of what was built.
CLASSES = "classes:jars/*"


@dataclass(frozen=True)
class Program:
    """A program: its command, its door, and the commands and files that it needs."""

    language: str
    door: str
    needs: tuple[str, ...]
    command: Sequence[str]
    files: tuple[Path, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Names of commands and files that this machine lacks."""
        commands = [name for name in self.needs if shutil.which(name) is None]
        return commands + [str(file) for file in self.files if not file.exists()]


PROGRAMS = [
    Program("javascript", "http", ("node",), ("node", "http.js")),
    Program("javascript", "grpc", ("node", "npm"), ("node", "grpc.js")),
    Program("java", "http", ("javac",), ("java", "-cp", CLASSES, "Http"), (JAVA / "gson.jar",)),
    Program(
        "java", "grpc", ("javac", "protoc", "grpc_java_plugin"),
        ("java", "-cp", CLASSES, "Grpc"), (JAVA / "grpc-netty.jar", JAVA / "netty-all.jar"),
    ),
    Program("go", "http", ("go",), ("./http",)),
    Program("go", "grpc", ("go", "protoc", "protoc-gen-go"), ("./grpc",), (GO,)),
    Program("rust", "http", ("cargo", "protoc"), ("./http",), RUST),
    Program("rust", "grpc", ("cargo", "protoc"), ("./grpc",), RUST),
]  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of built languages, by name."""
    return {}


@pytest.fixture(params=PROGRAMS, ids=lambda program: f"{program.language}-{program.door}")
def program(
    request: pytest.FixtureRequest, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Program, Path]:
    """A program and its folder; its language is built once, as far as the machine can."""
    found: Program = request.param
    if found.missing:
        pytest.skip(f"{found.language} over {found.door} needs {', '.join(found.missing)}")
    if found.language not in built:
        built[found.language] = _build(found.language, tmp_path_factory.mktemp(found.language))
    return found, built[found.language]


def _build(language: str, folder: Path) -> Path:
    """Build as examples/clients/README.md says; what gRPC alone needs may fail here."""
    if language != "javascript":
        subprocess.run([CLIENTS / language / "build.sh", folder], check=False, timeout=300)
        return folder
    # Beside the protos, and without leaving packages in the checkout.
    own = folder / "examples" / "clients" / language
    shutil.copytree(CLIENTS / language, own, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "protos").symlink_to(CLIENTS.parents[1] / "protos")
    if shutil.which("npm"):
        install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(install, cwd=own, check=False, timeout=120)
    return own


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(onnx_examples(tmp_path_factory.mktemp("models"), "storyteller")) as started:
        yield started
        assert started.stop() == 0


def _run(program: Program, folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program.command, address], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_a_client_reads_metadata_infers_streams_and_shows_refusals(
    program: tuple[Program, Path], server: ServerProcess
) -> None:
    found, folder = program
    grpc = found.door == "grpc"
    done = _run(found, folder, server.grpc if grpc else server.http)
    assert done.returncode == 0, done.stderr
    own, digits, plain, binary, stream, refused = done.stdout.splitlines()
    assert own.startswith("server: headrace ")
    assert digits == (
        "digits: image FP32 [-1,8,8] -> probabilities FP32 [-1,10] and label INT64 [-1,1]"
    )
    sums, differences = (",".join(str(n + m) for n in range(16)) for m in (1, -1))
    assert plain == f"plain: sums {sums}, differences {differences}"
    assert binary == "binary: a 0, probability 1.000"
    assert stream.startswith("stream: The miller ")
    assert len(stream.split()) == 8
    status = "NOT_FOUND" if grpc else "404"
    assert refused == f"refused: {status} Request for unknown model: 'nosuch' is not found"


def test_a_client_without_server_says_so(program: tuple[Program, Path]) -> None:
    done = _run(*program, "127.0.0.1:9")
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert done.stdout == ""
