"""Which metrics of latencies there are, as `--metrics-config` says."""

from collections.abc import Sequence
from dataclasses import dataclass

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_TRUE, _FALSE = ("true", "1"), ("false", "0")


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """`counters` of microseconds, `histograms` and `summaries` under Triton's names.

    `quantiles` are those of the summaries.
    """

    counters: bool = True
    histograms: bool = False
    summaries: bool = False
    quantiles: tuple[float, ...] = QUANTILES

    @classmethod
    def of(cls, texts: Sequence[str]) -> "MetricsOptions":
        """From texts such as `summary_latencies=true`; raises `ValueError`.

        Of the quantiles, `0.5:0.05` with its error, as Triton has it, is also understood: quantiles
        are exact here.
        """
        found: dict[str, str] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if name not in _NAMES or not equals:
                raise ValueError(
                    f"expected NAME=VALUE with one of {', '.join(_NAMES)}, got {text!r}"
                )
            found[name] = value
        default = cls()
        return cls(
            _flag(found, "counter_latencies", default.counters),
            _flag(found, "histogram_latencies", default.histograms),
            _flag(found, "summary_latencies", default.summaries),
            _quantiles(found["summary_quantiles"]) if "summary_quantiles" in found else QUANTILES,
        )


_NAMES = ("counter_latencies", "histogram_latencies", "summary_latencies", "summary_quantiles")


def _flag(found: dict[str, str], name: str, default: bool) -> bool:
    if name not in found:
        return default
    text = found[name].lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"{name} must be true or false, got {found[name]!r}")
    return text in _TRUE


def _quantiles(text: str) -> tuple[float, ...]:
    quantiles = []
    for part in text.split(","):
        quantile, colon, error = part.partition(":")
        try:
            numbers = [float(quantile), *([float(error)] if colon else [])]
        except ValueError:
            numbers = [-1.0]
        if not all(0 <= number <= 1 for number in numbers):
            raise ValueError(
                f"summary_quantiles must be numbers from 0 to 1, such as 0.5:0.05,0.99:0.001,"
                f" got {text!r}"
            )
        quantiles.append(numbers[0])
    return tuple(quantiles)
