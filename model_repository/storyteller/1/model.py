"""A story word by word, each chosen by the two before it from the text of `corpus.txt`."""

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace import InvalidInput, model

ENDS = (".", "!", "?")


class Told(NamedTuple):
    """One response of a stream."""

    text_output: str


@model
class Storyteller:
    """A Markov chain of second order over words."""

    def load(self) -> None:
        """Read the corpus."""
        self.after: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        self.beginnings: list[tuple[str, str]] = []
        for line in Path(__file__).with_name("corpus.txt").read_text("utf-8").splitlines():
            words = line.split()
            self.beginnings.append((words[0], words[1]))
            for first, second, third in zip(words, words[1:], words[2:], strict=False):
                self.after[first, second].append(third)

    def predict(self, text_input: str, max_tokens: int = 30, seed: int = 1) -> Iterator[Told]:
        """Yield the words that follow the last two of `text_input`."""
        if max_tokens < 1:
            raise InvalidInput(f"max_tokens must be at least 1, got {max_tokens}")
        chance = random.Random(seed)
        words = text_input.split()
        for _ in range(max_tokens):
            word = self.next_word(words, chance)
            words.append(word)
            yield Told(word if word in (*ENDS, ",") else f" {word}")

    def next_word(self, words: list[str], chance: random.Random) -> str:
        """A word that follows `words` in the corpus, or else the first of a sentence."""
        following = self.after.get((words[-2], words[-1])) if len(words) > 1 else None
        if following:
            return chance.choice(following)
        beginning = chance.choice(self.beginnings)
        # After the first word of a sentence comes its second one.
        seconds = [second for first, second in self.beginnings if words[-1:] == [first]]
        return chance.choice(seconds) if seconds else beginning[0]
