"""Requirements from files and script blocks, the files that they name, and their identity."""

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


def test_lines_comments_and_continuations(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "# a comment \\\n\n  Foo_Bar >= 1.0,\\\n   < 2  # why\n\nurl-lib[x]\n"
        'a==1 ; python_version < "3.12"\nb @ https://host/b.whl#sha256=0\n'
        "c==1 --hash=sha256:00 \\\n --hash=sha256:11\ngit+https://host/d@v1\n${PIP_ONE}/e.whl",
    )
    assert found.wanted == (
        "Foo_Bar >= 1.0, < 2", "url-lib[x]", 'a==1 ; python_version < "3.12"',
        "b @ https://host/b.whl#sha256=0", "c==1 --hash=sha256:00 --hash=sha256:11",
        "git+https://host/d@v1", "${PIP_ONE}/e.whl",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("foo>=1\nb\n", "# text\nfoo>=1  # why\n\n b", True), ("a==1\n", "a==1.0\n", False),
        ("a\n", "a\n--no-index\n", False),
    ],
)  # fmt: skip
def test_identity_of_requirements(one: str, other: str, same: bool, tmp_path: Path) -> None:
    first, second = read(tmp_path / "1", one), read(tmp_path / "2", other)
    assert (first.identity == second.identity) is same


def test_files_that_include_one_another(tmp_path: Path) -> None:
    more = "b\n-r ../requirements.txt\n--constraint=limits.txt\n"
    files = {"sub__more.txt": more, "sub__limits.txt": "b<2\n"}
    found = read(tmp_path, "-r sub/more.txt\na\n", **files)
    assert (found.wanted, found.file) == (("b", "a"), tmp_path / "requirements.txt")
    files["sub__limits.txt"] = "b<3\n"
    assert read(tmp_path, "-r sub/more.txt\na\n", **files).identity != found.identity


def test_options(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "--no-index --require-hashes\n-i https://u:p@x/\n--extra-index-url=https://${PIP_KEY}@y/\n"
        "--only-binary=:all:\n-f wheels\n-f https://host/\n",
        wheels__a="1",
    )
    assert found.wanted == ()
    assert "wheels/a" in found.identity
    assert str(tmp_path) not in str(found.identity)


def test_files_of_the_model_are_identified_by_content(tmp_path: Path) -> None:
    text = "./w/a.whl[x] ; python_version > '3'\nb.whl\nc @ w/c.whl\n"
    files = {"w__a.whl": "1", "b.whl": "", "w__c.whl": ""}
    first, second = read(tmp_path / "1", text, **files), read(tmp_path / "2", text, **files)
    assert first.identity == second.identity
    assert first.folder != second.folder
    for name in files:
        changed = read(tmp_path / name, text, **files | {name: "2"})
        assert changed.identity != first.identity


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("../outside.whl", "requirements.txt: '../outside.whl' leads to no file in the model's"),
        ("/etc/passwd", "no file in"),
        ("link.whl", "no file in"),
        ("link.whl ; python_version > '3'", "no file in"),
        ("a @ file:///etc/passwd", "no file in"),
        ("file:///etc/passwd", "no file in"),
        ("git+file:///etc/repo", "no file in"),
        ("a@../outside.whl", "no file in"),
        ("a[x] @ outside.whl", "no file in"),
        ("unknown:../outside.whl", "no file in"),
        ("./good /../../outside.whl", "no file in"),
        ("./good[x]/../../outside.whl", "no file in"),
        ("./deep/../../outside.whl", "no file in"),
        ("./deep/../good", "no file in"),  # `..` behind a link
        ("${HOME}/outside.whl", "no file in"),
        ("-r ../outside.whl", "no file in"),
        ("-r ${HOME}/outside.whl", "no file in"),
        ('-r "../outside.whl"', "no file in"),
        ("--no-index -c /etc/passwd", "no file in"),
        ("-r https://host/r.txt", "no file in"),
        ("-f ..", "no file in"),
        ("-f file:///etc", "no file in"),
        ("-f bad", "'link.whl' links out of the model's directory"),
        ("a --hash=sha256:00 -r ../outside.whl", "options stand on lines of their own"),
        ("-i /etc", "expected a URL"),
        ("--index-url", "expected a URL"),
        ("--extra-index-url=file:///etc", "expected a URL"),
        ("-e .", "option -e is not taken from a model"),
        ("-rgood", "option -rgood is not taken from a model"),
        ("--no-index ./good", "option ./good is not taken from a model"),
        (".", "'.' is a directory; expected a wheel or archive"),
        ("./bad", "'./bad' is a directory; expected a wheel or archive"),
        ("-r bad", "bad: it cannot be read: Is a directory"),
        ("-r binary", "binary: it cannot be read: it is not UTF-8"),
    ],
)
def test_refused_requirements(line: str, says: str, tmp_path: Path) -> None:
    root = tmp_path / "model"
    (root / "bad" / "below").mkdir(parents=True)
    (tmp_path / "outside.whl").write_text("")
    for link in (root / "link.whl", root / "bad" / "link.whl"):
        link.symlink_to(tmp_path / "outside.whl")
    (root / "deep").symlink_to("bad/below")
    (root / "binary").write_bytes(b"\xff")
    with pytest.raises(LoadFailed) as caught:
        read(root, line, good="", bad__good="")
    assert says in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_file_that_links_out_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("a")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "requirements.txt").symlink_to("../r.txt")
    with pytest.raises(LoadFailed, match=r"^requirements\.txt leads to no file in the model's"):
        read_requirements(tmp_path / "model" / "requirements.txt", tmp_path / "model")


def test_a_list_of_dependencies(tmp_path: Path) -> None:
    assert from_dependencies(["A  >=1", "b"], tmp_path).wanted == ("A >=1", "b")
    for bad in ("-r x", "--pre", "-e .", "a\n--pre", "../a.whl"):
        with pytest.raises(LoadFailed, match=r"^the script block's '"):
            from_dependencies([bad], tmp_path)


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
