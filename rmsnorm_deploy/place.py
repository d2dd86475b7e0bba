"""Where a bundle goes: found right before any work is done, and taken in one step when all of it is done."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.spoken import forget, speak_of

MANIFEST = "manifest.json"  # what makes a folder a bundle


def check_place(path: Path, *, replace: bool) -> None:
    """Find out whether a bundle can be written to ``path``, before any work is done; nothing is left behind.

    Raises:
        InputError: something else is there, a bundle is there and ``replace`` isn't given, or it can't be written.
    """
    place = path.resolve()
    if Path.cwd().is_relative_to(place):
        raise InputError(f"{path}: the current folder is in it or is it: name a folder of its own")
    if place.is_dir():
        _check_folder(path, place, replace)
    elif place.exists() or path.is_symlink():
        raise InputError(f"{path}: there is a file of that name: name another folder")
    parent = next(folder for folder in place.parents if folder.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()  # permissions alone say nothing to root, or of a full disk
    except OSError as error:
        raise InputError(f"{path}: {parent} cannot be written to: {error.strerror}") from error


def _check_folder(path: Path, place: Path, replace: bool) -> None:
    if os.path.ismount(place):
        raise InputError(f"{path}: something is mounted there, which cannot be replaced: name a folder inside it")
    if not any(place.iterdir()):
        return
    if not (place / MANIFEST).is_file():
        raise InputError(f"{path}: a directory that is not a bundle: nothing in it is touched, name another")
    if not replace:
        raise InputError(f"{path}: a bundle is there already: give --force (force=True) to replace it, or another name")


@contextmanager
def new_bundle(path: Path, *, replace: bool) -> Iterator[Path]:
    """A folder to write a bundle into, which takes the name ``path`` when all went well and vanishes otherwise.

    Raises:
        InputError: as `check_place`, or another process has written a bundle there in the meantime.
    """
    check_place(path, replace=replace)
    place = path.resolve()
    parents = [folder for folder in place.parents if not folder.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f".{place.name[:64]}.", dir=place.parent))
        try:
            partial = holder / place.name
            partial.mkdir()
            speak_of(partial, path)
            yield partial
            forget(partial)
            _take_place(partial, place, holder / "replaced", replace)
        finally:
            shutil.rmtree(holder, ignore_errors=True)
            if not place.exists():
                _remove_empty(parents)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _take_place(partial: Path, place: Path, aside: Path, replace: bool) -> None:
    """Give ``partial`` the name ``place``; what may be replaced is kept ``aside`` until that is done."""
    try:
        partial.rename(place)  # one step, onto nothing or onto an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not replace:
            raise InputError(
                f"{place}: another export wrote a bundle there in the meantime: give another name"
            ) from None
        place.rename(aside)
        try:
            partial.rename(place)
        except BaseException:
            aside.rename(place)
            raise


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
