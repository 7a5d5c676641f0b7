"""Text in, a number and a word out, many rows at once."""

from typing import NamedTuple

import numpy as np

from headrace import Float32, InvalidInput, N, Strings, model


class Sentiment(NamedTuple):
    score: Float32[N]
    label: Strings[N]
    calls: Float32[N]


CALLS = 0


@model(max_batch_size=64)
def sentiment(text: Strings[N], bias: Float32[N] | None = None) -> Sentiment:
    global CALLS
    CALLS += 1
    if "" in text.tolist():
        raise InvalidInput("text is empty")
    if "boom" in text.tolist():
        raise RuntimeError("boom")
    score = np.array([one.count("good") - one.count("bad") for one in text], np.float32)
    if bias is not None:
        score += bias
    label = np.where(score < 0, "negative", "positive")
    return Sentiment(score, label, np.full(len(text), CALLS, np.float32))
