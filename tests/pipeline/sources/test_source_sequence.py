"""Samples passed from Python."""

import errno
import io
import subprocess
import sys

import joblib
import numpy as np
import pytest
from layouts import write_files
from PIL import Image

from pipeline import convert, open_store
from pipeline.errors import BadSample, UsageError
from pipeline.sources import UNLABELLED, open_source
from pipeline.sources.sequence import LazySource, PackedSource

RNG = np.random.default_rng(0)
GRAY = RNG.integers(0, 256, (4, 5), np.uint8)
COLOUR = RNG.integers(0, 256, (6, 3, 3), np.uint8)
DEEP = RNG.integers(0, 65536, (2, 2, 4), np.uint16)


def only(samples, **options):
    (source,) = open_source(samples, **options).splits.values()
    return source


def test_all_kinds_of_images(tmp_path, monkeypatch):
    write_files(tmp_path, "a.jpg", "b.jpg")
    monkeypatch.chdir(tmp_path)
    found = open_source(
        [
            (b"encoded", "dog"),
            ("a.jpg", "cat"),
            (tmp_path / "b.jpg", "cat"),
            (GRAY, "dog"),
            (COLOUR[:, ::-1], None),
            (DEEP.astype(">u2"), "dog", "key of its own"),
            (Image.fromarray(COLOUR), "cat", b"\xff"),
            (bytearray(b"more"), "dog"),
        ]
    )
    assert (found.kind, found.class_ids, list(found.splits)) == ("sequence", ["cat", "dog"], ["train"])
    source = found.splits["train"]
    monkeypatch.chdir("/")
    joblib.dump(source, tmp_path / "index")
    for loaded in (source, joblib.load(tmp_path / "index", mmap_mode="r")):
        assert isinstance(loaded, PackedSource)
        images = [loaded.read(i) for i in range(8)]
        assert images[:3] == [b"encoded", b"a.jpg", b"b.jpg"]
        for image, wanted in zip(images[3:7], (GRAY, COLOUR[:, ::-1], DEEP, COLOUR), strict=True):
            assert image.dtype == wanted.dtype
            assert np.array_equal(image, wanted)
        assert images[7] == b"more"
        assert loaded.labels.tolist() == [1, 0, 0, 1, UNLABELLED, 1, 0, 1]
    path = str(tmp_path / "b.jpg").encode()
    keys = [source.key(i) for i in range(8)]
    assert keys == [b"0", b"a.jpg", path, b"3", b"4", b"key of its own", b"\xff", b"7"]


def test_integer_labels_keep_their_value():
    found = open_source([(b"x", np.int64(3)), (b"y", 0), (b"z", -1), (b"w", np.array(2))])
    assert found.class_ids == ["0", "1", "2", "3"]
    assert found.splits["train"].labels.tolist() == [3, 0, UNLABELLED, 2]


def test_splits_in_a_mapping():
    found = open_source({"val": [(b"v", "b")], "train": [(b"x", "b"), (b"y", "a")]})
    assert list(found.splits) == ["train", "val"]
    assert found.splits["val"].labels.tolist() == [1]
    only_val = open_source({"val": [(b"v", "b")], "train": [(b"x", "b"), (b"y", "a")]}, splits=["val"])
    assert (list(only_val.splits), only_val.class_ids) == (["val"], ["a", "b"])
    with pytest.raises(UsageError, match="sample 0 of val: class 'c' isn't in train"):
        open_source({"val": [(b"v", "c")], "train": [(b"x", "b")]})


def test_the_only_split_takes_the_name_asked_for():
    assert list(open_source([(b"x", 0)], splits=["test"]).splits) == ["test"]


def test_repeated_paths_are_numbered_and_repeated_keys_refused():
    source = only([("a.jpg", 0), ("b.jpg", 0), ("a.jpg", 1)])
    assert [source.key(i) for i in range(3)] == [b"0", b"1", b"2"]
    with pytest.raises(UsageError, match="samples 0 and 1 have the same key b'k'"):
        open_source([(b"x", 0, "k"), (b"y", 0, "k")])


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (np.zeros((3, 3), np.float32), "bad-shape"),
        (np.zeros((3, 3, 2), np.uint8), "bad-shape"),
        (np.zeros((3,), np.uint8), "bad-shape"),
        (np.zeros((0, 3, 3), np.uint8), "bad-shape"),
        (np.zeros((2, 3, 3, 3), np.uint8), "bad-shape"),
        (object(), "bad-shape"),
        (b"", "empty"),
        ("nowhere.jpg", "missing"),
    ],
)
def test_bad_samples(image, reason):
    class Lazy:
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return image, 0

    for source in (only([(image, 0)]), only(Lazy())):
        with pytest.raises(BadSample) as caught:
            source.read(0)
        assert caught.value.reason == reason


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pictures():
    """(name, PIL image, the same picture as an encoded file) in every mode of PIL's."""
    colour = Image.fromarray(RNG.integers(0, 256, (12, 9, 3), np.uint8))
    alpha = Image.fromarray(RNG.integers(0, 256, (12, 9, 4), np.uint8))
    deep = RNG.integers(0, 65536, (12, 9), np.uint16)
    palette = colour.convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    deep_image = Image.fromarray(deep)
    saved = {
        "1": colour.convert("1"),
        "L": colour.convert("L"),
        "LA": alpha.convert("LA"),
        "P": palette,
        "RGB": colour,
        "RGBA": alpha,
        "I;16": deep_image,
    }
    for name, image in saved.items():
        assert image.mode == name
        yield name, image, encoded(image)
    yield "I", Image.fromarray(deep.astype(np.int32)), encoded(deep_image)
    marks = {"P": (palette, 3), "P, an alpha per entry": (palette, bytes(range(0, 256, 16)))}
    marks |= {
        "RGB": (colour, colour.getpixel((4, 5))),
        "L": (colour.convert("L"), colour.convert("L").getpixel((1, 1))),
    }
    marks |= {"1": (colour.convert("1"), 255), "I;16": (deep_image, int(deep[3, 3]))}
    for name, (image, transparency) in marks.items():
        file = encoded(image, transparency=transparency)
        marked = image.copy()
        marked.info["transparency"] = transparency
        yield f"{name} with a transparent colour", marked, file
        yield f"{name} with a transparent colour, opened", Image.open(io.BytesIO(file)), file
    # What PNG can't hold: TIFF can, or PIL's own conversion to what PNG can is the picture.
    level = np.array(RNG.random((12, 9)), np.float32)
    for image in (colour.convert("CMYK"), colour.convert("LAB"), Image.fromarray(level)):
        yield image.mode, image, encoded(image, "TIFF")
    for mode, via in {"HSV": "RGB", "YCbCr": "RGB", "RGBX": "RGB", "RGBa": "RGBA", "La": "LA", "PA": "RGBA"}.items():
        image = {"RGBa": alpha, "La": alpha.convert("LA"), "PA": palette}.get(mode, colour).convert(mode)
        yield mode, image, encoded(image.convert(via))
    jpeg = encoded(colour.convert("CMYK"), "JPEG")
    yield "CMYK JPEG, opened", Image.open(io.BytesIO(jpeg)), jpeg


@pytest.mark.parametrize("lazy", [False, True])
def test_pil_images_of_all_modes_convert_like_files(tmp_path, lazy):
    class Asked:
        def __init__(self, samples):
            self.samples = samples

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, i):
            return self.samples[i]

    named = list(pictures())
    images = [(image, 0) for _, image, _ in named]
    convert(Asked(images) if lazy else images, tmp_path / "a.zarr", size=8, n_jobs=1, no_shuffle=True, quiet=True)
    files = [(file, 0) for _, _, file in named]
    convert(files, tmp_path / "b.zarr", size=8, n_jobs=1, no_shuffle=True, quiet=True)
    mine, expected = (open_store(tmp_path / name)["train"] for name in ("a.zarr", "b.zarr"))
    differing = [name for i, (name, _, _) in enumerate(named) if not np.array_equal(mine.image(i), expected.image(i))]
    assert differing == []
    assert mine.num_valid == len(named)


def test_a_callers_image_stays_as_it_is():
    image = Image.fromarray(COLOUR)
    image.info["transparency"] = (0x0100, 0x0200, 0x0300)
    only([(image, 0)])
    assert image.info == {"transparency": (0x0100, 0x0200, 0x0300)}


def test_a_pil_image_of_a_damaged_file_is_a_bad_sample():
    data = encoded(Image.fromarray(RNG.integers(0, 256, (50, 50, 3), np.uint8)), "JPEG")[:-900]

    class Lazy:
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return Image.open(io.BytesIO(data)), 0

    for source in (only([(Image.open(io.BytesIO(data)), 0)]), only(Lazy())):
        with pytest.raises(BadSample, match="truncated") as caught:
            source.read(0)
        assert caught.value.reason == "corrupt"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([b"x"], r"sample 0 is a bytes; pass \(image, label\)"),
        ((COLOUR, [1, 2]), r"sample 0 is a ndarray; .* list\(zip\(images, labels\)\)"),
        ([(b"x", 1, "k", 2)], "sample 0 is a tuple"),
        ([(b"x", 1.5)], "sample 0 has the label 1.5"),
        ([(b"x", True)], "sample 0 has the label True"),
        ([(b"x", 1), (b"y", "a")], "labels are integers here and text there"),
        ((pair for pair in [(b"x", 1)]), "a generator, which has no length; pass a list"),
        (7, "a int, which has no length"),
        ([], "the samples: no images found"),
    ],
)
def test_what_is_no_sequence_of_samples(samples, message):
    with pytest.raises(UsageError, match=message):
        open_source(samples)


def test_a_path_is_no_sequence(tmp_path):
    with pytest.raises(UsageError, match="--source sequence is for samples that a Python program passes"):
        open_source(tmp_path, "sequence")


def test_stamps_follow_the_content(tmp_path):
    write_files(tmp_path, "a.jpg")
    source = only([(b"abc", 0), (GRAY, 0), (tmp_path / "a.jpg", 0), (tmp_path / "no.jpg", 0)])
    stamps = source.change_stamps(np.arange(4))
    assert stamps[:, 0].tolist() == [3, 20, len("a.jpg"), -1]
    other = only([(b"abd", 0), (GRAY, 0), (tmp_path / "a.jpg", 0), (tmp_path / "no.jpg", 0)]).change_stamps(
        np.arange(4)
    )
    assert (stamps != other).any(1).tolist() == [True, False, False, False]


class Squares:
    """A sequence that makes its images when it is asked."""

    asked = 0

    def __len__(self):
        return 3

    def __getitem__(self, i):
        Squares.asked += 1
        return np.full((2, 2), i, np.uint8), i * i


def test_a_lazy_sequence_is_asked_when_read(tmp_path):
    found = open_source(Squares(), splits=["val"])
    source = found.splits["val"]
    assert isinstance(source, LazySource)
    assert source.labels.tolist() == [0, 1, 4]
    assert Squares.asked == 3
    joblib.dump(source, tmp_path / "index")
    again = joblib.load(tmp_path / "index", mmap_mode="r")
    assert [int(again.read(i)[0, 0]) for i in range(3)] == [0, 1, 2]
    assert again.change_stamps(np.arange(3)).tolist() == [[0, 0]] * 3


def test_a_lazy_sequence_of_a_script_is_pickled_by_value(tmp_path):
    script = """
import joblib, sys
from pipeline.sources import open_source
class Mine:
    def __len__(self): return 2
    def __getitem__(self, i): return b"image %d" % i, i
joblib.dump(open_source(Mine()).splits["train"], sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "index")], check=True)
    source = joblib.load(tmp_path / "index", mmap_mode="r")
    assert [source.read(i) for i in range(2)] == [b"image 0", b"image 1"]


def test_errors_while_a_lazy_sequence_reads():
    class Broken:
        error: Exception = OSError("broken data stream when reading image file")
        ready = False

        def __len__(self):
            return 1

        def __getitem__(self, i):
            if self.ready:
                raise self.error
            return b"x", 0

    samples = Broken()
    source = only(samples)
    samples.ready = True
    errors = {
        samples.error: "corrupt",
        FileNotFoundError(2, "No such file"): "missing",
        KeyError("a bug"): "unreadable",
    }
    for error, reason in errors.items():
        samples.error = error
        with pytest.raises(BadSample) as caught:
            source.read(0)
        assert caught.value.reason == reason
    samples.error = OSError(errno.EMFILE, "Too many open files")  # the machine's fault, not the sample's
    with pytest.raises(OSError, match="Too many"):
        source.read(0)


class Labelled:
    """A dataset as torch's are, that lists its labels; counts the items that are asked for."""

    def __init__(self, labels, broken=(), **listed):
        self.labels_inside, self.broken, self.asked = labels, broken, 0
        vars(self).update(listed)

    def __len__(self):
        return len(self.labels_inside)

    def __getitem__(self, i):
        self.asked += 1
        if i in self.broken:
            raise RuntimeError("decoder\nfailed")
        return COLOUR, self.labels_inside[i]


LABELS = [i % 3 for i in range(20)]


@pytest.mark.parametrize(
    "listed",
    [{"targets": LABELS}, {"targets": np.array(LABELS)}, {"samples": [("x.jpg", label) for label in LABELS]}],
)
def test_listed_labels_are_taken_without_going_through_the_items(listed):
    samples = Labelled(LABELS, **listed)
    source = only(samples)
    assert source.labels.tolist() == LABELS
    assert [source.key(i) for i in (0, 19)] == [b"0", b"19"]
    assert samples.asked <= 3


@pytest.mark.parametrize("targets", [LABELS[:-1], LABELS[::-1], [0.5] * 20, 7, None, ["a"] * 20])
def test_listed_labels_that_dont_agree_are_not_taken(targets):
    assert only(Labelled(LABELS, targets=targets)).labels.tolist() == LABELS


def test_items_that_raise_are_bad_samples(tmp_path):
    for listed in ({}, {"targets": LABELS}):
        report = convert(
            Labelled(LABELS, broken=(0, 5), **listed), tmp_path / f"{len(listed)}.zarr", size=8, on_error="skip",
            quiet=True, n_jobs=1, no_shuffle=True,
        )  # fmt: skip
        assert report.committed
        stored = open_store(tmp_path / f"{len(listed)}.zarr")["train"]
        assert np.asarray(stored.labels).tolist() == [-1 if i in (0, 5) else i % 3 for i in range(20)]
        assert {bad["reason"] for bad in stored.attrs["bad_samples"]} == {"unreadable"}


@pytest.mark.parametrize("label", [np.eye(2)[0], [0, 1], 1.0, {"boxes": []}, np.zeros(5000)])
def test_labels_that_are_none_name_the_sample(label):
    with pytest.raises(UsageError, match="sample 1 has the label ") as caught:
        open_source([(COLOUR, 0), (COLOUR, label)])
    assert len(str(caught.value)) < 250
    assert only([(COLOUR, np.array([3]))]).labels.tolist() == [3]
    assert "\n" not in str(caught.value)
