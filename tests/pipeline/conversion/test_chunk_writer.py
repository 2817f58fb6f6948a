"""Chunk files: every byte, digest and sum, through the page cache or past it."""

import errno
import hashlib
import os

import numpy as np
import pytest

from pipeline.conversion import chunk_writer as chunk_file
from pipeline.conversion.chunk_writer import ChunkWriter
from pipeline.store.format import chunk_index
from pipeline.store.geometry import Geometry


def write(path, images, chunk_images):
    """The images, then padding, as one chunk; returns the closed ChunkWriter."""
    geometry = Geometry(size=images.shape[1], channels={1: "gray", 3: "rgb"}[images.shape[3]])
    with open(path, "wb") as file, ChunkWriter(file, geometry, chunk_images) as chunk:
        for image in images:
            chunk.next_slot()[:] = image
            chunk.mark_filled()
        chunk.finish(chunk_images - len(images))
    return chunk


def padded(images, chunk_images):
    """The bytes of a whole chunk file."""
    padding = bytes((chunk_images - len(images)) * images[0].nbytes)
    return images.tobytes() + padding + chunk_index(chunk_images, images[0].nbytes)


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (13, 48, 48, 3), np.uint8)


@pytest.mark.parametrize("block_bytes", [1, 30_000, 2_000_000])
@pytest.mark.parametrize("padding", [0, 1, 9])
def test_file_digest_and_sums(tmp_path, monkeypatch, images, block_bytes, padding):
    """Whole pages and the rest: 48 x 48 x 3 bytes are no multiple of a page."""
    monkeypatch.setattr(chunk_file, "BLOCK_BYTES", block_bytes)
    chunk = write(tmp_path / "c", images, len(images) + padding)
    expected = images.tobytes() + bytes(padding * images[0].nbytes)
    index = chunk_index(len(images) + padding, images[0].nbytes)
    assert (tmp_path / "c").read_bytes() == expected + index
    assert chunk.sha256 == hashlib.sha256(expected).hexdigest()
    wide = images.astype(np.int64)
    assert chunk.sums.tolist() == wide.sum((0, 1, 2)).tolist()
    assert chunk.squares.tolist() == (wide**2).sum((0, 1, 2)).tolist()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct writes")
@pytest.mark.parametrize("refuses", ["the flag", "the write"])
def test_file_system_without_direct_writes(tmp_path, monkeypatch, images, refuses):
    refused = []

    def fcntl(fd, command, argument=0):
        if refuses == "the flag" and argument & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, argument)

    def os_write(fd, data):
        if refuses == "the write" and real_fcntl(fd, chunk_file.fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, data)

    real_fcntl, real_write = chunk_file.fcntl.fcntl, os.write
    monkeypatch.setattr(chunk_file.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(chunk_file.os, "write", os_write)
    monkeypatch.setattr(chunk_file, "BLOCK_BYTES", 16 * images[0].nbytes)  # 27 pages
    images = np.tile(images, (3, 1, 1, 1))
    write(tmp_path / "c", images, 40)
    assert (tmp_path / "c").read_bytes() == images.tobytes() + bytes(images[0].nbytes) + chunk_index(
        40, images[0].nbytes
    )
    assert len(refused) == 1  # asked once, not for each block


def test_short_writes_go_on(tmp_path, monkeypatch, images):
    real_write = os.write
    monkeypatch.setattr(chunk_file.os, "write", lambda fd, data: real_write(fd, data[:5000]))
    write(tmp_path / "c", images, 14)
    assert (tmp_path / "c").read_bytes() == images.tobytes() + bytes(images[0].nbytes) + chunk_index(
        14, images[0].nbytes
    )


def test_error_of_the_writing_thread_reaches_the_caller(tmp_path, monkeypatch, images):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(chunk_file.os, "write", full)
    monkeypatch.setattr(chunk_file, "BLOCK_BYTES", 30_000)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "c", images, 14)
