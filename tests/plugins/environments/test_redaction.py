"""What is left of texts with URLs in them."""

import pytest

from headrace.plugins.environments.requirements import redact


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
def test_what_is_shown(text: str, shown: str) -> None:
    assert redact(text) == shown
