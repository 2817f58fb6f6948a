"""What a conversion does to each image, as values: the geometry (stored, decides pixels) and the decode options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import UsageError

FITS = ("crop", "stretch", "pad")
FILTERS = ("bicubic", "bilinear", "lanczos", "box")
CHANNELS = {"rgb": 3, "gray": 1}


@dataclass(frozen=True)
class Geometry:
    """How one image becomes a square.

    Args:
        size: side S of the stored image in pixels, 1 to 4096.
        fit: `crop` (shorter side to S, centre crop), `stretch` (both sides to S) or `pad` (longer side to S, black
            borders).
        filter: `bicubic`, `bilinear`, `lanczos` or `box`; always antialiased.
        channels: `rgb` (three channels) or `gray` (one).
        exif_transpose: apply the EXIF orientation before the resize.

    Raises:
        UsageError: a value outside these.
    """

    size: int = 256
    fit: str = "crop"
    filter: str = "bicubic"
    channels: str = "rgb"
    exif_transpose: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 4096:
            raise UsageError(f"--size {self.size}: must be 1 to 4096 pixels")
        for flag, value, allowed in (
            ("--fit", self.fit, FITS),
            ("--filter", self.filter, FILTERS),
            ("--channels", self.channels, tuple(CHANNELS)),
        ):
            if value not in allowed:
                raise UsageError(f"{flag} {value}: must be one of {', '.join(allowed)}")

    @property
    def num_channels(self) -> int:
        return CHANNELS[self.channels]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return self.size, self.size, self.num_channels

    @property
    def image_bytes(self) -> int:
        return self.size * self.size * self.num_channels

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
