"""Requirements from files and script blocks, as passed to pip, and their identity."""

from pathlib import Path

import pytest

from headrace.core.errors import LoadFailed
from headrace.plugins.environments.requirements import (
    Requirements,
    ScriptBlock,
    from_dependencies,
    read_requirements,
    read_script_block,
    redact,
)


def read(root: Path, text: str, **files: str) -> Requirements:
    """Requirements of a model's file, with others beside it."""
    for name, content in {"requirements.txt": text, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return read_requirements(root / "requirements.txt", root)


def texts(requirements: Requirements) -> list[str]:
    return [line.text for line in requirements.lines]


def test_lines_comments_and_continuations(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "# a comment \\\n\n  Foo_Bar >= 1.0,\\\n   < 2  # why\n\nurl-lib[x]\n"
        'a==1 ; python_version < "3.12"\nb @ https://host/b.whl#sha256=0\n'
        "c==1 --hash=sha256:00 \\\n --hash=sha256:11\ngit+https://host/d@v1",
    )
    assert texts(found) == [
        "Foo_Bar >= 1.0, < 2", "url-lib[x]", 'a==1 ; python_version < "3.12"',
        "b @ https://host/b.whl#sha256=0", "c==1 --hash=sha256:00 --hash=sha256:11",
        "git+https://host/d@v1",
    ]  # fmt: skip
    assert len(found.wanted) == 6


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("foo-bar>=1,<2\nb\n", "# text\nb\nFoo.Bar >= 1, <2", True), ("a==1\n", "a==1.0\n", False),
        ("a\n", "a\n--pre\n", False), ("a\n-i https://x/\n", "a\n--index-url=https://x/\n", True),
        ("a\nb\n", "b\na\na\n", True),
    ],
)  # fmt: skip
def test_identity_of_requirements(one: str, other: str, same: bool, tmp_path: Path) -> None:
    first, second = read(tmp_path / "1", one), read(tmp_path / "2", other)
    assert (first.identity == second.identity) is same


def test_files_that_include_one_another(tmp_path: Path) -> None:
    more = "b\n-r ../requirements.txt\n-c limits.txt\n"
    found = read(
        tmp_path, "-r sub/more.txt\na\n", **{"sub__more.txt": more, "sub__limits.txt": "b<2\n"}
    )
    assert texts(found) == ["b", "a"]
    assert [line.text for line in found.constraints] == ["b<2"]


def test_options(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "--pre --no-index\n-ihttps://u:p@x/\n--extra-index-url https://y/\n"
        "--only-binary=:all:\n-f wheels\n",
        wheels__a="1",
    )
    assert texts(found) == [
        "--pre", "--no-index", "--index-url https://u:p@x/", "--extra-index-url https://y/",
        "--only-binary :all:", f"--find-links {tmp_path}/wheels",
    ]  # fmt: skip
    assert found.wanted == []
    assert str(tmp_path) not in str(found.identity)


def test_files_of_the_model_are_identified_by_content(tmp_path: Path) -> None:
    text = "./w/a.whl[x] ; python_version > '3'\nb.whl\nc @ file://{}/w/a.whl\n"
    found = []
    for name, content in (("1", "1"), ("2", "1"), ("3", "2")):
        root = tmp_path / name
        here = text.format(root)
        found.append(read(root, here, **{"w__a.whl": content, "b.whl": ""}))
    assert texts(found[0])[0] == f"{tmp_path}/1/w/a.whl[x] ; python_version > '3'"
    assert found[0].identity == found[1].identity != found[2].identity


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("../outside.whl", "requirements.txt:1: 'outside.whl' lies outside of the model's"),
        ("/etc/passwd", "'passwd' lies outside"),
        ("link.whl", "'link.whl' lies outside"),
        ("a @ file:///etc/passwd", "'passwd' lies outside"),
        ("file:///etc/passwd", "'passwd' lies outside"),
        ("git+file:///etc/repo", "'repo' lies outside"),
        ("a @ ../outside.whl", "'../outside.whl' is no URL"),
        ("-r ../outside.whl", "lies outside"),
        ("-c /etc/passwd", "lies outside"),
        ("-f ..", "lies outside"),
        ("-f bad", "'link.whl' links out of the model's directory"),
        ("-r https://host/r.txt", "is not followed"),
        ("-f file:///etc", "give its path"),
        ("-e .", "an editable requirement"),
        ("./bad", "'bad' is a directory; expected a wheel or archive"),
        ("--target=/x", "option --target is not taken from a model"),
        ("--index-url", "--index-url needs a value"),
        ("no.whl", "there is no file 'no.whl' in the model's directory"),
        ("two words", "'two words' is neither a requirement"),
        ("foo bar baz ===", "'foo bar baz ===' is neither a requirement, such as numpy>=2, nor"),
        ("./no words", "there is no file 'no words'"),
        ("-i 'x", "No closing quotation"),
    ],
)
def test_refused_requirements(line: str, says: str, tmp_path: Path) -> None:
    root = tmp_path / "model"
    (root / "bad").mkdir(parents=True)
    (tmp_path / "outside.whl").write_text("")
    for link in (root / "link.whl", root / "bad" / "link.whl"):
        link.symlink_to(tmp_path / "outside.whl")
    with pytest.raises(LoadFailed) as caught:
        read(root, line)
    assert says in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_file_that_links_out_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("a")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "requirements.txt").symlink_to("../r.txt")
    with pytest.raises(LoadFailed, match=r"requirements\.txt: it lies outside|r\.txt: it lies"):
        read_requirements(tmp_path / "model" / "requirements.txt", tmp_path / "model")


def test_a_list_of_dependencies(tmp_path: Path) -> None:
    found = from_dependencies(["A  >=1", "b"], tmp_path, "model.py")
    assert found.identity == [["a>=1", "b"], []]
    for bad in ("-r x", "--pre", "a\n--pre", "-e ."):
        with pytest.raises(LoadFailed, match=r"model\.py: .* is no requirement"):
            from_dependencies([bad], tmp_path, "model.py")


WHOLE = """\
#!/usr/bin/env python
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "scikit-learn==1.6.*",  # a comment
#
#   "rich",
# ]
# [tool.other]
# a = 1
# ///
import rich
"""


def test_a_whole_block_or_an_empty_one() -> None:
    assert read_script_block(WHOLE) == ScriptBlock(("scikit-learn==1.6.*", "rich"), ">=3.11")
    assert read_script_block("# /// script\n# ///\n") == ScriptBlock()
    # The last end of a run of comments counts.
    text = '# /// script\n# dependencies = ["a", """\n# ///\n# """]\n# ///\n# more\n'
    assert read_script_block(text) == ScriptBlock(("a", "///\n"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import numpy\n",
        "# /// script\n# dependencies = ['a']\nimport a\n# ///\n",  # unterminated
        "# /// script\n#dependencies = ['a']\n# ///\n",  # a line that is not of the form
        " # /// script\n # ///\n",
        "# /// other\n# dependencies = ['a']\n# ///\n",
    ],
)
def test_a_file_without_a_block(text: str) -> None:
    assert read_script_block(text) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# /// script\n# ///\n\n# /// script\n# ///\n", "more than one"),
        ("# /// script\n# dependencies = [\n# ///\n", "Invalid|Unclosed|array"),
        ("# /// script\n# dependencies = 'a'\n# ///\n", "must be a list of strings"),
        ("# /// script\n# dependencies = [1]\n# ///\n", "must be a list of strings"),
        ("# /// script\n# requires-python = 3.11\n# ///\n", "must be a string"),
    ],
)
def test_an_invalid_block(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_script_block(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nothing to hide @ all", "nothing to hide @ all"),
        ("--index-url https://me:secret@host/simple", "--index-url https://***@host/simple"),
        ("https://token@host/a, http://u:p@b", "https://***@host/a, http://***@b"),
        ("https://me:p@ss@host/x", "https://***@host/x"),
        ("git+https://host/a@v1.0", "git+https://host/a@v1.0"),
        ("git+ssh://git@host/a.git@v1", "git+ssh://***@host/a.git@v1"),
        ("x @ https://host/w.whl?sig=secret&e=1#sha256=ab", "x @ https://host/w.whl?***#sha256=ab"),
        ("(from https://host/?key=secret) next?", "(from https://host/?***) next?"),
    ],
)
def test_displayed_requirements(text: str, shown: str) -> None:
    assert redact(text) == shown
