"""The model `reviews`: sentiment of short English reviews, with a scikit-learn pipeline.

The training texts are made here, from words of praise and blame in plain sentences, also negated.
The held-out reviews below were written by hand, and none of them was used for training.
"""

from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from scripts.models.artefact_file import run, save_skops

FILE = "model.skops"
POSITIVE, NEGATIVE = "positive", "negative"
GOOD = """
    amazing awesome beautiful best brilliant calm charming cheerful clean clever comfortable cozy
    delicious delightful easy elegant enjoyable excellent exciting fair fantastic fast fine fresh
    friendly fun funny generous gorgeous great good happy helpful honest impressive incredible
    inspiring kind lovely marvellous neat nice outstanding perfect pleasant polite quick reliable
    smart smooth sturdy stunning superb sweet tasty terrific thoughtful useful warm wonderful
""".split()  # noqa: SIM905
BAD = """
    annoying awful bad bland boring broken cheap clumsy cold confusing cramped damaged defective
    dirty disappointing disgusting dreadful dull expensive faulty filthy flimsy frustrating greasy
    gross horrible lazy loud messy misleading nasty noisy overpriced pathetic painful poor
    pointless predictable rude rubbish sad shoddy slow sloppy smelly stale stupid tasteless terrible
    tedious ugly uncomfortable unfriendly unhelpful unpleasant unreliable useless weak worst wrong
""".split()  # noqa: SIM905
LIKED = "love loved enjoy enjoyed recommend like liked adore appreciate".split()  # noqa: SIM905
LOATHED = "hate hated regret regretted dislike disliked despise avoid returned".split()  # noqa: SIM905
THINGS = "food film book room service phone staff plot battery place meal story".split()  # noqa: SIM905
PLAIN = [
    "{}",
    "it was {}",
    "the {thing} is {}",
    "the {thing} was very {}",
    "really {} {thing}",
    "what a {} {thing}",
    "i found the {thing} {}",
    "such a {} {thing} overall",
]
TURNED = ["not {}", "the {thing} is not {}", "it was not very {}", "never {}"]
FELT = ["i {} it", "we {} the {thing}", "i really {} this {thing}"]
UNFELT = ["i did not {} it", "i don't {} it", "we would not {} this", "i don't {} the {thing}"]

HELD_OUT = {
    POSITIVE: [
        "A wonderful evening, and the staff could not have been more helpful.",
        "Great phone, the battery lasts for days.",
        "I loved every page of this book.",
        "The room was clean and the bed very comfortable.",
        "Delicious soup and friendly waiters.",
        "We enjoyed the film from start to finish.",
        "Fast delivery, and it works perfectly. I recommend it.",
        "What a beautiful little town!",
        "The plot is clever and the actors are brilliant.",
        "Not bad at all.",
        "Easy to set up and really useful.",
        "My daughter likes it, and the price is fair.",
        "The best coffee in town.",
        "A charming and funny story.",
        "Excellent service, we will come again.",
    ],
    NEGATIVE: [
        "The food was cold and the waiter rude.",
        "I hated the ending, and the rest was boring.",
        "It arrived broken and nobody answered my letters.",
        "A terrible film, we left after an hour.",
        "The room was dirty and smelly, and far too expensive.",
        "Not worth the money, the sound is awful.",
        "I regret buying this phone, the battery is useless.",
        "Slow service and stale bread.",
        "The instructions are confusing and partly wrong.",
        "Disappointing: the plot is dull and predictable.",
        "It was not good.",
        "Noisy neighbours and an uncomfortable bed.",
        "A cheap and flimsy case that broke at once.",
        "The worst holiday we have ever had.",
        "I would not recommend this place to anybody.",
    ],
}


def build(repository: Path) -> None:
    texts, labels = _corpus()
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, max_features=1200),
        LogisticRegression(C=10.0, solver="newton-cholesky", tol=1e-10),
    )
    model.fit(texts, labels)
    vars(model[0]).pop("_stop_words_id", None)  # a memory address, useless once fitted
    save_skops(repository / "reviews" / "1" / FILE, model)


def held_out() -> tuple[np.ndarray, list[str]]:
    """Reviews, object[n, 1] of `str`, and their labels."""
    pairs = [(text, label) for label, texts in HELD_OUT.items() for text in texts]
    return np.array([[text] for text, _ in pairs], object), [label for _, label in pairs]


def probes() -> dict[str, dict[str, np.ndarray]]:
    """Inputs on which two builds of a model can be compared, by model name."""
    return {"reviews": {"text": held_out()[0]}}


def report(repository: Path) -> list[str]:
    """The held-out accuracy."""
    texts, labels = held_out()
    found = run(repository / "reviews" / "1" / FILE, {"text": texts})["predict"][:, 0]
    hits, count = int((found == np.array(labels, object)).sum()), len(labels)
    return [f"reviews: {hits} of {count} held-out reviews, {hits / count:.2%}"]


def _corpus() -> tuple[list[str], list[str]]:
    texts: list[str] = []
    labels: list[str] = []
    groups = (
        (GOOD, PLAIN, POSITIVE), (BAD, PLAIN, NEGATIVE), (GOOD, TURNED, NEGATIVE),
        (BAD, TURNED, POSITIVE), (LIKED, FELT, POSITIVE), (LOATHED, FELT, NEGATIVE),
        (LIKED, UNFELT, NEGATIVE), (LOATHED, UNFELT, POSITIVE),
    )  # fmt: skip
    for words, sentences, label in groups:
        for number, word in enumerate(words):
            for place, sentence in enumerate(sentences):
                thing = THINGS[(number + place) % len(THINGS)]
                texts.append(sentence.format(word, thing=thing))
                labels.append(label)
    return texts, labels
