"""The script block of a Python file."""

import pytest

from headrace.plugins.environments.requirements import ScriptBlock, read_script_block

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


def test_a_whole_block() -> None:
    assert read_script_block(WHOLE) == ScriptBlock(("scikit-learn==1.6.*", "rich"), ">=3.11")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import numpy\n",
        "# /// script\n# dependencies = ['a']\nimport a\n# ///\n",  # without an end
        "# /// script\n#dependencies = ['a']\n# ///\n",  # a line that is not of the form
        " # /// script\n # ///\n",
        "# /// other\n# dependencies = ['a']\n# ///\n",
    ],
)
def test_there_is_none(text: str) -> None:
    assert read_script_block(text) is None


def test_an_empty_block_asks_for_nothing() -> None:
    assert read_script_block("# /// script\n# ///\n") == ScriptBlock()


def test_the_last_end_of_a_run_of_comments_counts() -> None:
    text = '# /// script\n# dependencies = ["a", """\n# ///\n# """]\n# ///\n# more\n'
    assert read_script_block(text) == ScriptBlock(("a", "///\n"))


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
def test_a_block_that_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_script_block(text)
