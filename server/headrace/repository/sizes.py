"""How large models are on disk. It reads directories, and is for threads that may wait."""

import os
from pathlib import Path

from headrace.repository.layout import ModelSource


def largest_version(source: ModelSource) -> int:
    """Bytes of the files of a model's largest version; what has gone meanwhile counts nothing."""
    if source.file is not None:
        return _file_size(source.file)
    sizes = [
        sum(_file_size(Path(top, name)) for top, _, names in os.walk(path) for name in names)
        for path in (source.path / str(number) for number in source.versions)
    ]
    return max(sizes, default=0)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # loading tells of it
        return 0
