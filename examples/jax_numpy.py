"""JAX, or anything else that takes numpy arrays: no torch at all, only the store's memory maps and the order.

python examples/jax_numpy.py data/digits-32.zarr [EPOCHS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pipeline import open_store
from pipeline.store.reader import Split
from trainer.order import centre_offsets, crop_offsets, epoch_order

GLOBAL_BATCH, RATE, DECAY = 64, 0.1, 5e-4


def batches(split: Split, slots: np.ndarray, place: tuple[np.ndarray, np.ndarray], crop: int, size: int) -> Iterator:
    """uint8 (size, crop, crop, C) and int32 (size,); the last batch may be smaller."""
    for start in range(0, len(slots), size):
        part = slice(start, start + size)
        rows = zip(slots[part], place[0][part], place[1][part], strict=True)
        yield (
            np.stack([split.image(slot)[top : top + crop, left : left + crop] for slot, top, left in rows]),
            split.labels[slots[part]],
        )


def initial(key: jax.Array, sizes: list[int]) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [{"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)} for k, m, n in shapes]


def main(path: str, epochs: int = 5, seed: int = 0) -> None:
    store = open_store(path)
    train, val = store["train"], store["val"]
    size, crop = train.image_shape[0], train.image_shape[0] * 7 // 8
    mean, std = 255 * jnp.array(train.mean), 255 * jnp.array(train.std)

    def logits(layers: list, images: jax.Array) -> jax.Array:
        x = ((images - mean) / std).reshape(len(images), -1)
        for layer in layers[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ layers[-1]["w"] + layers[-1]["b"]

    def loss(layers: list, images: jax.Array, labels: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits(layers, images)), labels[:, None], 1).mean()

    @jax.jit
    def step(layers: list, images: jax.Array, labels: jax.Array) -> tuple[list, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(layers, images, labels)
        return jax.tree.map(lambda p, g: p - RATE * (g + DECAY * p), layers, gradients), value

    layers = initial(jax.random.key(seed), [crop * crop * train.image_shape[2], 128, len(store.class_ids)])
    # With several processes each takes its share, and the gradients are averaged (jax.lax.pmean over a mesh of all).
    rank, world_size = jax.process_index(), jax.process_count()
    served = train.num_valid // GLOBAL_BATCH * GLOBAL_BATCH
    for epoch in range(epochs):
        slots = train.valid_slots[epoch_order(seed, epoch, train.num_valid)][rank:served:world_size]
        place = crop_offsets(seed, epoch, slots, (size - crop, size - crop))
        for images, labels in batches(train, slots, place, crop, GLOBAL_BATCH // world_size):
            layers, value = step(layers, images, labels)
        slots = val.valid_slots
        place = centre_offsets(len(slots), (size - crop, size - crop))
        hits = [logits(layers, x).argmax(1) == y for x, y in batches(val, slots, place, crop, 256)]
        print(f"epoch {epoch + 1}: loss {value:.3f}, top-1 {jnp.concatenate(hits).mean():.1%} of {len(slots):,}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
