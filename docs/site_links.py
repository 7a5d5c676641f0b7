"""Pages from outside of docs/ on the site, and links to the files around it.

Links to other files lead below `HEADRACE_SOURCE_URL`, where the sources can be read, as those of
the package's README do (see hatch_build.py); without it only their texts are kept.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^()#\s]+)(#[^()\s]*)?\)")
_ROOT = Path(__file__).parents[1]
# By their paths in the repository, the names of these pages on the site.
_PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
    "deploy/README.md": "deployment.md",
}
_SOURCES = {page: source for source, page in _PAGES.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages; the names and arguments of hooks are those of mkdocs."""
    for source, page in _PAGES.items():
        text = (_ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of one page."""
    base = os.environ.get("HEADRACE_SOURCE_URL", "").rstrip("/")
    own = page.file.src_uri
    folder = posixpath.dirname(_SOURCES.get(own, f"docs/{own}"))

    def rewritten(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (_ROOT / path).exists():  # code that looks like a link
            return link[0]
        if path not in _PAGES and not path.startswith("docs/"):
            return f"[{text}]({base}/{path}{anchor})" if base else text
        site = _PAGES.get(path, path.removeprefix("docs/"))
        return f"[{text}]({posixpath.relpath(site, posixpath.dirname(own) or '.')}{anchor})"

    return _LINK.sub(rewritten, markdown)
