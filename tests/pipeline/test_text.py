import pytest

from pipeline.text import as_text, counted, duration, one_line, printable

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("number", "words", "expected"),
    [
        (0, ("image",), "0 images"),
        (1, ("image",), "1 image"),
        (2, ("image",), "2 images"),
        (1_281_167, ("image",), "1,281,167 images"),
        (1, ("class", "classes"), "1 class"),
        (1000, ("class", "classes"), "1,000 classes"),
    ],
)
def test_counted(number: int, words: tuple[str, ...], expected: str) -> None:
    assert counted(number, *words) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7149, "1 h 59 min"),
        (7199, "2 h 00 min"),
        (400_000, "111 h 07 min"),
    ],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [(b"cat/1.jpg", "cat/1.jpg"), ("\u00e9".encode(), "\u00e9"), (b"\xe9.jpg", "\\xe9.jpg"), (b"", "")],
)
def test_as_text(name: bytes, expected: str) -> None:
    assert as_text(name) == expected


@pytest.mark.parametrize(
    ("message", "expected"), [(ValueError("a\n  b"), "a b"), (" a\tb ", "a b"), (KeyError(), "KeyError")]
)
def test_one_line(message: object, expected: str) -> None:
    assert one_line(message) == expected


def test_printable() -> None:
    assert printable("a\x1b[2J\n\u202eé日") == "a\\x1b[2J\\n\\u202eé日"
    assert printable("a\n\x07b", keep="\n") == "a\n\\x07b"
    short = printable("a" * 100 + "b" * 100, 30)
    assert len(short) < 40
    assert short.startswith("a" * 20 + " … b")
