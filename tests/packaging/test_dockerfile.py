"""The Dockerfile: pinned, small, without root, and stoppable."""

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from headrace.settings import OPTIONS

REPO = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its continuation lines joined."""

    keyword: str
    value: str


def parse(text: str) -> list[list[Instruction]]:
    """Stages of the Dockerfile, each beginning with its FROM."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stages: list[list[Instruction]] = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        keyword, _, value = line.strip().partition(" ")
        if keyword == "FROM":
            stages.append([])
        stages[-1].append(Instruction(keyword, value.strip()))
    return stages


STAGES = parse((REPO / "Dockerfile").read_text())
BUILD, FINAL = STAGES


def values(stage: list[Instruction], keyword: str) -> list[str]:
    return [instruction.value for instruction in stage if instruction.keyword == keyword]


def environment(stage: list[Instruction]) -> dict[str, str]:
    return dict(re.findall(r'(\w+)=("[^"]*"|\S+)', " ".join(values(stage, "ENV"))))


def test_bases_are_one_official_image() -> None:
    assert all(re.fullmatch(r"python:3\.1[1-3]-slim( AS \w+)?", s[0].value) for s in STAGES)
    build, final = (stage[0].value.split()[0] for stage in STAGES)
    assert build == final


def test_every_download_is_checked_by_hash() -> None:
    commands = " && ".join(values(BUILD, "RUN")).split(" && ")
    installs = [c for c in commands if re.search(r"\bpip .*\b(install|wheel)\b", c)]
    assert len(installs) == 4
    for install in installs:
        assert "--require-hashes" in install or "--no-index" in install, install


def test_the_final_stage() -> None:
    assert values(FINAL, "RUN") == []
    assert values(FINAL, "COPY") == [
        "--from=build /opt/headrace /opt/headrace", "--from=build /opt/root/ /"
    ]  # fmt: skip
    assert values(FINAL, "WORKDIR") == ["/models"]
    assert values(FINAL, "EXPOSE") == ["8000 8001 8002"]
    # In exec form no shell stands between the container runtime and the server.
    (entrypoint,), (command,) = values(FINAL, "ENTRYPOINT"), values(FINAL, "CMD")
    assert json.loads(entrypoint) == ["headrace"]
    assert json.loads(command) == ["serve", "--model-repository", "/models"]
    (user,) = values(FINAL, "USER")
    assert all(int(number) > 0 for number in user.split(":", 1))


def test_settings_exist_and_listen_on_all_addresses() -> None:
    settings = {k: v for k, v in environment(FINAL).items() if k.startswith("HEADRACE_")}
    assert set(settings) <= {option.env for option in OPTIONS}
    assert settings == dict.fromkeys(
        ("HEADRACE_HTTP_ADDRESS", "HEADRACE_GRPC_ADDRESS", "HEADRACE_METRICS_ADDRESS"), "0.0.0.0"
    )


def test_health_check_is_valid_python_in_exec_form() -> None:
    (check,) = values(FINAL, "HEALTHCHECK")
    interpreter, flag, code = json.loads(check.partition("CMD ")[2])
    assert (interpreter, flag) == ("python", "-c")
    assert "/v2/health/live" in code
    compile(code, "HEALTHCHECK", "exec")


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (REPO / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignored if line.startswith("!")]
    sources = [source for copy in values(BUILD, "COPY") for source in copy.split()[:-1]]
    assert sources
    for source in sources:
        assert (REPO / source).exists(), source
        assert any(fnmatch(source.rstrip("/"), pattern) for pattern in kept), source
