"""Progress of long work: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from pipeline.text import counted, duration, printable

LINE_SECONDS = 10.0


def say(text: str, *, quiet: bool = False) -> None:
    """Write one line to standard error, above a progress bar if one is shown."""
    if not quiet:
        tqdm.write(printable(text), file=sys.stderr)


class Progress:
    """Counts images and megabytes of one long step.

    Args:
        label: what is being done.
        total: images in all.
        image_bytes: bytes written or read per image, for MB/s (10^6 bytes).
        quiet: show nothing.
    """

    def __init__(self, label: str, total: int, image_bytes: int, *, quiet: bool = False) -> None:
        self.label, self.total, self.image_bytes = printable(label), total, image_bytes
        self.done = 0
        self.start = self.last_line = time.monotonic()
        self.lines = not quiet and not sys.stderr.isatty()
        disable = quiet or self.lines
        self.bar = tqdm(
            total=total, desc=self.label, unit="img", smoothing=0.05, disable=disable, file=sys.stderr, leave=False
        )

    def advance(self, num_images: int) -> None:
        self.done += num_images
        now = time.monotonic()
        rate = self.done / max(now - self.start, 1e-9)
        if self.lines and now - self.last_line >= LINE_SECONDS:
            self.last_line = now
            left_seconds = (self.total - self.done) / max(rate, 1e-9)
            done = f"{self.done:,} of {counted(self.total, 'image')}"
            say(f"{self.label}: {done}, {self._rate(rate)}, {duration(left_seconds)} left")
        self.bar.set_postfix_str(f"{rate * self.image_bytes / 1e6:,.0f} MB/s", refresh=False)
        self.bar.update(num_images)

    def _rate(self, rate: float) -> str:
        return f"{rate:,.0f} images/s, {rate * self.image_bytes / 1e6:,.0f} MB/s"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def summary(self) -> str:
        rate = self.done / max(self.seconds, 1e-9)
        time_taken = duration(self.seconds) if self.seconds >= 60 else f"{self.seconds:.1f} s"
        return f"{self.label}: {counted(self.done, 'image')} in {time_taken} ({self._rate(rate)})"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
