"""Errors that are meant for the person at the terminal: one line that says what, where and what to do.

`ValueError` (through `UsageError`) and the classes here are for users; `assert` is for invariants of the code.
"""

from __future__ import annotations


class Error(Exception):
    """A failed check or a failed job. The command line prints the text and exits with `exit_code`."""

    exit_code = 1


class UsageError(Error, ValueError):
    """Wrong use: an argument, a path or a combination that can't work. Exit code 2."""

    exit_code = 2


class StoreError(Error):
    """A store that is damaged, incomplete or of another format."""


class StoreNotFoundError(UsageError, StoreError):
    """There is no store, or no such split, at the path that was given."""


class BadSample(Exception):  # noqa: N818 - an outcome of one sample, not a failure of the job
    """One sample that can't be converted.

    Args:
        reason: a fixed code out of `BAD_SAMPLE_REASONS`; it is stored, so it holds no path, clock or exception text.
        detail: free text for the person (file name, library message); it is shown and never stored.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in BAD_SAMPLE_REASONS, reason
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


BAD_SAMPLE_REASONS = {
    "missing": "no image is there: the file is gone, a link points nowhere, or the row is empty",
    "unreadable": "the file can't be read (permission or input/output error)",
    "not-a-file": "not a regular file (FIFO, socket, device, folder or a loop of links)",
    "empty": "the file has no bytes",
    "not-an-image": "the content is no image format that can be decoded",
    "truncated": "the image data ends too early",
    "corrupt": "the image data is damaged",
    "too-large": "more pixels, or more memory to decode them, than --max-pixels allows",
    "crashed-decoder": "the process that decoded it died, twice",
    "too-complex": "a progressive JPEG with more scans than any encoder makes",
    "out-of-memory": "there was too little memory to decode it",
    "unsupported": "a kind of image that can't be read here, or can't be converted to 8-bit RGB",
    "bad-shape": "an array that isn't uint8 (or uint16) of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4)",
}
