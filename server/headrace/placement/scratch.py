"""The private directory of a confined process, for its temporary files, measured and removed here.

What is measured are the blocks of files that have a name. A file that was removed while it is open
is limited only by the size that a file may have.
"""

import os
from contextlib import suppress
from threading import Thread

from headrace.core.kept_directory import KeptDirectory

_PREFIX = "headrace-scratch-"
_BLOCK = 512  # bytes, of `st_blocks` on any file system
_MOST_FILES = 100_000
_MOST_PATH = 2_000  # characters: longer ones could not be opened at some point


class Scratch:
    """A directory that one process may write to."""

    def __init__(self, uid: int | None, gid: int = -1) -> None:
        """Make a directory for a user, None for this process's own; raises `OSError`."""
        self._kept = KeptDirectory(_PREFIX)
        self.path = self._kept.path / "tmp"
        try:
            self.path.mkdir(mode=0o700)
            if uid is not None:
                os.chown(self.path, uid, gid)
                self._kept.path.chmod(0o711)
        except OSError:
            self._kept.close()
            raise

    def excess(self, most: int) -> str:
        """The limit that the files exceed, such as `most` bytes, after "has ..."; "" for none.

        Blocks, for up to a second.
        """
        files = nbytes = 0
        folders = [str(self.path)]
        while folders:
            try:
                with os.scandir(folders.pop()) as found:
                    for entry in found:
                        files += 1
                        with suppress(FileNotFoundError):
                            nbytes += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        if nbytes > most:
                            return f"has more than {most} bytes in its scratch directory"
                        if files > _MOST_FILES:
                            return f"has more than {_MOST_FILES} files in its scratch directory"
                        if len(entry.path) > _MOST_PATH:
                            return "has paths in its scratch directory that are too long"
            except FileNotFoundError:
                pass  # removed meanwhile
            except OSError as error:
                return f"hides a part of its scratch directory ({error.strerror})"
        return ""

    def remove(self) -> None:
        """Remove the directory on a thread, unless it is empty."""
        with suppress(OSError):
            self.path.rmdir()
            self._kept.close()
            return
        try:
            Thread(target=self._kept.close, name="remove scratch", daemon=True).start()
        except RuntimeError:  # without threads, or at the end of the process
            self._kept.close()
