"""Files that commands change while others may read them."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

_NEW = 0o644


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as a whole, so that no server reads half of it; raises `OSError`.

    It keeps its owner and permissions. Of a symbolic link, the file that it leads to is replaced.
    """
    path = path.resolve()
    known = path.stat() if path.exists() else None
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as written:
        try:
            written.write(content)
            written.flush()
            os.fsync(written.fileno())
            os.fchmod(written.fileno(), known.st_mode & 0o777 if known else _NEW)
            if known:
                with suppress(PermissionError):  # another's file then becomes this user's
                    os.fchown(written.fileno(), known.st_uid, known.st_gid)
            os.replace(written.name, path)
        except BaseException:
            os.unlink(written.name)
            raise
