"""A data frame in, a data frame out, with values that may be missing."""

from __future__ import annotations

from typing import TypedDict

from headrace import Frame, model


class Person(TypedDict):
    name: str
    age: int | None


class Judged(TypedDict):
    name: str
    next: int | None
    adult: bool


@model(max_batch_size=64)
def people(frame: Frame[Person]) -> Frame[Judged]:
    frame["next"] = frame["age"] + 1
    frame["adult"] = (frame["age"] >= 18).fillna(False)
    return frame
