"""Scrapes of the metrics port, and waiting for a value."""

import re
import time
from collections.abc import Callable

import httpx

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_POLL_SECS = 0.002
_LONGEST_POLL_SECS = 0.05


class Metrics:
    """Samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every sample of this name."""
        lines = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", self.text, re.MULTILINE)
        return [(dict(_LABEL.findall(labels)), float(value)) for labels, value in lines]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels; at least one must exist."""
        found = [value for own, value in self.samples(name) if labels.items() <= own.items()]
        assert found, f"no sample {name} with {labels}"
        return sum(found)


class Scraper:
    """Reads the metrics of one server, as the client with a key if there is one."""

    def __init__(self, address: str, key: str = "") -> None:
        self._http = httpx.Client(
            base_url=f"http://{address}", timeout=60, trust_env=False,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=False,  # to read certificates takes 20 ms
        )  # fmt: skip

    def __enter__(self) -> "Scraper":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def now(self) -> Metrics:
        """One scrape."""
        response = self._http.get("/metrics")
        assert response.status_code == 200
        return Metrics(response.text)

    def until_queued(self, model: str, count: int) -> None:
        """Wait until `count` requests to `model` are queued and not started."""
        until(
            lambda: self.now().value("nv_inference_pending_request_count", model=model) == count,
            f"{count} requests waiting for {model}",
        )

    def until_running(self, model: str, others: int = 0) -> None:
        """Wait until a request to `model` runs, while `others` further requests are in flight.

        It has been admitted and is not queued. Two scrapes must agree, because a request is
        decoded between admission and the queue.
        """

        def running() -> bool:
            metrics = self.now()
            admitted = metrics.value("headrace_admitted_requests")
            queued = metrics.value("nv_inference_pending_request_count", model=model)
            return admitted == others + 1 and queued == 0

        until(lambda: running() and running(), f"a request running in {model}")

    def until_reached(self, model: str, servers: int) -> None:
        """Wait until `count` upstreams of `model` receive calls: it is ready with the first."""

        def reached() -> bool:
            return self.now().value("headrace_endpoint_healthy", model=model) == servers

        until(reached, f"{servers} servers of {model}")

    def until_idle(self) -> None:
        """Wait until no request is in flight."""
        until(lambda: self.now().value("headrace_admitted_requests") == 0, "an idle server")


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait for a condition of another process; fails after a time limit."""
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        assert waited < seconds, f"waited {seconds} s in vain for {what}"
        time.sleep(pause(waited))


def pause(waited: float) -> float:
    """Seconds until the next check: a check costs the server time on a core that it may need."""
    return min(max(waited / 4, _POLL_SECS), _LONGEST_POLL_SECS)
