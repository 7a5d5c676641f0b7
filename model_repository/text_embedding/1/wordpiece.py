"""WordPiece tokenizer of BERT's uncased models."""

import re
from collections.abc import Iterator
from itertools import chain, islice
from string import punctuation
from unicodedata import category, normalize

LONGEST_WORD = 100  # in characters; a longer word is unknown as a whole
LEFT_OUT = {"Mn", "Cc", "Cf", "Co"}  # accents, and invisible characters
IDEOGRAPH = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)


class WordPiece:
    """Token ids of a text, by a vocabulary in the order of ids."""

    def __init__(self, vocabulary: list[str]) -> None:
        self.numbers = {piece: number for number, piece in enumerate(vocabulary)}
        self.begin, self.end = self.numbers["[CLS]"], self.numbers["[SEP]"]
        self.unknown = self.numbers["[UNK]"]

    def __call__(self, text: str, limit: int) -> list[int]:
        """At most `limit` ids, including those of start and end; further ones are left out."""
        pieces = chain.from_iterable(map(self.pieces, words(text)))
        return [self.begin, *islice(pieces, limit - 2), self.end]

    def pieces(self, word: str) -> list[int]:
        """The longest known prefix of the word, then that of its rest, and so on."""
        if len(word) > LONGEST_WORD:
            return [self.unknown]
        numbers: list[int] = []
        start = 0
        while start < len(word):
            for end in range(len(word), start, -1):
                number = self.numbers.get(("##" if start else "") + word[start:end])
                if number is not None:
                    break
            else:
                return [self.unknown]
            numbers.append(number)
            start = end
        return numbers


def words(text: str) -> Iterator[str]:
    """Words in lower case without accents; each punctuation mark and ideograph is a word."""
    for chunk in re.finditer(r"\S+", text):
        word: list[str] = []
        for character in normalize("NFD", chunk[0]):
            kind = category(character)
            if kind in LEFT_OUT or character == "\ufffd":
                continue
            if kind[0] == "P" or character in punctuation or IDEOGRAPH.match(character):
                if word:
                    yield "".join(word)
                    word.clear()
                yield character
            else:
                word.append(character.lower())
        if word:
            yield "".join(word)
