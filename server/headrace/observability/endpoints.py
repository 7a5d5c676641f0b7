"""The servers that run a model elsewhere, as a scrape sees them."""

from dataclasses import dataclass


@dataclass(slots=True)
class EndpointCounts:
    """What has become of one server of a version.

    `requests` counts the calls that it was sent, each with a batch, `failures` those of them that
    it has not answered as a healthy server does, `ejections` how often it was left out for those.
    """

    requests: int = 0
    failures: int = 0
    ejections: int = 0


@dataclass(slots=True)
class EndpointSeries:
    """A server as it is now.

    `outstanding` calls are under way, `serves` is whether it gets any. `sequences` have their state
    there; None for a model without sequences. In `differences` ways it has the model otherwise than
    was asked for.
    """

    name: str
    counts: EndpointCounts
    outstanding: int = 0
    serves: bool = False
    sequences: int | None = None
    differences: int = 0
