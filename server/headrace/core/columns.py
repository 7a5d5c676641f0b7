"""Names of the columns of a model's matrix inputs, as clients find them.

A model's configuration has them in the parameter `columns`, its metadata in the property of that
name: a JSON object of the names by input, in the order of training. Clients put the columns of
tables into that order, as the server does with those of Arrow.
"""

import json
from collections.abc import Mapping, Sequence

COLUMNS = "columns"


def columns_text(columns: Mapping[str, Sequence[str]]) -> str:
    """The text of the parameter."""
    return json.dumps({name: list(names) for name, names in columns.items()}, ensure_ascii=False)


def columns_by_input(text: str) -> dict[str, tuple[str, ...]]:
    """The names by input; none if the text has another form, such as a model's own parameter."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(found, dict) or not all(map(_are_names, found.values())):
        return {}
    return {name: tuple(names) for name, names in found.items()}


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
