from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Element, image_of, read_page
from stores import edit_attributes, make_images, make_store
from zarr.storage import LocalStore

from pipeline import convert
from pipeline.commands import report
from pipeline.commands.copy_store import copy_store
from pipeline.commands.gallery import draw
from pipeline.commands.report import default_path, write_report
from pipeline.commands.report_split import log_edges
from pipeline.errors import Error, StoreError, StoreNotFoundError, UsageError
from pipeline.sources.byte_strings import ByteStrings
from pipeline.store.format import SMALL_ARRAYS, SplitArrays
from pipeline.store.reader import open_store
from pipeline.store.writer import split_attributes, write_split


def change(
    store: Path,
    split: str,
    *,
    sizes: np.ndarray | None = None,
    keys: list[bytes] | None = None,
    root: dict[str, Any] | None = None,
    **attributes: Any,
) -> None:
    """Rewrite a split's small arrays and attributes, consistently."""
    one = open_store(store)[split]
    arrays = {name: np.array(one.small_array(name)) for name in SMALL_ARRAYS}
    if sizes is not None:
        arrays["source_size"] = sizes
    if keys is not None:
        arrays["keys"], arrays["key_offsets"] = ByteStrings.pack(keys).arrays
    for name in SMALL_ARRAYS:
        shutil.rmtree(one.path / name)
    for file in (one.path / "zarr.json", one.path / "images" / "zarr.json"):
        file.unlink()
    new = SplitArrays(**arrays)
    write_split(
        LocalStore(one.path),
        "",
        one.image_shape,
        one.chunk_images,
        new,
        split_attributes(new, {**one.attrs, **attributes}),
    )
    if root:
        edit_attributes(store / "zarr.json", lambda attributes: attributes.update(root))


@pytest.fixture
def labels() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 3, 60).astype(np.int32)


@pytest.fixture
def store(tmp_path: Path, labels: np.ndarray) -> Path:
    splits = {"train": (make_images(60), labels), "val": (make_images(9, seed=1), [0, 1, 2] * 3)}
    return make_store(tmp_path / "x.zarr", splits, chunk_images=7, bad={"train": [3, 11, 40]})


def section_of(page: Element, number: int) -> Element:
    return page.one(f"split-{number}")


def sheet(page: Element, number: int) -> Element:
    (found,) = section_of(page, number).find("ul", "sheet")
    return found


def test_figures_are_those_of_the_store(store: Path, labels: np.ndarray) -> None:
    change(
        store,
        "train",
        source_modes={"RGB": 50, "CMYK": 7},
        decoder_warnings=4,
        resizer="a resizer 1.0",
        software={"numpy": "9.9", "resizer": "a resizer 1.0"},
        recipe={"source": "folder", "max_pixels": 1000, "shuffled": False},
    )
    path = write_report(store)
    assert path == store.with_suffix(".html")
    page = read_page(path)
    counts = Counter(label for i, label in enumerate(labels.tolist()) if i not in (3, 11, 40))
    tables, facts = page.tables(), page.facts()

    assert facts["Samples"] == "66train 57, val 9"
    assert facts["Classes"] == "3"
    assert facts["Bad samples"].startswith("3")
    assert facts["State"].startswith("✓")
    on_disk = {
        split: sum(
            os.path.getsize(os.path.join(folder, file)) for folder, _, files in os.walk(store / split) for file in files
        )
        for split in ("train", "val")
    }
    glance = tables["Splits at a glance"]
    assert glance[1] == ["train", "as in the source", "57", "0", "3", "3", f"{on_disk['train']:,}"]
    assert glance[2] == ["val", "as in the source", "9", "0", "0", "3", f"{on_disk['val']:,}"]

    per_class = section_of(page, 0).tables()["Samples per class"]
    assert per_class[1:] == [[str(i), f"class{i:03d}", str(counts[i])] for i in range(3)]
    bars = [bar.attributes["style"] for bar in section_of(page, 0).find("div", "with-bars")[0].find("span", "bar")]
    assert bars == [f"width:{100 * counts[i] / max(counts.values()):.3g}%" for i in range(3)]
    assert "All classes and their samples in each split" not in tables  # the bars say it already
    assert f"3 classes of {min(counts.values())} to {max(counts.values())} samples" in section_of(page, 0).text

    images = make_images(60)[[i for i in range(60) if i not in (3, 11, 40)]] / 255
    channels = section_of(page, 0).tables()["Mean and spread of each channel"]
    assert [row[2] for row in channels[1:]] == [f"{value:.4f}" for value in images.mean((0, 1, 2))]
    assert [row[3] for row in channels[1:]] == [f"{value:.4f}" for value in images.std((0, 1, 2))]
    assert [row[4] for row in channels[1:]] == [f"{255 * value:.2f}" for value in images.mean((0, 1, 2))]
    mean, std = images.mean((0, 1, 2))[0], images.std((0, 1, 2))[0]
    (bar, dot) = section_of(page, 0).find("span", "range")[0].children
    assert bar.attributes["style"] == f"left:{100 * (mean - std):.3g}%;width:{200 * std:.3g}%"
    assert dot.attributes["style"] == f"left:{100 * mean:.3g}%"

    modes = section_of(page, 0).tables()["Pixel modes of the original images"]
    assert modes[1:] == [["RGB, red, green, blue", "50", "87.7%"], ["CMYK, printing inks", "7", "12.3%"]]
    reasons = section_of(page, 0).tables()["Reasons"]
    assert reasons[1:] == [["truncated", "the image data ends too early", "3"]]
    bad = section_of(page, 0).tables()["Bad samples"]
    assert bad[1:] == [[str(slot), f"train/{slot:06d}.png", "truncated"] for slot in (3, 11, 40)]
    assert "Bad samples" not in section_of(page, 1).text
    recipe = {row[0]: row[1:] for row in tables["Recipe and software"]}
    assert recipe["Source"] == ["folder", "none"]
    assert recipe["Max pixels"] == ["1,000", "none"]
    assert recipe["Shuffled"] == ["no", "none"]
    assert recipe["Resizer"] == ["a resizer 1.0", "not recorded"]
    assert "resizer" not in recipe
    assert recipe["Decoder warnings"] == ["4", "0"]
    assert recipe["numpy"] == ["9.9", "none"]
    prints = tables["Sample fingerprints"]
    assert prints[1:] == [[name, open_store(store)[name].fingerprint] for name in ("train", "val")]
    files = tables["Files and bytes"]
    assert files[1][:5] == ["train", "none", "9", "7", "13.1 kB"]  # 9 chunks x (7 images x (192 + 16) + 4) bytes
    assert files[1][6] == "576 bytes"  # 3 images of padding


def test_samples_are_real_and_never_bad(store: Path, labels: np.ndarray) -> None:
    page = read_page(write_report(store, seed=3))
    shown = sheet(page, 0).find("li")
    assert len(shown) == 40
    images, slots = make_images(60), []
    for item in shown:
        key = item.find("bdi", "key")[0].text
        slot = int(key[6:12])
        slots.append(slot)
        assert item.find("b")[0].text == f"class{labels[slot]:03d}"
        assert item.find("b")[0].attributes["title"] == f"class{labels[slot]:03d}"
        (image,) = item.find("img")
        assert image.attributes["alt"] == f"class{labels[slot]:03d}: {key}"
        assert image.attributes["title"] == f"slot {slot}, originally 8 × 8"
        np.testing.assert_array_equal(np.asarray(image_of(image)), images[slot])
    assert len(set(slots)) == 40
    assert not {3, 11, 40} & set(slots)
    assert [labels[slot] for slot in slots] == sorted(labels[slot] for slot in slots)
    again = read_page(write_report(store, seed=4))
    assert [e.attributes["alt"] for e in again.find("img")] != [e.attributes["alt"] for e in page.find("img")]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_no_class_is_missing_among_the_samples(tmp_path: Path, codec: str) -> None:
    """39 classes, 38 of a single sample each: forty random ones of 138 would miss most of these."""
    labels = np.concatenate([np.zeros(100, int), np.arange(1, 39)])
    made = make_store(tmp_path / "x.zarr", {"train": (make_images(138, 4), labels)}, chunk_images=138)
    copy_store(made, tmp_path / "y.zarr", codec=codec, n_jobs=1, quiet=True)
    names = [item.find("b")[0].text for item in sheet(read_page(write_report(tmp_path / "y.zarr")), 0).find("li")]
    assert sorted(names) == ["class000"] * 2 + [f"class{i:03d}" for i in range(1, 39)]


def test_draws_are_even() -> None:
    """Each sample of a class, and each class where there are too many, is as likely as another."""
    labels, seen = np.array([5] * 4 + [-2] * 2 + [7] * 3), np.zeros(9, int)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        chosen = draw(labels, 2, rng)
        assert len(set(labels[chosen])) == 2
        seen[chosen] += 1
    assert seen == pytest.approx([500] * 4 + [1000] * 2 + [667] * 3, abs=100)
    assert sorted(draw(labels, 100, rng)) == list(range(9))
    assert not len(draw(labels[:0], 3, rng))


def test_absolute_keys_are_shown_relative_to_their_folder(store: Path) -> None:
    one = open_store(store)["val"]
    keys = [b"/data/own/%d/%s" % (i % 3, one.key(i)) for i in range(9)]
    change(store, "val", keys=keys, bad_samples=[{"slot": 9, "key": "/data/own/9/x.png", "reason": "truncated"}])
    page = read_page(write_report(store))
    keys_shown = [e.text for e in sheet(page, 1).find("bdi", "key")]
    assert sorted(keys_shown) == sorted(key.decode().removeprefix("/data/own/") for key in keys)
    assert "/data/own/" in [e.text for e in section_of(page, 1).find("code")]
    assert "relative" not in section_of(page, 0).text


@pytest.mark.parametrize(("num_bad", "is_open"), [(12, True), (13, False)])
def test_a_short_list_of_bad_samples_is_open(tmp_path: Path, num_bad: int, is_open: bool) -> None:
    splits = {"train": (make_images(60), np.zeros(60, int))}
    page = read_page(write_report(make_store(tmp_path / "x.zarr", splits, bad={"train": list(range(num_bad))})))
    (listing,) = section_of(page, 0).find("details")
    assert ("open" in listing.attributes) is is_open
    assert len(listing.tables()["Bad samples"]) == num_bad + 1


def test_original_sizes(tmp_path: Path) -> None:
    num = 50
    store = make_store(tmp_path / "x.zarr", {"train": (make_images(num, 16), [0] * num)}, bad={"train": [0]})
    rng = np.random.default_rng(0)
    sizes = rng.integers(10, 400, (num, 2)).astype(np.int32)
    sizes[1:6] = (375, 500)
    sizes[0] = 0
    change(store, "train", sizes=sizes)
    page = read_page(write_report(store))
    good = sizes[1:].tolist()
    short, long = sorted(min(pair) for pair in good), sorted(max(pair) for pair in good)
    ratio = sorted(width / height for height, width in good)

    def at(values: list[Any], share: float) -> Any:
        return values[max(0, int(np.ceil(share * len(values))) - 1)]

    shares = (0, 0.05, 0.5, 0.95, 1)
    assert page.tables()["Quantiles"][1:] == [
        ["Shorter side", *(str(at(short, share)) for share in shares)],
        ["Longer side", *(str(at(long, share)) for share in shares)],
        ["Width ÷ height", *(f"{at(ratio, share):.2f}" for share in shares)],
    ]
    enlarged = sum(min(pair) < 16 for pair in good)
    assert f"{len({tuple(pair) for pair in good})} different sizes, most often 500 × 375 (10.2%)" in page.text
    assert f"{enlarged} image" in page.text
    assert "had to be enlarged to fill 16 px" in page.text
    (bars,) = [svg for svg in page.find("svg") if svg.attributes["aria-label"].startswith("Shorter side")]
    drawn = [int(title.text.split(": ")[1]) for title in bars.find("title")]
    assert sum(drawn) == 49
    (cells,) = [svg for svg in page.find("svg") if svg.attributes["aria-label"].startswith("Heights and widths")]
    assert 20 < sum(path.attributes["d"].count("M") for path in cells.find("path", "fill")) <= 45


def test_one_size_needs_no_chart(store: Path) -> None:
    page = read_page(write_report(store))
    assert "Every image was 8 × 8 pixels." in page.text
    assert not [svg for svg in page.find("svg") if "Shorter side" in svg.attributes["aria-label"]]


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 2), (5, 6), (20, 9331), (256, 256), (1, 100_000)])
def test_bins_hold_every_whole_number(low: int, high: int) -> None:
    edges = log_edges(low, high)
    assert len(edges) <= 41
    assert edges[0] < low
    assert edges[-1] > high
    assert np.all(np.diff(edges) > 0)


def test_names_and_keys_are_text_whatever_is_in_them(tmp_path: Path) -> None:
    evil = "</title></style><script>alert(1)</script>&amp;\"'"
    store = make_store(
        tmp_path / '<b>&".zarr', {"train": (make_images(4), [0, 1, -2, 0])}, class_ids=[evil, "\udcff\u202egnp"]
    )
    keys = [b"\xff\xfe<img src=x onerror=alert(1)>\x00\n", "שלום/日本.png".encode(), b"", b"k" * 5000]
    change(
        store,
        "train",
        keys=keys,
        source_modes={evil: 1, "L": 3},
        resizer=evil,
        recipe={evil: evil},
        bad_samples=[],
        root={"class_names": [evil, "\udcff\u202egnp"]},
    )
    path = write_report(store)
    text = path.read_text()
    assert "<script" not in text.lower()
    assert "<img src=x" not in text
    page = read_page(path)
    shown = [e.text for e in sheet(page, 0).find("bdi", "key")]
    assert "\\xff\\xfe<img src=x onerror=alert(1)>\\x00\\n" in shown
    assert "שלום/日本.png" in shown
    assert max(len(key) for key in shown) == 43
    assert "k" * 5000 in [e.attributes["title"] for e in sheet(page, 0).find("bdi", "key")]
    assert page.find("h1")[0].text == '<b>&".zarr'
    classes = page.tables()["Samples per class"]
    assert [row[1] for row in classes[1:]] == [evil, "\\udcff\\u202egnp"]
    assert "unlabelled" in section_of(page, 0).text


def test_unlabelled_and_wholly_bad_splits(tmp_path: Path) -> None:
    splits = {"test": (make_images(5), [-2] * 5), "bad": (make_images(3), [0, 0, 0]), "train": (make_images(2), [0, 0])}
    store = make_store(tmp_path / "x.zarr", splits, bad={"bad": [0, 1, 2]})
    page = read_page(write_report(store))
    names = [e.text for e in page.find("nav")[0].find("a")]
    assert names == ["train", "bad", "test", "Disk use", "Verification", "Recipe and provenance"]
    assert "There is no sample to show." in section_of(page, 1).text
    assert "No sample has a recorded size." in section_of(page, 1).text
    assert "The samples have no labels." in section_of(page, 2).text
    assert page.tables()["Splits at a glance"][3][:6] == ["test", "as in the source", "5", "5", "0", "0"]
    everything = make_store(tmp_path / "y.zarr", {"all": (make_images(5), [-2] * 5)})
    assert "Samples per class" not in read_page(write_report(everything)).tables()


def test_many_classes_are_summed_up(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 30, 100)
    counts[17], counts[42], counts[5] = 99, 0, 0
    labels = np.repeat(np.arange(100), counts)
    ids = [f"n{i:08d}" for i in range(100)]
    store = make_store(tmp_path / "x.zarr", {"train": (make_images(len(labels), 2), labels)}, class_ids=ids)
    change(store, "train", root={"class_names": [f"thing {i}" for i in range(100)]})
    page = read_page(write_report(store))
    tables = section_of(page, 0).tables()
    order = sorted(range(100), key=lambda i: (-counts[i], i))
    assert tables["The 5 largest"][1:] == [[f"thing {i} ({ids[i]})", str(counts[i])] for i in order[:5]]
    assert tables["The 5 largest"][1][0] == "thing 17 (n00000017)"
    assert tables["The 5 smallest"][1:] == [[f"thing {i} ({ids[i]})", str(counts[i])] for i in order[::-1][:5]]
    ranked = sorted(counts.tolist())
    text = section_of(page, 0).text
    assert "2 without any sample (thing 5 (n00000005), thing 42 (n00000042))" in text
    assert f"Median {ranked[49]}; 5% of the classes have at most {ranked[4]}, 5% more than {ranked[94]}." in text
    every = page.tables()["All classes and their samples in each split"]
    assert every[0] == ["Label", "Id", "Name", "train"]
    assert every[1:] == [[str(i), ids[i], f"thing {i}", str(counts[i])] for i in range(100)]
    assert "Classes" in [e.text for e in page.find("nav")[0].find("a")]


def test_many_equal_classes_need_no_chart(tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.zarr", {"train": (make_images(100, 2), np.arange(100) % 50)})
    text = section_of(read_page(write_report(store)), 0).text
    assert "50 classes of 2 samples each." in text
    assert "largest" not in text


def test_gray_images(tmp_path: Path) -> None:
    images = make_images(6, 50, channels=1)
    page = read_page(write_report(make_store(tmp_path / "x.zarr", {"val": (images, [0] * 6)})))
    assert "50 × 50 gray images" in page.text
    assert [row[0] for row in page.tables()["Mean and spread of each channel"][1:]] == ["gray"]
    assert {image_of(image).mode for image in page.find("img")} == {"L"}


def test_large_images_become_thumbnails(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(0, 200, dtype=np.uint8)[:, None, None], (3, 200, 200, 3))
    page = read_page(write_report(make_store(tmp_path / "x.zarr", {"val": (ramp, [0] * 3)})))
    for element in page.find("img"):
        image = image_of(element)
        assert (image.format, image.size) == ("JPEG", (160, 160))
        assert np.abs(np.asarray(image, int)[80, 80] - 100).max() <= 3


def test_pictures_stay_within_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path / "x.zarr", {"val": (make_images(30, 64), [0] * 30)})
    monkeypatch.setattr(report, "PICTURE_BYTES", 20_000)
    page = read_page(write_report(store))
    assert 1 <= len(page.find("img")) < 30
    assert sum(len(image.attributes["src"]) for image in page.find("img")) <= 20_000


@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_compressed_stores(tmp_path: Path, store: Path, labels: np.ndarray, codec: str) -> None:
    copy = tmp_path / "z.zarr"
    copy_store(store, copy, codec=codec, n_jobs=1, quiet=True)
    page = read_page(write_report(copy))
    slots = [int(e.text[6:12]) for e in sheet(page, 0).find("bdi", "key")]
    assert len(set(slots)) == len(slots) > 20
    assert len({slot // 7 for slot in slots}) > 4
    assert "as the store is compressed" not in page.text
    images = make_images(60)
    for slot, image in zip(slots, section_of(page, 0).find("img"), strict=True):
        np.testing.assert_array_equal(np.asarray(image_of(image)), images[slot])
    assert page.tables()["Files and bytes"][1][1] == codec
    assert "the pixels of 4 random chunks out of 9 are unaltered" in page.one("checks").text
    assert f"python -m pipeline copy {copy} NEW.zarr --codec none" in page.text
    (copy / "train" / "images" / "c.0.0.0.0").write_bytes(b"no chunk")
    with pytest.raises(StoreError, match=r"c\.0\.0\.0\.0: can't be read"):
        for seed in range(20):
            write_report(copy, seed=seed)


def test_says_what_was_checked(store: Path) -> None:
    page = read_page(write_report(store, seed=0))
    lines = [item.text for item in page.one("checks").find("li")]
    assert lines == [
        "✓passed: all 9 chunk files are there, in full size",
        "✓passed: labels, keys, sizes and digests are unaltered, and fit the sample fingerprint (SHA-256)",
        "✓passed: the pixels of 4 random chunks out of 9 are unaltered (SHA-256)",
        "✓passed: all 2 chunk files are there, in full size",
        "✓passed: labels, keys, sizes and digests are unaltered, and fit the sample fingerprint (SHA-256)",
        "✓passed: the pixels of all 2 chunks are unaltered (SHA-256)",
    ]
    assert f"python -m pipeline verify {store}" in page.one("checks").text


def test_damage_is_on_the_page_and_raised(store: Path) -> None:
    images = store / "train" / "images"
    (images / "c.2.0.0.0").unlink()
    (images / "c.4.0.0.0").write_bytes(b"short")
    with pytest.raises(StoreError, match=r"c\.2\.0\.0\.0: missing chunk \(and 1 more\); .*x\.html lists them; restore"):
        write_report(store)
    page = read_page(store.with_suffix(".html"))
    bad = [item.text for item in page.one("checks").find("li", "bad")]
    assert bad == [
        f"✗failed: {images / 'c.2.0.0.0'}: missing chunk",
        f"✗failed: {images / 'c.4.0.0.0'}: short chunk, 5 of 1,460 bytes",
    ]
    assert page.facts()["State"].startswith("✗ damaged")
    slots = [int(e.text[6:12]) for e in sheet(page, 0).find("bdi", "key")]
    assert slots
    assert not {2, 4} & {slot // 7 for slot in slots}


def test_altered_pixels_and_labels_are_found(store: Path) -> None:
    chunk = store / "val" / "images" / "c.0.0.0.0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(StoreError, match=r"val/images/c\.0\.0\.0\.0: altered"):
        write_report(store)
    labels = store / "train" / "labels" / "c.0"
    values = np.fromfile(labels, "<i4")
    values[0] = 77
    values.tofile(labels)
    with pytest.raises(StoreError, match=r"and 3 more"):
        write_report(store)
    bad = [item.text for item in read_page(store.with_suffix(".html")).one("checks").find("li", "bad")]
    assert any("label 77, outside the 3 classes" in line for line in bad)
    assert any("labels: altered" in line for line in bad)
    assert any("sample_fingerprint" in line for line in bad)


def test_unreadable_arrays_make_no_page(store: Path) -> None:
    (store / "train" / "labels" / "c.0").write_bytes(b"1234")
    with pytest.raises(StoreError, match=r"labels/c\.0: 4 of 240 bytes; restore"):
        write_report(store)
    assert not store.with_suffix(".html").exists()


def test_errors_are_one_line_each(tmp_path: Path, store: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="no store there"):
        write_report(tmp_path / "nothing.zarr")
    with pytest.raises(UsageError, match="is a folder; give --out the name of a file"):
        write_report(store, tmp_path)
    for split in ("train", "val"):
        shutil.rmtree(store / split)
    with pytest.raises(StoreError, match="no complete split"):
        write_report(store)


def test_a_full_disk_leaves_the_earlier_page(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(store)
    before = path.read_bytes()

    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pipeline.store.atomic.os.fsync", no_space)
    with pytest.raises(Error, match=r"x\.html: can't be written \(No space left on device\); give another --out"):
        write_report(store)
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["x.html", "x.zarr"]


def test_page_goes_where_it_was_told(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tmp_path / "new folder" / "p.html"
    assert write_report(str(store), str(wanted)) == wanted
    read_page(wanted)
    assert [path.name for path in wanted.parent.iterdir()] == ["p.html"]
    assert default_path(Path("data/x.zarr")) == Path("data/x.html")
    assert default_path(Path("data/x")) == Path("data/x.html")
    assert default_path(Path("x.y.zarr/")) == Path("x.y.html")
    monkeypatch.chdir(store)
    assert default_path(Path(".")) == tmp_path / "x.html"


def test_every_codec_is_reported_on_without_a_warning(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.zarr", {"train": (make_images(5), [0, 1, 0, 1, 0])})
    copy_store(store, tmp_path / "b.zarr", codec="max", quiet=True)
    assert write_report(tmp_path / "b.zarr").exists()  # a warning would be an error here


def test_how_val_was_drawn_is_on_the_page(tmp_path: Path) -> None:
    items = [(make_images(1, 4)[0], i % 2) for i in range(40)]
    convert(items, tmp_path / "x.zarr", size=4, val_fraction=0.25, quiet=True)
    assert "fraction 0.25" in write_report(tmp_path / "x.zarr").read_text()
