"""Where the members of a tar archive lie, found by reading its headers only.

The standard library's `tarfile` isn't used here. On an archive of 100,000 members it took three times as long (1.6 s
instead of 0.5 s), it takes damage in the middle for the end of the archive, and it reads extended headers of any size
into memory. This reader knows the formats that archives of images come in: v7, ustar, GNU and pax.
Format: POSIX.1-2017 pax, "ustar Interchange Format", and GNU tar's manual, "Basic Tar Format".
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipeline.errors import UsageError
from pipeline.text import as_text

BLOCK_BYTES = 512
SMALL_BYTES = 128
"""Of a file whose content comes with its header: labels are shorter."""
MAX_EXTENDED_BYTES = 1 << 20  # of a pax or GNU header: paths are shorter
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_TAIL_BYTES = 1 << 20  # looked at behind the end mark; tar pads to 10 kB
_DATALESS = frozenset(b"123456")  # links, devices, folders and FIFOs have no data, whatever their size field says
_EXTENDED = frozenset(b"xgLK")  # pax and GNU headers, which speak about the next member
_KINDS = {0: "file", ord("0"): "file", ord("7"): "file", ord("5"): "folder", ord("1"): "link", ord("2"): "symlink"}


class Member(NamedTuple):
    """One member: `kind` is `file`, `folder`, `link` (hard, `target` from the archive's root), `symlink` or `other`.

    `content` is that of a file of at most `SMALL_BYTES`, else empty.
    """

    name: bytes
    kind: str
    offset: int
    size: int
    target: bytes
    content: bytes = b""


def members(fd: int, where: str, start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The members of the archive that fills the bytes `start` to `end` of a file, in archive order.

    Args:
        fd: descriptor of the file; it is read by position.
        where: names the archive in errors.
        start, end: bounds in bytes; by default the whole file.

    Raises:
        UsageError: the archive is truncated, damaged, sparse, or several ones end to end.
    """
    end = os.fstat(fd).st_size if end is None else end
    position = start
    extra: dict[str, Any] = {}  # what pax and GNU headers say about the next member
    while True:
        read = pread(fd, BLOCK_BYTES + SMALL_BYTES, position) if position + BLOCK_BYTES <= end else b""
        header, content = read[:BLOCK_BYTES], read[BLOCK_BYTES:]
        if len(header) < BLOCK_BYTES:
            raise UsageError(f"{where}: truncated, it has no end mark after byte {position:,}; get the archive again")
        if header == _ZERO_BLOCK:
            break
        if not _checksum_holds(header):
            raise UsageError(f"{where}: not a tar archive, or damaged, at byte {position:,}; get the archive again")
        kind = header[156]
        size = _number(header[124:136])
        if kind not in _EXTENDED:
            size = extra.get("size", size)
        if size < 0 or (kind in _EXTENDED and size > MAX_EXTENDED_BYTES):
            raise UsageError(f"{where}: damaged header at byte {position:,}; get the archive again")
        data = position + BLOCK_BYTES
        stored = 0 if kind in _DATALESS else size
        position = data + -(-stored // BLOCK_BYTES) * BLOCK_BYTES
        if data + stored > end:
            raise UsageError(
                f"{where}: truncated, {as_text(extra.get('path', _name(header)))} needs {data + stored - start:,} "
                f"bytes and the archive has {end - start:,}; get the archive again"
            )
        if kind == ord("x"):
            extra |= _pax(pread(fd, size, data), where)
        elif kind == ord("L"):
            extra["path"] = pread(fd, size, data).rstrip(b"\0")
        elif kind == ord("K"):
            extra["linkpath"] = pread(fd, size, data).rstrip(b"\0")
        elif kind != ord("g"):
            name = extra.get("path", _name(header))
            if kind == ord("S") or extra.get("sparse"):
                raise UsageError(f"{where}: {name!r} is stored sparse and can't be read in place; repack the archive")
            named_folder = kind == 0 and name.endswith(b"/")  # v7 had no type for folders
            target = extra.get("linkpath", header[157:257].partition(b"\0")[0])
            what = "folder" if named_folder else _KINDS.get(kind, "other")
            yield Member(_clean(name), what, data, stored, target, content[:stored] if stored <= SMALL_BYTES else b"")
            extra = {}
    tail = pread(fd, min(_TAIL_BYTES, end - position), position)
    if tail.strip(b"\0"):
        raise UsageError(
            f"{where}: data follows the end mark at byte {position:,} (archives put end to end?); "
            "unpack it with `tar -i` and pack it again"
        )


def pread(fd: int, size: int, offset: int) -> bytes:
    """Up to `size` bytes at `offset`, fewer only at the file's end; leaves the file position where the system can."""
    parts, missing = [], size
    while missing > 0 and (part := _pread(fd, missing, offset)):
        parts.append(part)
        missing, offset = missing - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _seek_and_read(fd: int, size: int, offset: int) -> bytes:
    with _SEEK_LOCK:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size)


_SEEK_LOCK = threading.Lock()
_pread = getattr(os, "pread", _seek_and_read)  # Windows has no pread


def _clean(name: bytes) -> bytes:
    """A path without `.`, doubled and outer slashes."""
    return b"/".join(part for part in name.split(b"/") if part not in (b"", b"."))


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _checksum_holds(header: bytes) -> bool:
    stated = _number(header[148:156])
    unsigned = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if stated == unsigned:
        return True
    return stated == unsigned - 256 * sum(byte > 127 for byte in header[:148] + header[156:])  # some old tars


def _number(digits: bytes) -> int:
    """A header's number: octal digits, or base 256 where the first bit is set; -1 where it is none."""
    if digits[0] & 0x80:
        return int.from_bytes(digits[1:], "big") if digits[0] == 0x80 else -1
    try:
        return int(digits.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def _pax(data: bytes, where: str) -> dict[str, Any]:
    """The records of an extended header that matter here: path, linkpath, size, and whether the member is sparse."""
    extra: dict[str, Any] = {}
    while data.strip(b"\0"):
        try:
            length = int(data[: data.index(b" ")])
            key, equals, value = data[data.index(b" ") + 1 : length - 1].partition(b"=")
            if not equals or length < 5:
                raise ValueError(data[:20])
            if key == b"size":
                extra["size"] = int(value)
        except ValueError:
            raise UsageError(f"{where}: damaged extended header; get the archive again") from None
        if key in (b"path", b"linkpath"):
            extra[key.decode()] = value
        elif key.startswith(b"GNU.sparse."):
            extra["sparse"] = True
        data = data[length:]
    return extra
