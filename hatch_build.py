"""Metadata of the built package: README as an index shows it, the sources' address, own plugins.

`HEADRACE_SOURCE_URL` is where the files of the version that is built can be read, such as
`https://forge.example/headrace/blob/v0.1.0`: links of the README then lead there. Without it they
would lead nowhere on an index, so only their texts are kept.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^()\s]+)\)")


def readable_anywhere(text: str, url: str) -> str:
    """Markdown whose relative links lead below `url`, or are their texts alone if it is empty."""
    base = url.rstrip("/")
    return _RELATIVE.sub(
        lambda link: f"[{link[1]}]({base}/{link[2]})" if base else link[1],
        text,
    )


class PackageMetadata(MetadataHookInterface):
    """`readme`, `urls` and `entry-points` of `[project]`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what pyproject.toml names as dynamic; ends the build on an older Python.

        pip reads `requires-python` only afterwards, and the package cannot be imported there.
        """
        needed = tuple(map(int, metadata["requires-python"].lstrip(">=").split(".")))
        if sys.version_info < needed:
            running = ".".join(map(str, sys.version_info[:3]))
            sys.exit(
                f"headrace needs Python {'.'.join(map(str, needed))} or newer, this is {running}"
            )
        url = os.environ.get("HEADRACE_SOURCE_URL", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readable_anywhere(text, url),
        }
        pages = {"Source": "", "Documentation": "/docs", "Changelog": "/CHANGELOG.md"}
        metadata["urls"] = {name: f"{url}{page}" for name, page in pages.items() if url}
        sys.path.insert(0, str(Path(self.root) / "server"))
        from headrace.core.plugins import OWN

        metadata["entry-points"] = {group: dict(own) for group, own in OWN.items() if own}
