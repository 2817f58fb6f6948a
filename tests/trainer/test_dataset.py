"""The Dataset, alone and under a default DataLoader."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.synthetic import random_store
from stores import as_format_1, make_images, make_store
from torch.utils.data import ConcatDataset, DataLoader, default_collate

from pipeline.commands.copy_store import copy_store
from pipeline.errors import StoreError, StoreNotFoundError, UsageError
from pipeline.store.reader import open_store
from trainer import dataset as dataset_module
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
from trainer.order import crop_offsets, epoch_order
from trainer.reading import collate as collate_module
from trainer.reading.collate import KEPT_BATCHES, BatchMemory, Samples, collate
from trainer.reading.read_ahead import QUIET_BATCHES

NUM, BAD = 53, [3, 17, 52]
IMAGES = make_images(NUM, 12)
VALID = [i for i in range(NUM) if i not in BAD]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    splits = {"train": (IMAGES, np.arange(NUM) % 10), "val": (IMAGES[:11], np.arange(11) % 10)}
    return make_store(tmp_path_factory.mktemp("data") / "s.zarr", splits, bad={"train": BAD})


def chw(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image.transpose(2, 0, 1).copy())


def test_whole_images_in_the_epochs_order(store):
    data = RankPartitionedDataset(store)
    assert len(data) == data.num_samples == NUM - len(BAD)
    for epoch in (0, 3):
        data.set_epoch(epoch)
        order = np.array(VALID)[epoch_order(0, epoch, len(VALID))]
        for i in range(len(data)):
            image, label = data[i]
            assert data.slot(i) == order[i]
            assert torch.equal(image, chw(IMAGES[order[i]]))
            assert label == order[i] % 10
            assert type(label) is int


def test_random_crops_are_keyed_by_seed_epoch_and_slot(store):
    places = []
    for seed, epoch, rank, world_size in ((0, 0, 0, 1), (0, 0, 1, 2), (0, 1, 0, 1), (1, 0, 0, 1)):
        data = RankPartitionedDataset(store, rank=rank, world_size=world_size, seed=seed, crop=7)
        data.set_epoch(epoch)
        for i in range(len(data)):
            slot = data.slot(i)
            top, left = (int(x[0]) for x in crop_offsets(seed, epoch, np.array([slot]), (5, 5)))
            assert torch.equal(data[i][0], chw(IMAGES[slot][top : top + 7, left : left + 7]))
            if i == 0:
                places.append((slot, top, left))
    assert len(set(places)) > 1


def test_evaluation_crops_centrally_in_the_stores_order(store):
    data = RankPartitionedDataset(store, "val", rank=1, world_size=3, crop=7)
    assert [data.slot(i) for i in range(len(data))] == [1, 4, 7, 10]
    data.set_epoch(5)
    assert torch.equal(data[2][0], chw(IMAGES[7][2:9, 2:9]))


@pytest.mark.parametrize(("size", "crop"), [(8, 5), (8, 6), (7, 4), (9, 2), (10, 3), (6, 6)])
def test_the_centre_is_torchvisions(tmp_path, size, crop):
    from torchvision.transforms.v2.functional import center_crop

    images = make_images(2, size)
    data = RankPartitionedDataset(make_store(tmp_path / "s", {"val": (images, [0, 1])}), "val", crop=crop)
    assert torch.equal(data[1][0], center_crop(chw(images[1]), [crop, crop]))


@pytest.mark.parametrize("order", ["random", "windowed"])
def test_ranks_share_the_order(store, order):
    whole = RankPartitionedDataset(store, order=order, window=2)
    for world_size in (2, 3, 7):
        for rank in range(world_size):
            data = RankPartitionedDataset(store, rank=rank, world_size=world_size, order=order, window=2)
            slots = [data.slot(i) for i in range(len(data))]
            assert slots == [whole.slot(i) for i in range(rank, len(data) * world_size, world_size)]
            assert len(data) == len(whole) // world_size


def test_evaluation_serves_everything_once_at_any_world_size(store):
    for world_size in (1, 2, 4, 11, 15):
        slots = []
        for rank in range(world_size):
            data = RankPartitionedDataset(store, "val", rank=rank, world_size=world_size)
            slots += [data.slot(i) for i in range(len(data))]
        assert sorted(slots) == list(range(11))


def test_train_may_be_chosen_against_the_splits_name(store):
    assert RankPartitionedDataset(store, "train", train=False).slot(0) == 0
    assert [RankPartitionedDataset(store, "val", train=True).slot(i) for i in range(11)] == epoch_order(
        0, 0, 11
    ).tolist()


def test_what_it_returns_is_a_writable_copy(store):
    data = RankPartitionedDataset(store, train=False)
    samples = data.__getitems__([0, 1])
    samples[0][0].fill_(7)
    samples[0][0].permute(1, 2, 0).numpy()[0, 0, 0] = 8
    assert torch.equal(samples[1][0], chw(IMAGES[1]))
    assert torch.equal(data[0][0], chw(IMAGES[0]))


def test_indices_count_as_in_a_list(store):
    data = RankPartitionedDataset(store)
    assert torch.equal(data[-1][0], data[len(data) - 1][0])
    assert data.__getitems__([]) == []
    for i in (len(data), -len(data) - 1):
        with pytest.raises(IndexError, match="of 50"):
            data[i]
    assert len(list(data)) == len(data)  # the old iteration protocol ends


def collect(loader: DataLoader) -> list[tuple[bytes, int]]:
    """All (pixels, label) that a DataLoader serves, sorted."""
    served = []
    for images, labels in loader:
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        served += [
            (image.contiguous().numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True)
        ]
    return sorted(served)


def wanted(data: RankPartitionedDataset) -> list[tuple[bytes, int]]:
    return sorted((image.contiguous().numpy().tobytes(), label) for image, label in (data[i] for i in range(len(data))))


@pytest.mark.parametrize("start", ["fork", "forkserver"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_under_a_default_dataloader_with_persistent_workers(store, start, shuffle):
    data = RankPartitionedDataset(store, crop=9)
    data[0]  # the parent has read before it forks
    loader = DataLoader(
        data, batch_size=8, shuffle=shuffle, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )
    epochs = []
    for epoch in (0, 1, 4):
        data.set_epoch(epoch)
        epochs.append(collect(loader))
        assert epochs[-1] == wanted(data)
    assert epochs[0] != epochs[1]  # running workers saw the change
    del loader


def test_without_workers_and_without_getitems(store):
    data = RankPartitionedDataset(store, crop=9)
    assert collect(DataLoader(data, batch_size=7)) == wanted(data)
    assert len(DataLoader(data, batch_size=None)) == len(data)


def test_it_pickles_small_and_reads_after(store):
    data = RankPartitionedDataset(store, crop=9, seed=4)
    data.set_epoch(2)
    data[0]
    pickled = pickle.dumps(data)
    assert len(pickled) < 2_000
    again = pickle.loads(pickled)
    assert again.epoch == 2
    assert torch.equal(again[5][0], data[5][0])
    assert again[5][1] == data[5][1]


def test_an_open_store_may_be_given(store):
    assert torch.equal(RankPartitionedDataset(open_store(store))[3][0], RankPartitionedDataset(str(store))[3][0])


def test_unlabelled_samples_are_served(tmp_path):
    data = RankPartitionedDataset(make_store(tmp_path / "s", {"train": (IMAGES[:5], [-2, -2, 0, -2, -2])}))
    assert sorted(data[i][1] for i in range(5)) == [-2, -2, -2, -2, 0]


def test_open_maps_outlive_the_store(tmp_path):
    path = make_store(tmp_path / "s", {"train": (IMAGES, np.zeros(NUM))})
    data = RankPartitionedDataset(path)
    before = wanted(data)
    shutil.rmtree(path)
    assert wanted(data) == before
    with pytest.raises(StoreNotFoundError, match="no store there"):
        pickle.loads(pickle.dumps(data))[0]


def test_a_replaced_store_is_noticed_by_new_workers(tmp_path):
    path = make_store(tmp_path / "s", {"train": (IMAGES, np.zeros(NUM))})
    data = RankPartitionedDataset(path)
    before = wanted(data)
    shutil.rmtree(path)
    make_store(path, {"train": (IMAGES[::-1], np.ones(NUM))})
    assert wanted(data) != []
    other = pickle.loads(pickle.dumps(data))
    with pytest.raises(StoreError, match="replaced by another store"):
        other[0]
    assert len(before) == NUM


def test_a_worker_names_what_is_wrong(tmp_path):
    path = make_store(tmp_path / "s", {"train": (IMAGES, np.zeros(NUM))})
    loader = DataLoader(RankPartitionedDataset(path), batch_size=4, num_workers=1, multiprocessing_context="forkserver")
    (path / "train" / "images" / "c.2.0.0.0").unlink()
    with pytest.raises(StoreError, match=r"c\.2\.0\.0\.0: missing chunk"):
        next(iter(loader))


def test_damage_is_found_when_the_store_is_opened(tmp_path):
    path = make_store(tmp_path / "s", {"train": (IMAGES, np.zeros(NUM))})
    chunk = path / "train" / "images" / "c.1.0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"c\.1\.0\.0\.0: short chunk"):
        RankPartitionedDataset(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": 13}, "crop 13: images .* are 12x12; choose 1 to 12"),
        ({"crop": 0}, "crop 0"),
        ({"world_size": 51}, "world size 51 is larger than the 50 samples"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world size 2"),
        ({"rank": -1, "world_size": 2}, "rank -1"),
        ({"world_size": 0}, "world size 0"),
        ({"order": "sorted"}, "order 'sorted': must be random or windowed"),
        ({"window": 0}, "window 0: must be at least 1"),
        ({"seed": -1}, "seed -1"),
        ({"split": "test"}, "no split 'test'"),
    ],
)
def test_wrong_use_is_one_line(store, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        RankPartitionedDataset(store, options.pop("split", "train"), **options)
    assert "\n" not in str(caught.value)


def test_a_negative_epoch_is_refused(store):
    with pytest.raises(UsageError, match="epoch -1"):
        RankPartitionedDataset(store).set_epoch(-1)


def test_a_compressed_store_is_refused(tmp_path):
    path = make_store(tmp_path / "s", {"train": (IMAGES, np.zeros(NUM))})
    copy_store(path, tmp_path / "z", codec="zstd", quiet=True)
    with pytest.raises(UsageError, match="compressed .*pipeline copy .* --codec none"):
        RankPartitionedDataset(tmp_path / "z")


@pytest.mark.parametrize("order", ["random", "windowed"])
def test_a_store_of_format_1_serves_the_same(store, tmp_path, order):
    old = as_format_1(shutil.copytree(store, tmp_path / "old.zarr"))
    here, there = (RankPartitionedDataset(path, order=order, window=2, crop=7) for path in (store, old))
    for i in range(len(here)):
        assert here.slot(i) == there.slot(i)
        assert torch.equal(here[i][0], there[i][0])
        assert here[i][1] == there[i][1]
    loaders = [Loader(data, batch_size=8) for data in (here, there)]
    for (images, labels), (old_images, old_labels) in zip(*loaders, strict=True):
        assert torch.equal(images, old_images)
        assert torch.equal(labels, old_labels)


def test_cold_data_is_asked_for_and_warm_data_is_not(store, monkeypatch):
    asked, reads = [], iter(range(10**6))
    monkeypatch.setattr(dataset_module, "will_need", lambda addresses, extent: asked.append(len(addresses)))
    data = RankPartitionedDataset(store, crop=5)
    cold = True
    monkeypatch.setattr("trainer.reading.read_ahead.disk_reads", lambda: next(reads) if cold else -1)
    for _ in range(20):
        data.__getitems__([0, 1, 2])
    assert asked == [3] * 20
    cold = False
    for _ in range(20):
        data.__getitems__([0, 1, 2])
    assert len(asked) == 20 + QUIET_BATCHES


def test_importing_it_brings_in_nothing_of_the_converter(store):
    code = (
        "import sys, trainer.dataset, trainer.loader\n"
        f"trainer.dataset.RankPartitionedDataset({str(store)!r})[0]\n"
        "assert not {'joblib', 'PIL', 'zarr', 'numcodecs', 'simplejpeg', 'torchvision'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_thousand_chunks_under_sixty_four_descriptors(tmp_path):
    random_store(tmp_path / "s", 1_000, size=4, chunk_bytes=48)
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import torch
from torch.utils.data import ConcatDataset, DataLoader, default_collate
from trainer.dataset import RankPartitionedDataset
from trainer.loader import Loader
if __name__ == "__main__":
    data = RankPartitionedDataset({str(tmp_path / "s")!r})
    assert sum(len(labels) for _, labels in Loader(data, 100, threads=2)) == 1_000
    for start, workers in ("fork", 2), ("spawn", 1):
        loader = DataLoader(data, batch_size=500, num_workers=workers, multiprocessing_context=start)
        assert sum(len(labels) for _, labels in loader) == 1_000
"""
    (tmp_path / "script.py").write_text(code)
    subprocess.run([sys.executable, str(tmp_path / "script.py")], check=True, cwd=Path(__file__).parents[2])


# Batches of a DataLoader


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_dataloader_are_channels_last(store, own, workers):
    data = RankPartitionedDataset(store, crop=9)
    loader = data.dataloader(8, workers) if own else DataLoader(data, 8, num_workers=workers)
    at = 0
    for images, labels in loader:
        count = min(8, len(data) - at)
        assert images.shape == (count, 3, 9, 9)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
        for image, label in zip(images, labels, strict=True):
            assert torch.equal(image, data[at][0])
            assert label == data[at][1]
            at += 1
    assert at == len(data)


def test_a_workers_memory_is_used_again_and_never_while_in_use(store):
    data = RankPartitionedDataset(store, crop=9)
    loader = data.dataloader(2, 1, drop_last=True)
    held = []
    for epoch in range(3):
        data.set_epoch(epoch)
        for k, (images, _) in enumerate(loader):
            images += 0  # a batch may be written
            kept = [images, images[1:], images.numpy(), images.untyped_storage()][k % 4]
            held.append((kept, images.clone(), k % 4))
            del images
    assert len(held) == 75
    for kept, want, kind in held:
        if kind == 3:
            assert bytes(kept)[: want.numel()] == want.permute(0, 2, 3, 1).numpy().tobytes()
        else:
            assert np.array_equal(kept, want[1:] if kind == 1 else want)


def test_shared_memory_returns_when_its_batch_is_dropped(monkeypatch):
    monkeypatch.setattr(collate_module, "get_worker_info", lambda: object())
    memory = BatchMemory()
    sent = [memory.take((2, 4, 4, 3)) for _ in range(2)]
    assert len({part.images.data_ptr() for part in sent}) == 2
    receive, (shared, shape) = Samples(sent[0], torch.zeros(2, dtype=torch.int64)).batch[0].__reduce__()
    images = receive(shared, shape)
    images[:] = 7
    assert (sent[0].images == 7).all()
    view = images[1:].numpy()
    del images
    assert memory.take((2, 4, 4, 3)).images.data_ptr() not in {part.images.data_ptr() for part in sent}
    del view
    assert memory.take((2, 4, 4, 3)).images.data_ptr() == sent[0].images.data_ptr()
    for _ in range(20):  # never returned
        memory.take((2, 4, 4, 3))
    assert len(memory._shared) == KEPT_BATCHES


def test_samples_that_were_changed_are_collated_anew(store):
    data = RankPartitionedDataset(store, crop=9)
    samples = data.__getitems__([3, 1, 4])
    assert collate(samples)[0].data_ptr() == samples[0][0].data_ptr()
    for change in (samples.reverse, samples.pop):
        change()
        for function in (collate, default_collate):
            images, labels = function(samples)
            assert torch.equal(images, torch.stack([image for image, _ in samples]))
            assert labels.tolist() == [label for _, label in samples]
            assert images.data_ptr() not in {image.data_ptr() for image, _ in samples}
    other = ConcatDataset([data, data])
    images, _ = next(iter(DataLoader(other, 4, sampler=[0, 51, 2, 53])))
    assert torch.equal(images[1], data[1][0])


# Subsets and weights


def test_a_subset_serves_its_slots_alone(store):
    chosen = np.array([40, 2, 2, 7, 30, 51])
    data = RankPartitionedDataset(store, indices=chosen, seed=3)
    assert len(data) == data.num_samples == 6
    served = [data.slot(i) for i in range(6)]
    assert sorted(served) == sorted(chosen.tolist())
    assert served == chosen[epoch_order(3, 0, 6)].tolist()
    assert torch.equal(data[0][0], RankPartitionedDataset(store, train=False, indices=[served[0]])[0][0])
    val = RankPartitionedDataset(store, "val", indices=[9, 0, 4], rank=0, world_size=2)
    assert [val.slot(i) for i in range(len(val))] == [9, 4]
    assert pickle.loads(pickle.dumps(data)).slot(2) == data.slot(2)
    assert len({d.fingerprint for d in (data, val, RankPartitionedDataset(store))}) == 3


def test_weights_draw_with_replacement_keyed_by_seed_and_epoch(store):
    weights = np.zeros(len(VALID))
    weights[[5, 9, 20]] = 1, 2, 5
    data = RankPartitionedDataset(store, weights=weights)
    counts: Counter[int] = Counter()
    epochs = []
    for epoch in range(200):
        data.set_epoch(epoch)
        epochs.append([data.slot(i) for i in range(len(data))])
        counts.update(epochs[-1])
    assert set(counts) == {VALID[5], VALID[9], VALID[20]}
    total = 200 * len(VALID)
    for place, share in ((5, 1 / 8), (9, 2 / 8), (20, 5 / 8)):
        assert abs(counts[VALID[place]] / total - share) < 6 * (share * (1 - share) / total) ** 0.5
    assert epochs[0] != epochs[1]
    again = RankPartitionedDataset(store, weights=weights)
    assert [again.slot(i) for i in range(len(again))] == epochs[0]
    parts = [RankPartitionedDataset(store, weights=weights, rank=rank, world_size=5) for rank in range(5)]
    assert [parts[i % 5].slot(i // 5) for i in range(50)] == epochs[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"indices": [0, 53]}, "slot 53 .* outside 0..52"),
        ({"indices": [-1]}, "slot -1 .* outside"),
        ({"indices": [1, 17]}, "slot 17 .* bad sample"),
        ({"indices": []}, "at least one slot"),
        ({"indices": [0.5]}, "at least one slot"),
        ({"indices": np.ones(53, bool)}, "flatnonzero"),
        ({"weights": np.ones(53)}, "one for each of the 50"),
        ({"weights": np.zeros(50)}, "not all 0"),
        ({"weights": np.full(50, -1.0)}, "0 or more"),
        ({"weights": np.full(50, np.nan)}, "finite"),
        ({"weights": np.ones(50), "train": False}, "only for training"),
        ({"weights": np.ones(50), "order": "windowed"}, "random order"),
    ],
)
def test_wrong_subsets_are_one_line(store, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        RankPartitionedDataset(store, **options)
    assert "\n" not in str(caught.value)


# Arguments


@pytest.mark.parametrize("name", ["rank", "world_size", "seed", "crop", "train", "order", "window", "crop_shape"])
def test_what_it_was_made_from_cant_be_changed(store, name):
    data = RankPartitionedDataset(store, crop=9)
    with pytest.raises(AttributeError, match=f"{name} can't be changed"):
        setattr(data, name, getattr(data, name))
    assert data[0][0].shape == (3, 9, 9)


def test_numpy_integers_are_integers(store):
    data = RankPartitionedDataset(
        store, rank=np.int8(1), world_size=np.uint8(2), seed=np.uint32(2**32 - 1), crop=np.int16(9), window=np.int8(2)
    )
    want = RankPartitionedDataset(store, rank=1, world_size=2, seed=2**32 - 1, crop=9)
    assert all(type(getattr(data, name)) is int for name in ("rank", "world_size", "seed", "crop", "window"))
    assert torch.equal(data[np.int16(20)][0], want[20][0])
    assert data.slot(np.int8(20)) == want.slot(20)
    with pytest.raises(TypeError):
        RankPartitionedDataset(store, crop=9.0)


def test_a_relative_path_survives_a_change_of_folder(store, monkeypatch, tmp_path):
    monkeypatch.chdir(store.parent)
    data = RankPartitionedDataset(store.name)
    want = data[3][0]
    pickled = pickle.dumps(data)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(pickle.loads(pickled)[3][0], want)
