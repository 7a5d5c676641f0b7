"""The error tree in the code equals the one drawn in the module's docstring."""

import re

import pytest

from headrace.core import errors
from headrace.core.errors import NotFound, RepositoryError, ServerError, Unavailable


def drawn() -> dict[str, str]:
    """Each drawn class with its base: the next one further left."""
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        for match in re.finditer(r"^\w+(?= ─┬)|(?<=─ )\w+", line):
            while path and path[-1][0] >= match.start():
                path.pop()
            if path:
                parents[match[0]] = path[-1][1]
            path.append((match.start(), match[0]))
    return parents


def built(base: type[Exception]) -> dict[str, str]:
    parents: dict[str, str] = {}
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            parents |= {child.__name__: base.__name__} | built(child)
    return parents


def test_the_drawn_tree_is_the_built_one() -> None:
    assert drawn() == built(ServerError) | built(RepositoryError)


def test_an_error_of_several_requests_has_the_time_of_each() -> None:
    error = Unavailable("why", retry_after=7)
    first = error.of_request(1, 2, 3)
    second = error.of_request(4, 5, 6)
    assert first is error
    assert (first.spent, second.spent) == ((1, 2, 3), (4, 5, 6))
    assert (type(second), str(second), second.retry_after) == (Unavailable, "why", 7)


def test_an_error_that_is_kept_has_no_frames() -> None:
    def refuse() -> None:
        try:
            raise NotFound("inner")
        except NotFound:
            raise Unavailable("why") from None

    with pytest.raises(Unavailable) as caught:
        refuse()
    error = caught.value.without_frames()
    assert error is caught.value
    assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)


@pytest.mark.parametrize("name", drawn())
def test_every_error_class_documents_when_it_is_raised(name: str) -> None:
    assert vars(errors)[name].__doc__
