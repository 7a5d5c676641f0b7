"""docs/protocol.md names every route and procedure, and existing tests for its claims."""

import re
from itertools import pairwise, product
from pathlib import Path

import pytest

from headrace.api.operations import Route
from headrace.engine.documents import EXTENSIONS
from headrace.protocol.pb import POOL
from tests.contract.routes import ROUTES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")
SECTIONS = {
    head: text for head, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
WITHOUT_TESTS = {"Not offered", "Deliberate differences from Triton"}
NAMES = {"NAME": "{name}", "V": "{version}", "REGION": "{region}"}
SERVICES = (
    "inference.GRPCInferenceService", "headrace.v1.TrafficService", "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
)  # fmt: skip


def tables(text: str) -> list[list[list[str]]]:
    """Tables of a text, each with its head, as cells."""
    found: list[list[list[str]]] = []
    lines = ["", *text.splitlines()]
    for before, line in pairwise(lines):
        if not line.startswith("|"):
            continue
        if not before.startswith("|"):
            found.append([])
        if not line.startswith("| ---"):
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def rows(section: str) -> list[list[str]]:
    return [row for table in tables(SECTIONS[section]) for row in table[1:]]


def test_every_named_test_exists() -> None:
    for path, name in TEST.findall(PAGE):
        file = ROOT / "tests" / path
        assert file.is_file(), path
        assert not name or f"def {name}(" in file.read_text(encoding="utf-8"), f"{path}::{name}"


@pytest.mark.parametrize("section", sorted(SECTIONS.keys() - WITHOUT_TESTS))
def test_every_claim_has_a_test(section: str) -> None:
    for table in tables(SECTIONS[section]):
        assert table[0][-1] == "test"
        for row in table[1:]:
            assert len(row) == len(table[0]), row
            assert TEST.search(row[-1]), row


@pytest.mark.parametrize("section", SECTIONS)
def test_no_row_is_repeated(section: str) -> None:
    first = [row[0] for row in rows(section)]
    assert len(set(first)) == len(first)


def test_every_route_is_named() -> None:
    named = set()
    for row in rows("Operations"):
        for methods, path in re.findall(r"`([A-Z, ]+) (/\S+)`", row[1]):
            for method, target in product(methods.split(", "), Route("", path, "").forms):
                parts = [NAMES.get(part, part) for part in target.split("/")]
                named.add((method.lower(), "/".join(parts)))
    assert named == ROUTES


def test_every_procedure_is_named() -> None:
    named = {row[0]: row[2] for row in rows("Operations")}
    for service in SERVICES:
        for method in POOL.FindServiceByName(service).methods:
            assert f"`{service}`" in named[f"`{method.name}`"], method.full_name


def test_every_extension_is_named() -> None:
    assert [row[0].strip("`") for row in rows("Extensions")] == list(EXTENSIONS)


def test_links_lead_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", PAGE):
        page = (ROOT / "docs" / target).read_text(encoding="utf-8") if target else PAGE
        anchors = {
            re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-")
            for head in re.findall(r"^#+ (.+)$", page, re.M)
        }
        assert not anchor or anchor in anchors, (target, anchor)
