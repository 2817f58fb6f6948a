"""Text for people: counts with their nouns, durations, names and messages that fit a line."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """A count and its noun: `1 image`, `2,000 images`, or its plural where that isn't the noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def are(number: int) -> str:
    """The verb to a count: `is` or `are`."""
    return "is" if number == 1 else "are"


def as_text(name: bytes) -> str:
    """A key or file name as text that any JSON reader accepts: bytes that aren't UTF-8 are written as `\\xNN`."""
    return name.decode("utf-8", "backslashreplace")


def one_line(message: object) -> str:
    """An error's or another message on one line; an empty one gives the name of its type."""
    return " ".join(str(message).split()) or type(message).__name__


def printable(text: str, most: int = 0, *, keep: str = "") -> str:
    """The text with what would steer a terminal or a page, such as escape codes in a file's name, as `\\x1b`.

    A text of more than `most` characters (0: any number) has its middle replaced by an ellipsis; `keep` stays as it is.
    """
    if 0 < most < len(text):
        text = f"{text[: most * 2 // 3]} … {text[-most // 3 :]}"
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def duration(seconds: float) -> str:
    """A duration in the two units that matter: `8 s`, `5 min 07 s`, `3 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02} min"
