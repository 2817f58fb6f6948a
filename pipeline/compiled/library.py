"""The compiled libraries: what each is made of, which one is installed, and how its functions are called.

A library is a distribution of its own, with one shared library in it, that `install.py` compiles from C sources in
this folder. Its version names these sources by their digest: a library made from other sources is not used. Where none
is installed, the file that came with a wheel is used, if there is one (`bundled/NAME-VERSION.so`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
BUNDLED = SOURCES / "bundled"
CPU_FLAGS = {"avx2": "avx2", "sse4": "sse4_2"}
"""Linux's names of the instruction sets that a processor must have."""
REPAIR = "run `python -m pipeline.compiled.install`"


@dataclass(frozen=True, eq=False)
class Library:
    """One shared library.

    Args:
        name: of the file, `NAME.so`, made from `NAME.c`.
        distribution: what pip calls it.
        sources: names of the files in this folder that it is compiled from.
        functions: for each function its result's type, then its arguments' types.
    """

    name: str
    distribution: str
    sources: tuple[str, ...]
    functions: dict[str, tuple[Any, ...]]

    @property
    def module(self) -> str:
        """The package that holds the file."""
        return self.distribution.replace("-", "_")

    @functools.cached_property
    def source_digest(self) -> str:
        """Letters and digits that change with the C source."""
        data = b"".join((SOURCES / name).read_bytes() for name in self.sources)
        return "c" + hashlib.sha256(data).hexdigest()[:7]  # a letter first: a version may drop leading zeros


_int, _float, _pointer, _size = ctypes.c_int, ctypes.c_float, ctypes.c_void_p, ctypes.c_size_t
_int64 = ctypes.c_int64
RESIZE = Library(
    "resize",
    "pillow-simd-resize",
    ("Python.h", "resize.c"),
    {
        "simd_weights": (_int, _int, _float, _float, _int, _int, _pointer, _pointer, _size, _pointer),
        "simd_resize": (_int, _pointer, _size, _pointer, _pointer, *[_int] * 3, _pointer, ctypes.c_ssize_t),
        "simd_cut": (_int, _pointer, _size, *[_int] * 3, _pointer, ctypes.c_ssize_t),
        "simd_resize_instructions": (ctypes.c_char_p,),
        "simd_channel_sums": (None, _pointer, _size, _int, _pointer),
    },
)
COPY = Library(
    "copy",
    "efficient-imagenet-copy",
    ("copy.c",),
    {
        "copy_crops": (None, _pointer, _int64, _pointer, *[_int64] * 4),
        "advise": (None, _pointer, _pointer, _int64, _int),
    },
)


@dataclass(frozen=True)
class Build:
    """Version of an installed library: `12.1.1.post0+avx2.c1a2b3c4`.

    Args:
        release: of the code that isn't ours.
        instructions: what it was compiled for, a key of `CPU_FLAGS`; any other word: every processor.
        source: `source_digest` of our C source.
    """

    release: str
    instructions: str
    source: str

    def __str__(self) -> str:
        return f"{self.release}+{self.instructions}.{self.source}"


def cpu_flags() -> frozenset[str]:
    """Names of this processor's instruction sets as Linux gives them; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            lines = [line for line in file if line.startswith("flags")]
    except OSError:
        return frozenset()
    return frozenset(lines[0].partition(":")[2].split()) if lines else frozenset()


def installed(library: Library) -> Build | None:
    """What is installed of it, or what of this wheel suits this processor, or None."""
    try:
        version = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        suits = [name for name, flag in CPU_FLAGS.items() if flag in cpu_flags()] + ["any"]
        files = [path for name in suits for path in BUNDLED.glob(f"{library.name}-*+{name}.*.so")]
        if not files:
            return None
        version = files[0].stem.removeprefix(f"{library.name}-")
    release, _, local = version.partition("+")
    instructions, _, source = local.partition(".")
    return Build(release, instructions, source)


@functools.cache
def load(library: Library) -> tuple[ctypes.CDLL | None, str]:
    """The library, loaded once in a process, its functions typed; or None and why it can't be used."""
    build = installed(library)
    if build is None:
        return None, f"{library.distribution} isn't installed"
    if build.source != library.source_digest:
        return None, f"{library.distribution} was built from another release's source; {REPAIR}"
    if CPU_FLAGS.get(build.instructions, "") not in cpu_flags() | {""}:
        return None, f"{library.distribution} was built for {build.instructions}, which this processor lacks; {REPAIR}"
    try:
        spec = importlib.util.find_spec(library.module)
        own = BUNDLED / f"{library.name}-{build}.so"
        path = Path(spec.origin).with_name(f"{library.name}.so") if spec and spec.origin else own
        loaded = ctypes.CDLL(str(path))
        for name, (result, *arguments) in library.functions.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, f"{library.distribution} can't be loaded ({error}); {REPAIR}"
    return loaded, ""
