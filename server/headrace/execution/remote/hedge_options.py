"""What a configuration's parameters say about calls that are made a second time."""

from collections.abc import Mapping

from headrace.core.errors import InvalidOption
from headrace.scheduling.hedging import HedgeRules

_LONGEST_SECS = 3600.0


def hedge_rules(parameters: Mapping[str, str]) -> HedgeRules | None:
    """When a second server is asked, None for never; raises `InvalidOption`."""
    text = parameters.get("hedge_after", "")
    given = parameters.get("hedge_percent", "10")
    try:
        percent = float(given)
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise _wrong("hedge_percent", f"expected more than 0 and at most 100, got {given!r}")
    if not text:
        return None
    try:
        if text.startswith("p"):
            quantile = float(text[1:]) / 100
            if 0.5 <= quantile <= 0.999:
                return HedgeRules(quantile=quantile, share=percent / 100)
        elif 0 < (seconds := float(text)) <= _LONGEST_SECS:
            return HedgeRules(seconds=seconds, share=percent / 100)
    except ValueError:
        pass
    raise _wrong(
        "hedge_after",
        f"expected a quantile from p50 to p99.9, or seconds above 0, at most an hour, got {text!r}",
    )


def _wrong(name: str, text: str) -> InvalidOption:
    return InvalidOption(f"parameters['{name}']", text)
