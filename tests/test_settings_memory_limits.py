"""Default limits derived from the memory available to the server."""

from pathlib import Path

import pytest

from headrace.settings import Settings, limits_by_memory
from tests.support.scrape import Scraper
from tests.support.server_process import ServerProcess, onnx_examples

MIB, GIB = 1 << 20, 1 << 30
_SMALL = "--max-request-bytes=13107200, --max-response-bytes=13107200"
IN_400_MIB = ("-c", "from headrace.cli import main; main(memory=lambda: 400 << 20)")


@pytest.mark.parametrize(("memory", "largest", "admitted"), [
    (400 * MIB, 13107200, 50 * MIB), (2 * GIB, None, 256 * MIB),  # None: by default
    (6 * GIB, None, 768 * MIB), (8 * GIB, None, None), (1 << 40, None, None),
    (1, 1, 1),  # 0 would be no limit
])  # fmt: skip
def test_limits_are_shares_of_the_memory_and_at_most_the_defaults(
    memory: int, largest: int | None, admitted: int | None
) -> None:
    # A response may have a quarter of the admitted bytes.
    response = None if admitted is None else max(memory // 32, 1)
    wanted = {
        "max_request_bytes": largest, "max_response_bytes": response,
        "max_admitted_bytes": admitted,
    }  # fmt: skip
    assert limits_by_memory(memory) == {n: v for n, v in wanted.items() if v is not None}


def test_defaults_are_as_documented() -> None:
    settings = Settings(model_file=["m"])
    found = settings.max_request_bytes, settings.max_response_bytes, settings.max_admitted_bytes
    assert found == (64 * MIB, 256 * MIB, GIB)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "admitted", "said"), [
    ((), 50 * MIB, f"{_SMALL}, --max-admitted-bytes=52428800"),
    (("--max-admitted-bytes=0",), 0, f"{_SMALL}\n"),
    (("--max-admitted-bytes=7000", "--max-request-bytes=6", "--max-response-bytes=5"), 7000, ""),
])  # fmt: skip
def test_a_server_logs_its_limits(
    tmp_path: Path, options: tuple[str, ...], admitted: int, said: str
) -> None:
    with ServerProcess(onnx_examples(tmp_path), options=options, program=IN_400_MIB) as server:
        with Scraper(server.metrics) as scraper:
            assert scraper.now().value("headrace_admitted_bytes_limit") == admitted
        assert server.stop() == 0
        lines = [line for line in server.log.splitlines(True) if "limits by" in line]
        assert len(lines) == bool(said)
        assert not said or f"limits by 400 MiB of memory: {said}" in lines[0]
