"""The name of the model in the JSON of an answer that is passed on otherwise as it came."""

import re

import orjson

from headrace.core.tensors import Buffer

# A text that does not end is a token, too: otherwise each quote in it would be tried as its end.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_KEY = b'"model_name"'
_BETWEEN = re.compile(rb"\s*:\s*")


def with_model_name(document: Buffer, name: str) -> bytes:
    """A JSON document, whose value under `model_name` at its top is another text.

    One without such a text, or that is no JSON, stays as it is. Nothing else is read.
    """
    data = bytes(document)
    depth = 0
    for token in _TOKEN.finditer(data):
        text = token[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and text == _KEY and (between := _BETWEEN.match(data, token.end())):
            value = _TOKEN.match(data, between.end())
            if value is None or not value[0].startswith(b'"') or value.end() == len(data):
                return data
            return data[: value.start()] + orjson.dumps(name) + data[value.end() :]
    return data
