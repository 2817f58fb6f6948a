"""What the sources that index files have in common: keys and labels as arrays."""

from __future__ import annotations

import numpy as np

from pipeline.sources.byte_strings import ByteStrings


class Indexed:
    """N samples with a key and a label each.

    Args:
        keys: the samples' keys, unique.
        labels: int32 (N,), class indices or -2.
    """

    def __init__(self, keys: ByteStrings, labels: np.ndarray) -> None:
        assert len(keys) == len(labels), (len(keys), len(labels))
        self.names = keys
        self.labels = labels

    def __len__(self) -> int:
        return len(self.names)

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys' bytes end to end, uint8 (total,), and int64 (N+1,) offsets into them."""
        return self.names.blob, self.names.offsets

    def key(self, i: int) -> bytes:
        return self.names[i]
