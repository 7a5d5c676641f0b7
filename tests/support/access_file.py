"""Access files of servers whose clients have keys."""

import json
from collections.abc import Sequence

from headrace.plugins.access.keys import NewKey


def known_client(
    name: str, key: NewKey, may: Sequence[str] = ("*",), models: Sequence[str] = (), role: str = ""
) -> str:
    """Tables of a client with this key, and of its role; without `models` it is for all."""
    role = role or name
    lines = [
        f"[roles.{role}]", f"may = {json.dumps([*may])}",
        *([f"models = {json.dumps([*models])}"] if models else []),
        f"[keys.{name}]", f'hash = "{key.hash}"', f'roles = ["{role}"]',
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
