"""Links of pages to files outside of docs/, which a site does not have.

They lead below `HEADRACE_SOURCE_URL`, where the sources can be read, as those of the package's
README do (see hatch_build.py); without it only their texts are kept.
"""

import os
import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((\.\./[^()\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of one page; the hook's name and arguments are those of mkdocs."""
    base = os.environ.get("HEADRACE_SOURCE_URL", "").rstrip("/")
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith("../"):
            return link[0]
        return f"[{link[1]}]({base}/{target[3:]})" if base else link[1]

    return _LINK.sub(rewritten, markdown)
