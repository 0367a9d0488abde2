"""How is a file replaced so that every reader, at any moment, finds the old or the new one whole?

The new content goes to a temporary file in the same folder, reaches the disk, and takes the
name in one step. A writer that is killed leaves its temporary file behind; the next writer of
the same path clears it away, and knows it from one in use by a lock that dies with its holder.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":  # no locks there: what a killed writer leaves stays
    import fcntl

__all__ = ["replacing"]

CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES)
"""What file systems in user space say of a folder, and any of one that may not be read."""

SHOWN = 40
"""How many characters of the file's name its temporary file's name repeats: names are limited."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file whose content takes the place of ``path`` when the block ends well.

    A symbolic link stays, and the file that it points to is replaced. The permissions of an
    old file are kept. If the block raises, the old file stays as it was.

    Raises:
        OSError: The folder is missing, read-only or full, or ``path`` is no regular file.

    >>> with replacing("numbers.bin") as file:  # doctest: +SKIP
    ...     file.write(b"123")
    """
    target = Path(os.path.realpath(path))
    mode = _mode_of_old(target)
    temporary, file = _open_temporary(target)
    try:
        with file:
            yield file
            file.flush()
            if mode is not None:
                os.chmod(temporary, mode)
            os.fsync(file.fileno())
            if sys.platform == "win32":
                file.close()  # it renames no open file; elsewhere closing would unlock it
            os.replace(temporary, target)
    except BaseException:
        _remove(temporary)
        raise
    _sync_folder(target.parent)
    _clear_leftovers(target)


def _mode_of_old(target: Path) -> int | None:
    """Return the old file's permissions, None where there is none; refuse what is not a file."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a folder; name a file in it", os.fspath(target))
    if not stat.S_ISREG(mode):
        text = "a device or a pipe: only a file can be replaced in one step"
        raise OSError(errno.EINVAL, text, os.fspath(target))
    return stat.S_IMODE(mode)


def _open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    """Return a new, locked file in the target's folder, with the permissions of any new file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    while True:
        temporary = target.with_name(f".{target.name[:SHOWN]}-{secrets.token_hex(4)}.tmp")
        try:
            descriptor = os.open(temporary, flags, 0o666)
        except FileExistsError:
            continue
        except FileNotFoundError as error:
            text = "there is no such folder: make it first, on rank zero"
            raise FileNotFoundError(error.errno, text, os.fspath(target.parent)) from None
        file = os.fdopen(descriptor, "wb")
        # Somebody who clears leftovers may have come between the two calls.
        if _lock(descriptor) and os.fstat(descriptor).st_nlink:
            return temporary, file
        file.close()


def _lock(descriptor: int) -> bool:
    """Whether nobody else holds the file; it is locked then, as long as it is open."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: then nobody clears anything there
    return True


def _clear_leftovers(target: Path) -> None:
    """Remove temporary files of this target whose writers are gone."""
    if sys.platform == "win32":
        return
    pattern = re.compile(re.escape(f".{target.name[:SHOWN]}-") + r"[0-9a-f]{8}\.tmp")
    try:
        names = [name for name in os.listdir(target.parent) if pattern.fullmatch(name)]
    except OSError:
        return  # the new file is in place, which is what counts
    for name in names:
        try:
            with open(target.with_name(name), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(target.with_name(name))
        except OSError:
            pass  # in use, gone already, or on a file system without locks


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # gone already, or the folder has become read-only: nothing more can be done


def _sync_folder(folder: Path) -> None:
    """Bring the new name to the disk too, where the system can (not on Windows)."""
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise
