"""The directory of a checkpoint: complete or not there, told from a damaged one, not removed while it is read.

The directory is written aside, flushed to the disk and renamed. The manifest, written last, lists every other file with
its size and checksum, and has a checksum of itself. Checksums are CRC-32: it is in the standard library, faster than
disks (4 GB/s a core), and no flipped bit or burst of up to 32 bits escapes it. They find damage, not malice.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

MANIFEST = "meshpar.json"
FORMAT = 2
UNFINISHED = ".tmp"
REPLACED = f".replaced{UNFINISHED}"
READ_BYTES = 1 << 24

FileEntry = dict[str, Any]
"""{"bytes": size, "crc32": eight hexadecimal digits}"""


class CheckpointError(ValueError):
    """A directory that is no whole checkpoint: incomplete, damaged, or of another format."""


class ChecksumFile(io.BufferedWriter):
    """A new file, written from its start to its end, that keeps count of what is written.

    ``failure`` is the first error of the disk, which callers that write through C++ turn into another.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(os.fspath(path), "w"))
        self.size = self.crc = 0
        self.failure: OSError | None = None

    def write(self, data) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.size, self.crc = self.size + count, zlib.crc32(data, self.crc)
        return count

    def fileno(self) -> int:
        """For fsync, which DCP calls without a flush."""
        self.flush()
        return super().fileno()

    def entry(self) -> FileEntry:
        """What the manifest says of the file."""
        return {"bytes": self.size, "crc32": f"{self.crc:08x}"}


def make_empty(directory: Path) -> None:
    """Make a new directory, in place of what an interrupted save left there."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def publish(
    aside: Path, directory: Path, manifest: dict[str, Any], texts: Mapping[str, str], files: Mapping[str, FileEntry]
) -> None:
    """Add ``texts``, by file name, and the manifest to the ``files`` written ``aside``; then rename to ``directory``.

    Raises OSError when one of ``files`` is not there as it was written.
    """
    files = {**files, **{name: _write_text(aside / name, text) for name, text in texts.items()}}
    problem = _other_sizes(aside, files)
    if problem is not None:
        raise OSError(f"{problem}: something else changed it while it was written")
    # As they will be read: what JSON has no word for, it writes as another.
    content = json.loads(json.dumps({"format": FORMAT, **manifest, "files": files}))
    _write_text(aside / MANIFEST, json.dumps({"checksum": _checksum(content), **content}, indent=1))
    flush(aside)
    if not directory.exists():
        os.replace(aside, directory)
    elif _exchange(aside, directory):
        _discard(aside, directory)
    else:
        replaced = directory.with_name(directory.name + REPLACED)
        os.replace(directory, replaced)
        try:
            os.replace(aside, directory)
        except OSError:
            os.replace(replaced, directory)
            raise
        _discard(replaced, directory)
    flush(directory.parent)


def finish_replacing(directory: Path) -> None:
    """Where `publish` was ended between its two renames, do the second one, or undo the first."""
    replaced = directory.with_name(directory.name + REPLACED)
    if not replaced.exists():
        return
    if directory.exists():
        _discard(replaced, directory)
        return
    for whole in (directory.with_name(directory.name + UNFINISHED), replaced):
        with suppress(CheckpointError):
            read_manifest(whole)
            os.replace(whole, directory)
            return


def _exchange(a: Path, b: Path) -> bool:
    """Let two directories have each other's name at once; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


def _discard(old: Path, directory: Path) -> None:
    """Remove what ``directory`` has replaced; later, where it is read now."""
    names = (directory.with_name(f"{directory.name}.old-{i}{UNFINISHED}") for i in count())
    aside = next(name for name in names if not name.exists())
    with suppress(OSError):  # the new one is in its place, whatever becomes of the old one
        os.replace(old, aside)
        remove(aside)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What the manifest says; CheckpointError unless it is whole, and all files are there in their sizes."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is no complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path} has format {found!r}; this version reads format {FORMAT}")
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise CheckpointError(f"{path} is damaged: its content does not have the checksum that it states")
    problem = _other_sizes(directory, manifest["files"])
    if problem is not None:
        raise CheckpointError(problem)
    return manifest


def check_contents(directory: Path, files: Mapping[str, FileEntry], part: int = 0, parts: int = 1) -> None:
    """Read this part of the files, of similar size each, and raise CheckpointError for one with another checksum."""
    by_size = sorted(files, key=lambda name: files[name]["bytes"], reverse=True)
    for name in by_size[part::parts]:
        try:
            crc = _crc_on_disk(directory / name)
        except OSError as error:
            raise CheckpointError(f"{directory / name} cannot be read: {error}") from None
        if crc != files[name]["crc32"]:
            raise CheckpointError(f"{directory / name} is damaged: it does not have the checksum it was written with")


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """While the body runs, no other process's `remove` takes the directory away."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:  # what is read next says it better
        yield
        return
    try:
        _lock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def remove(directory: Path) -> None:
    """Remove a checkpoint, or what is left of one; BlockingIOError, and nothing done, while a process reads it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Without its manifest it is no checkpoint: a removal that is interrupted leaves none that looks whole.
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory)
    finally:
        os.close(handle)


def _lock(handle: int, kind: int) -> None:
    try:
        fcntl.flock(handle, kind)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        pass


def _write_text(path: Path, text: str) -> FileEntry:
    with ChecksumFile(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    return file.entry()


def _other_sizes(directory: Path, files: Mapping[str, FileEntry]) -> str | None:
    for name, entry in files.items():
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            return f"{directory} is no complete checkpoint: {name} is missing"
        if size != entry["bytes"]:
            return f"{directory / name} is damaged: it has {size} bytes of the {entry['bytes']} that were written"
    return None


def _checksum(manifest: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(manifest).encode()):08x}"


def _crc_on_disk(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            crc = zlib.crc32(data, crc)
    return f"{crc:08x}"


def flush(path: Path) -> None:
    """Make sure a file, or a directory's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
