"""Chunk files in the encodings of `copy --codec`: bytes of a file to pixels, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import zarr
from zarr.buffer import cpu
from zarr.storage import MemoryStore

from pipeline.errors import UsageError
from pipeline.store.format import CODECS, chunk_file_bytes, chunk_index, chunk_name

ZSTD_LEVEL = 5


def codec_arguments(codec: str) -> dict[str, Any]:
    """`filters` and `compressors` of zarr's `create_array` for images uint8 (N, H, W, C).

    `max` stores the channels as planes and differences between neighbours: photographs shrink most then.

    Raises:
        UsageError: an unknown codec, or one whose library isn't installed.
    """
    from zarr.codecs import BloscCodec, TransposeCodec, ZstdCodec

    zstd = ZstdCodec(level=ZSTD_LEVEL)
    if codec == "none":
        return {"filters": None, "compressors": None}
    if codec == "zstd":
        return {"filters": None, "compressors": [zstd]}
    if codec == "blosc":
        return {
            "filters": None,
            "compressors": [BloscCodec(cname="zstd", clevel=ZSTD_LEVEL, shuffle="bitshuffle", typesize=1)],
        }
    if codec == "max":
        try:
            from zarr.codecs.numcodecs import Delta
        except ImportError:
            raise UsageError("--codec max needs numcodecs: pip install numcodecs") from None
        # (N, H, W, C) -> (N, C, H, W)
        return {"filters": [TransposeCodec(order=(0, 3, 1, 2)), Delta(dtype="u1", astype="u1")], "compressors": [zstd]}
    raise UsageError(f"--codec {codec}: must be one of {', '.join(CODECS)}")


class ChunkCodec:
    """Encodes and decodes the chunk files of one split; threads may share it.

    Args:
        metadata: the bytes of the images' `zarr.json`.
    """

    def __init__(self, metadata: bytes) -> None:
        self._files: dict[str, Any] = {"zarr.json": cpu.Buffer.from_bytes(metadata)}
        opened: Any = zarr.open_array(MemoryStore(self._files), mode="r+")
        self._array = opened.with_config({"write_empty_chunks": True})  # all chunks exist
        self._sharded = self._array.shards is not None
        # (K, H, W, C)
        self.shape: tuple[int, ...] = self._array.shards or self._array.chunks
        self.chunk_bytes = math.prod(self.shape)
        self.is_raw = not self._array.compressors and not self._array.filters

    @property
    def _index(self) -> bytes:
        return chunk_index(self.shape[0], math.prod(self.shape[1:])) if self._sharded else b""

    def _part(self, chunk: int) -> slice:
        return slice(chunk * self.shape[0], min((chunk + 1) * self.shape[0], self._array.shape[0]))

    def decode(self, chunk: int, data: bytes) -> np.ndarray:
        """uint8 (K * H * W * C,): the whole uncompressed chunk, its padding included; shorter where `data` is.

        Raises:
            RuntimeError, ValueError: `data` can't be decoded.
        """
        if self.is_raw:  # all at once: zarr would take a shard apart into its images
            return np.frombuffer(data, np.uint8)[: self.chunk_bytes]
        name = chunk_name(chunk)
        self._files[name] = cpu.Buffer.from_bytes(data)
        try:
            images = np.asarray(self._array[self._part(chunk)])
        finally:
            del self._files[name]
        whole = np.zeros(self.shape, np.uint8)
        whole[: len(images)] = images
        return whole.reshape(-1)

    def encode(self, chunk: int, pixels: np.ndarray) -> bytes:
        """The file of a whole chunk, uint8 (K * H * W * C,); an uncompressed one as `convert` writes it."""
        if self.is_raw:
            return b"".join((memoryview(pixels), self._index))
        part = self._part(chunk)
        self._array[part] = pixels.reshape(self.shape)[: part.stop - part.start]
        return bytes(self._files.pop(chunk_name(chunk)).to_bytes())

    def is_whole(self, data: bytes) -> bool:
        """True for a compressed file, and for an uncompressed one that has the right length and index."""
        if not self.is_raw:
            return True
        length = chunk_file_bytes(self.shape[0], math.prod(self.shape[1:]), 2 if self._sharded else 1)
        return len(data) == length and data[self.chunk_bytes :] == self._index
