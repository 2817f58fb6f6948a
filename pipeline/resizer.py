"""The resizer in use, and whether this installation of PIL is sound: `python -m pipeline.resizer` exits 0 or 1.

pillow-simd resizes six times as fast as Pillow, but both own the folder `PIL`, torchvision needs the distribution
called `pillow`, and laying pillow-simd over it loses what its core was built without (JPEG 2000 and compressed TIFF,
unless those headers are installed). So `PIL` stays Pillow's own, complete and untouched, and only pillow-simd's
compiled core is installed, under a name of its own: the distribution `pillow-simd-core` with one module,
`pillow_simd_core._imaging`, made by `pipeline/install_resizer.py`. Pillow decodes, that core resizes. Where it can't
be built, Pillow's core, which has the same interface, resizes too: slower, and pixels differ by 1 or 2 of 255.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import io
import sys
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
import PIL
from PIL import Image, features

from pipeline.packages import CORE_MODULE, cpu_flags, file_problems, installed_core, instruction_set, pil_owners

FILTERS = {
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
# Blocks of memory (16 MB at most each) that the core keeps for the next image. Without any, each resize gets its
# pages from the kernel anew, which takes longer than the resize.
CACHED_BLOCKS = 3
REPAIR = "run `python -m pipeline.install_resizer`"


@functools.cache
def _load_core() -> tuple[ModuleType | None, str]:
    """pillow-simd's core, or None and why it isn't used."""
    version = installed_core()
    if version is None:
        return None, "pillow-simd isn't installed"
    needed = instruction_set(version).replace(".", "_")
    if needed not in cpu_flags():
        return None, f"pillow-simd was built for {needed}, which this processor lacks; {REPAIR}"
    try:
        core = importlib.import_module(f"{CORE_MODULE}._imaging")
    except ImportError as error:
        return None, f"pillow-simd can't be loaded ({error}); {REPAIR}"
    core.set_blocks_max(CACHED_BLOCKS)
    return core, ""


def resizer() -> str:
    """What resizes here, such as `pillow-simd 12.1.1.post0 (avx2)` or `pillow 12.1.1`."""
    core, _ = _load_core()
    if core is None:
        return f"pillow {PIL.__version__}"
    version = installed_core() or ""
    return f"pillow-simd {version.partition('+')[0]} ({instruction_set(version)})"


@functools.cache
def software_versions() -> dict[str, str]:
    """Everything whose version can change a store's bytes: our own, the resizer, decoders and the array writer."""
    from pipeline import __version__

    versions = {"efficient-imagenet": __version__, "resizer": resizer()}
    for name in ("pillow", "simplejpeg", "numpy", "zarr"):
        versions[name] = importlib.metadata.version(name)
    for feature in ("libjpeg_turbo", "zlib", "webp", "avif", "jpg_2000", "libtiff"):
        versions[feature.replace("jpg_2000", "openjpeg")] = str(features.version(feature))
    return versions


def resize_into(
    pixels: np.ndarray,
    box: tuple[float, float, float, float],
    size: tuple[int, int],
    filter_name: str,
    out: np.ndarray,
    *,
    core: ModuleType | None = None,
) -> None:
    """Resize part of an image in one antialiased pass.

    Args:
        pixels: uint8 (h, w, 4), C-contiguous; R, G, B and a byte that is ignored. Read in place.
        box: left, top, right, bottom of the part, fractional pixels inside the image.
        size: (width, height) to make of it.
        filter_name: one of `FILTERS`.
        out: uint8 (height, width, 3), or (height, width, 1) for the ITU-R 601-2 luma.
        core: for tests, a core other than the one in use.
    """
    if core is None:
        core = _load_core()[0] or Image.core
    height, width = pixels.shape[:2]
    image = core.map_buffer(pixels, (width, height), "raw", 0, ("RGBX", 0, 1))
    image = image.resize(size, FILTERS[filter_name], box)
    if out.shape[2] == 1:
        image = image.convert("L", 0)
    raw_mode = "L" if out.shape[2] == 1 else "RGB"
    encoder = core.raw_encoder(image.mode, raw_mode, 0, 1)
    encoder.setimage(image, (0, 0, *size))  # Pillow 13 wants the part, here all of it
    packed = encoder.encode(out.size)[2]
    out[...] = np.frombuffer(packed, np.uint8).reshape(out.shape)


# Checks


def _photo() -> np.ndarray:
    """uint8 (384, 512, 4): a smooth pattern with edges, the same on every machine."""
    y, x = np.mgrid[0:384, 0:512]
    waves = [
        128 + 90 * np.sin(x / (9 + 4 * i)) * np.cos(y / (13 - 3 * i)) + 30 * ((x // 37 + y // 29) % 2)
        for i in (0, 1, 2)
    ]
    return np.ascontiguousarray(np.dstack([*waves, waves[0]]).clip(0, 255).astype(np.uint8))


def speedup() -> float:
    """How many times as fast as Pillow's the core in use resizes one 512 x 384 photograph to 256 pixels."""
    pixels, out = _photo(), np.empty((256, 256, 3), np.uint8)

    def seconds(core: ModuleType) -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            resize_into(pixels, (64.0, 0.0, 448.0, 384.0), (256, 256), "bicubic", out, core=core)
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(Image.core) / seconds(_load_core()[0] or Image.core)


def _round_trip(extension: str, **options: object) -> Callable[[], str | None]:
    def run() -> str | None:
        image, buffer = Image.fromarray(_photo()[:64, :64, :3]), io.BytesIO()
        try:
            image.save(buffer, extension, **options)
            again = np.asarray(Image.open(buffer).convert("RGB"))
        except (OSError, KeyError) as error:
            return f"{extension}: {error}"
        difference = float(np.abs(again.astype(int) - np.asarray(image)).mean())
        return f"{extension}: comes back altered by {difference:.1f} of 255" if difference > 8 else None

    return run


_ROUND_TRIPS = {
    "JPEG": _round_trip("JPEG", quality=95),
    "PNG": _round_trip("PNG"),
    "WebP": _round_trip("WEBP", lossless=True),
    "AVIF": _round_trip("AVIF", quality=95),
    "JPEG 2000": _round_trip("JPEG2000"),
    "compressed TIFF": _round_trip("TIFF", compression="tiff_lzw"),
}


def missing_formats() -> list[str]:
    """Formats that this PIL was built without; such images become bad samples."""
    Image.init()
    return [name for name, run in _ROUND_TRIPS.items() if run() is not None]


def core_problems() -> list[str]:
    """What is wrong with pillow-simd's core; [] where it is sound, or not installed."""
    core, why = _load_core()
    if core is None:
        return [why] if installed_core() is not None else []
    problems = []
    if (installed_core() or "").partition("+")[0] != core.PILLOW_VERSION:
        problems.append(f"{core.__file__}: holds {core.PILLOW_VERSION}, installed as {installed_core()}; {REPAIR}")
    pixels, ours, stock = _photo(), np.empty((96, 96, 3), np.uint8), np.empty((96, 96, 3), np.uint8)
    for name in FILTERS:
        for result, used in ((ours, core), (stock, Image.core)):
            resize_into(pixels, (30.5, 0.25, 414.0, 383.5), (96, 96), name, result, core=used)
        difference = int(np.abs(ours.astype(int) - stock).max())
        if difference > 3:
            problems.append(f"pillow-simd's {name} filter differs from Pillow's by {difference} of 255; {REPAIR}")
    return problems


def check_coherent() -> list[str]:
    """What is wrong with this installation of PIL and of the resizer, one line each; [] when all is well.

    Checks that one distribution owns the folder PIL, that each file there is of that release, that Python files and
    the compiled core agree, that JPEG and PNG come back, and that the resizer works.
    """
    problems = []
    owners = pil_owners()
    if len(owners) > 1:
        problems.append(f"{' and '.join(owners)} share the folder PIL; {REPAIR}")
    elif owners and (wrong := file_problems(importlib.metadata.distribution(owners[0]))):
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        problems.append(f"{wrong[0]}{more}; {REPAIR}")
    if PIL.__version__ != Image.core.PILLOW_VERSION:
        problems.append(f"PIL is {PIL.__version__}, its core {Image.core.PILLOW_VERSION}; {REPAIR}")
    Image.init()
    problems += [line for name in ("JPEG", "PNG") if (line := _ROUND_TRIPS[name]()) is not None]
    return problems + core_problems()


def report() -> tuple[list[str], bool]:
    """Lines for the person who installs, and whether all is well."""
    problems = check_coherent()
    lines = [f"error: {problem}" for problem in problems]
    core, why = _load_core()
    if core is None:
        lines.append(
            f"resizer: {resizer()}, without SIMD: {why}. Everything works; conversion takes two to three times as long"
        )
    else:
        lines.append(f"resizer: {resizer()}, {speedup():.1f} times as fast as pillow {PIL.__version__} here")
    lost = missing_formats()
    if lost:
        lines.append(f"formats: this Pillow can't read {', '.join(lost)}; images in them will be bad samples")
    return lines, not problems


def main() -> int:
    lines, sound = report()
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
