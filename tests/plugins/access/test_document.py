"""TOML documents with lines, and sections whose errors name file and line."""

from datetime import UTC, datetime
from math import inf
from pathlib import Path

import pytest

from headrace.plugins.access.document import InvalidAccess, Section, lines_of

PATH = Path("access.toml")
DOCUMENT = '''# a comment [roles.no]
top = "a # b"

[roles.scorer]  # [x]
may = [
  "infer",  # ] "
  "read",
]
models = """
[roles.neither]
a = 1\\"""" # text

[roles."with.dot"]
may = 'x'
[[peers]]
user = 1
[[peers]]
user = { name = "a", b = [1,
  2] }
below.it = 1
[peers.more]
last = 1
'''


def test_lines_of_tables_and_members() -> None:
    found = lines_of(DOCUMENT)
    expected = {
        ("top",): 2, ("roles",): 4, ("roles", "scorer"): 4, ("roles", "scorer", "may"): 5,
        ("roles", "scorer", "models"): 9, ("roles", "with.dot"): 13,
        ("roles", "with.dot", "may"): 14, ("peers",): 15, ("peers", 0): 15,
        ("peers", 0, "user"): 16, ("peers", 1): 17, ("peers", 1, "user"): 18,
        ("peers", 1, "below"): 20, ("peers", 1, "below", "it"): 20,
        ("peers", 1, "more"): 21, ("peers", 1, "more", "last"): 22,
    }  # fmt: skip
    assert found == expected


@pytest.mark.parametrize("text", ["", "\n\n", "# only", "a=1", "a=1\r\nb=2\r\n", "a = '''x'''''"])
def test_small_documents_have_lines(text: str) -> None:
    assert set(lines_of(text)) == {(name,) for name in Section.of(PATH, text).members()}


@pytest.mark.parametrize(("text", "problem"), [
    ("a = 1\nb = \n", r"access\.toml:2: Invalid value"),
    ("a = 1\na = 2", r"access\.toml:2: Cannot overwrite a value"),
    ("a = [1,", r"access\.toml:1: "),
    ("a = " + "[" * 100_000, r"access\.toml:1: values are nested too deeply"),
])  # fmt: skip
def test_syntax_errors_have_lines(text: str, problem: str) -> None:
    with pytest.raises(InvalidAccess, match=problem):
        Section.of(PATH, text)


def test_members_have_types() -> None:
    text = """
        text = "a"
        list = ["a", "b"]
        number = 5
        day = 2027-01-31
        local = 2027-01-31T01:00:00
        zoned = 2027-01-31T01:00:00+01:00
    """
    section = Section.of(PATH, text)
    assert section.text("text") == "a"
    assert section.text("other", "b") == "b"
    assert section.texts("text") == ("a",)
    assert section.texts("list") == ("a", "b")
    assert section.number("number", 1) == 5
    day = datetime(2027, 1, 31, tzinfo=UTC).timestamp()
    assert section.moment("day", inf) == day
    assert section.moment("local", inf) == day + 3600
    assert section.moment("zoned", inf) == day
    assert section.moment("never", inf) == inf
    section.end()


@pytest.mark.parametrize(("text", "problem"), [
    ("\na = 5", r"access\.toml:2: 'a' must be a text"),
    ("\n\na = ''", r"access\.toml:3: 'a' must not be empty"),
    ("b = 'x'", r"access\.toml:1: 'a' is missing, expected a text"),
    ("a = 'x'\nb = 'x'", r"access\.toml:2: unknown member 'b', expected one of a"),
])  # fmt: skip
def test_mistakes_have_lines(text: str, problem: str) -> None:
    def read(section: Section) -> None:
        section.text("a")
        section.end()

    with pytest.raises(InvalidAccess, match=problem):
        read(Section.of(PATH, text))


@pytest.mark.parametrize(("text", "problem"), [
    ("a = true", "'a' must be a whole number"),
    ("a = -1", "'a' must be at least 0"),
    ("a = 99999999999", "below 2147483648"),
])  # fmt: skip
def test_numbers_are_bounded(text: str, problem: str) -> None:
    with pytest.raises(InvalidAccess, match=problem):
        Section.of(PATH, text).number("a", 1)


@pytest.mark.parametrize("value", ["1.5", "'2027-01-31'", "07:32:00", "true"])
def test_moments_are_dates(value: str) -> None:
    with pytest.raises(InvalidAccess, match="'a' must be a date such as 2027-01-31"):
        Section.of(PATH, f"a = {value}").moment("a", inf)


@pytest.mark.parametrize("value", ["[1]", "['']", "{}", "5"])
def test_lists_of_texts(value: str) -> None:
    with pytest.raises(InvalidAccess, match="'a' must be a list of texts"):
        Section.of(PATH, f"a = {value}").texts("a")


@pytest.mark.parametrize("value", ["[1]", "{}", "5"])
def test_arrays_of_tables(value: str) -> None:
    with pytest.raises(InvalidAccess, match=r"'a' must be tables \[\[a\]\]"):
        list(Section.of(PATH, f"a = {value}").sections("a"))
