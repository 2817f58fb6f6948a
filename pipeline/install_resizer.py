"""Installs pillow-simd's resizer beside Pillow, then checks the result: `python -m pipeline.install_resizer`.

    1. Makes sure that Pillow alone owns the folder PIL (repairs an installation with pillow-simd laid over it).
    2. On Linux on x86-64 with a C compiler, builds pillow-simd's compiled core, with AVX2 where this processor has it,
       and installs it as the distribution `pillow-simd-core`: one file in a folder of its own. Takes about a minute;
       does nothing when it is there already.
    3. Checks everything in a fresh process: `python -m pipeline.resizer` and `pip check`.

The core is built without image libraries, so that it needs no headers but Python's own. Without a compiler, or when
the build fails, Pillow resizes: a line says what is lost, and the exit code is 0. Exit code 1: PIL itself is broken.
`pipeline/resizer.py` says why pillow-simd isn't laid over Pillow.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from pipeline.packages import CORE_MODULE, CORE_NAME, cpu_flags, file_problems, installed_core, pil_owners

SIMD_VERSION = "12.1.1.post0"
# What pillow-simd's core would be linked to. Resizing needs none of it; decoding is Pillow's.
LIBRARIES = ("jpeg", "zlib", "tiff", "freetype", "raqm", "lcms", "webp", "jpeg2000", "imagequant", "xcb", "avif")
METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: The compiled core of pillow-simd {release}, in a module of its own beside Pillow
License: MIT-CMU
"""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class BuildError(Exception):
    """Why pillow-simd can't be had here."""


def pip(*arguments: str, env: dict[str, str] | None = None) -> None:
    """Run this interpreter's pip; BuildError with one line of its errors when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        # The compiler's or setuptools' first error says more than pip's own, which come last.
        errors = [line for line in lines if "error: " in line and "subprocess-exited" not in line]
        errors = errors or lines[-1:] or ["no output"]
        raise BuildError(f"pip {arguments[0]}: {errors[0][:200]}")


def repair_pillow() -> None:
    """Leave one owner of the folder PIL, Pillow, with the files of one release."""
    owners = pil_owners()
    version = importlib.metadata.version("pillow") if "pillow" in owners else None
    if owners != ["pillow"]:
        say(f"PIL belongs to {' and '.join(owners) or 'no package'}: leaving Pillow's files only")
        if owners:
            pip("uninstall", "--quiet", "--yes", *owners)
    elif file_problems(importlib.metadata.distribution("pillow")):
        say(f"PIL isn't as pillow {version} installed it: installing it again")
    else:
        return
    pip("install", "--quiet", "--no-deps", "--force-reinstall", f"pillow=={version}" if version else "pillow")


def wanted_version() -> str:
    """Version of pillow-simd-core for this machine; BuildError when it has none."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"pillow-simd is for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    flags = cpu_flags()
    if "sse4_1" not in flags:
        raise BuildError("this processor lacks SSE4.1")
    return f"{SIMD_VERSION}+{'avx2' if 'avx2' in flags else 'sse4'}"


def compiler() -> str:
    """The C compiler's command; BuildError where there is none, or no Python headers."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    found = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    if found is None:
        raise BuildError("no C compiler (on Debian or Ubuntu: apt-get install build-essential)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        raise BuildError("Python.h is missing (on Debian or Ubuntu: apt-get install python3-dev)")
    return found


def build(version: str, cc: str, folder: Path) -> Path:
    """Build pillow-simd's wheel in `folder` with the C compiler `cc`; its path."""
    release, _, label = version.partition("+")
    env = os.environ | {
        "CC": cc + (" -mavx2" if label == "avx2" else ""),
        "CFLAGS": "-O2 -DNDEBUG -fwrapv -g0",  # instead of Python's own; the resize is written in intrinsics
        # The core finds its own functions even if Pillow's, which have the same names, were loaded globally.
        "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} -Wl,-Bsymbolic".strip(),
    }
    settings = [argument for name in LIBRARIES for argument in ("-C", f"{name}=disable")]
    # Without the cache: pip would hand out a wheel that was built with other flags.
    pip(
        *("wheel", "--no-cache-dir", "--no-deps", "--no-binary", "pillow-simd", "--wheel-dir", str(folder)),
        *settings,
        f"pillow-simd=={release}",
        env=env,
    )
    return next(folder.glob("pillow_simd-*.whl"))


def repack(wheel: Path, version: str) -> Path:
    """A wheel `pillow-simd-core` beside `wheel`, with its core and licence only; its path."""
    info = f"{CORE_MODULE}-{version}.dist-info"
    tags = wheel.stem.split("-", 2)[2]
    with zipfile.ZipFile(wheel) as source:
        names = source.namelist()
        core = next(name for name in names if name.startswith("PIL/_imaging."))
        licence = next(name for name in names if name.endswith("/LICENSE"))
        wheel_file = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        metadata = METADATA.format(name=CORE_NAME, version=version, release=version.partition("+")[0])
        files = {
            f"{CORE_MODULE}/__init__.py": b'"""The compiled core of pillow-simd, loaded by pipeline.resizer."""\n',
            f"{CORE_MODULE}/{core.removeprefix('PIL/')}": source.read(core),
            f"{info}/licenses/LICENSE": source.read(licence),
            f"{info}/METADATA": metadata.encode(),
            f"{info}/WHEEL": source.read(wheel_file),
        }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    target = wheel.with_name(f"{CORE_MODULE}-{version}-{tags}.whl")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target


def core_works() -> bool:
    """Whether a fresh process resizes with pillow-simd, and rightly."""
    code = (
        "import sys; from pipeline import resizer as r; sys.exit(bool(r.core_problems()) or 'simd' not in r.resizer())"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def install() -> None:
    """Install pillow-simd-core for this machine; BuildError says why it can't be done, and leaves none installed."""
    try:
        version = wanted_version()
        if installed_core() == version and core_works():
            return
        cc = compiler()
        say(f"building pillow-simd {version} (about a minute)")
        with tempfile.TemporaryDirectory() as folder:
            wheel = repack(build(version, cc, Path(folder)), version)
            pip(
                *("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"),
                *("--find-links", str(wheel.parent), f"{CORE_NAME}=={version}"),
            )
        if not core_works():
            raise BuildError("the core was built, but does not work")
    except BuildError:
        if installed_core() is not None:
            pip("uninstall", "--quiet", "--yes", CORE_NAME)
        raise


def main() -> int:
    try:
        repair_pillow()
        install()
    except BuildError as error:
        say(f"without pillow-simd: {error}")
    return run_checks()


def run_checks() -> int:
    """Check PIL, resizer and dependencies in fresh processes, which print what they find; the exit code."""
    modules = (["pipeline.resizer"], ["pip", "--disable-pip-version-check", "check"])
    codes = [subprocess.run([sys.executable, "-m", *module]).returncode for module in modules]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
