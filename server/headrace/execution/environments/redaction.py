"""What may be shown of texts that hold URLs: no passwords, no tokens."""

import re

_USER = re.compile(r"(://)[^/\s]*@")
_QUERY = re.compile(r"(\w://[^\s?#]*\?)[^\s#'\")>]+")


def redact(text: str) -> str:
    """`text` without what stands before the host of a URL, or after its question mark."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))
