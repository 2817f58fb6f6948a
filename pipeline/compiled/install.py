"""Compiles and installs the libraries of this folder, then checks the result: `python -m pipeline.compiled.install`.

    1. Makes sure that Pillow alone owns the folder PIL (repairs an installation with pillow-simd laid over it).
    2. On Linux on x86-64 with a C compiler, gets pillow-simd's source, compiles its resize (`resize.c` here), with
       AVX2 where this processor has it, and installs that as the distribution `pillow-simd-resize`. Takes some ten
       seconds; does nothing when it is there already.
    3. On Linux with a C compiler, compiles the copy of crops (`copy.c`) for this processor, and installs that as
       `efficient-imagenet-copy`. It needs no other source.
    4. Checks everything in a fresh process: `python -m pipeline.image.check` and `pip check`.

No headers but the C library's are needed. Without a compiler, or when something fails, Pillow resizes and numpy copies:
a line says what is lost, and the exit code is 0. Exit code 1: PIL itself is broken. `pipeline/image/resize.py` says why
pillow-simd isn't laid over Pillow.
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
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pipeline import __version__
from pipeline.compiled.library import COPY, CPU_FLAGS, RESIZE, SOURCES, Build, Library, cpu_flags, installed, load
from pipeline.compiled.pillow import file_problems, pil_owners

RELEASE = "12.1.1.post0"
SHA256 = "8e9694ec94c59d12f16753cbf48a3080266bdd704b0c51a630318c7a325625b1"
OPTIONS = (
    *("-O2", "-g0", "-DNDEBUG", "-fwrapv", "-shared", "-fPIC"),
    # only what the exported functions reach: the rest of pillow-simd's file needs the rest of pillow-simd
    *("-fvisibility=hidden", "-ffunction-sections", "-Wl,--gc-sections", "-Wl,-s", "-Wl,--no-undefined"),
)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class BuildError(Exception):
    """Why a library can't be had here."""


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


def wanted_build() -> Build:
    """The build of pillow-simd's resize that this machine should have; BuildError when it can have none."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"pillow-simd is for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    for instructions, flag in CPU_FLAGS.items():
        if flag in cpu_flags():
            return Build(RELEASE, instructions, RESIZE.source_digest)
    raise BuildError("this processor lacks SSE4")


def compiler() -> list[str]:
    """The C compiler's command; BuildError where there is none."""
    for name in [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]:
        command = shlex.split(name)
        if shutil.which(command[0]):
            return command
    raise BuildError("no C compiler (on Debian or Ubuntu: apt-get install build-essential)")


def fetch_source(folder: Path) -> Path:
    """Download pillow-simd's source archive, check its SHA-256 and unpack what is needed; the folder it is in."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"pillow-simd=={RELEASE} --hash=sha256:{SHA256}\n")
    arguments = ["--quiet", "--no-deps", "--no-binary", "pillow-simd", "--require-hashes", "-r", str(requirement)]
    pip("download", *arguments, "--dest", str(folder))
    source = folder / "libImaging"
    source.mkdir()
    with tarfile.open(next(folder.glob("pillow*simd-*.tar.gz"))) as archive:
        for member in archive:
            path = Path(member.name)
            if member.isfile() and (path.parts[1:3] == ("src", "libImaging") or path.parts[1:] == ("LICENSE",)):
                file = archive.extractfile(member)
                assert file is not None
                (source / path.name).write_bytes(file.read())
    return source


def compile_library(library: Library, options: list[str], folder: Path) -> Path:
    """Compile a library's C source, with headers from `folder` and this one, into `folder`; its path."""
    command, path = compiler(), folder / f"{library.name}.so"
    sources = ["-I", str(folder), "-I", str(SOURCES), str(SOURCES / f"{library.name}.c")]
    arguments = [*options, *OPTIONS, *sources, "-o", str(path), "-lm"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line] or ["no output"]
        raise BuildError(f"{command[0]}: {lines[0][:200]}")
    return path


def pack(library: Library, build: Build, folder: Path) -> Path:
    """A wheel in `folder`, of the shared library there and the LICENSE, if there is one; its path."""
    info, tag = f"{library.module}-{build}.dist-info", f"py3-none-linux_{platform.machine()}"
    tags = f"Wheel-Version: 1.0\nGenerator: efficient-imagenet\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = {
        f"{library.module}/__init__.py": b'"""A compiled library, loaded by pipeline.compiled.library."""\n',
        f"{library.module}/{library.name}.so": (folder / f"{library.name}.so").read_bytes(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {library.distribution}\nVersion: {build}\n".encode(),
        f"{info}/WHEEL": tags.encode(),
    }
    if (folder / "LICENSE").exists():
        files[f"{info}/licenses/LICENSE"] = (folder / "LICENSE").read_bytes()
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"{library.module}-{build}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def resize_works() -> bool:
    """Whether a fresh process resizes with pillow-simd, and rightly."""
    check = "sys.exit(bool(c.resize_problems()) or 'simd' not in c.resizer())"
    code = f"import sys; from pipeline.image import check as c; {check}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def install_resize() -> None:
    """Install pillow-simd's resize for this machine; a BuildError says why not, and leaves none installed."""
    try:
        build = wanted_build()
        if installed(RESIZE) == build and resize_works():
            return
        compiler()
        say(f"building pillow-simd's resize, {build}")
        with tempfile.TemporaryDirectory() as name:
            source = fetch_source(Path(name))
            compile_library(RESIZE, [f"-m{build.instructions}"], source)
            pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(pack(RESIZE, build, source)))
        if not resize_works():
            raise BuildError("the library was built, but does not work")
    except BuildError:
        if installed(RESIZE) is not None:
            pip("uninstall", "--quiet", "--yes", RESIZE.distribution)
        raise


def install_copy() -> None:
    """Install the copy of crops for this machine; a BuildError says why not."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"it is built for Linux only, this is {sys.platform}")
    instructions = next((name for name, flag in CPU_FLAGS.items() if flag in cpu_flags()), "any")
    build = Build(__version__, instructions, COPY.source_digest)
    if installed(COPY) == build and load(COPY)[0] is not None:
        return
    say(f"building the copy of crops, {build}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_library(COPY, [f"-m{instructions}"] if instructions in CPU_FLAGS else [], folder)
        pip("install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(pack(COPY, build, folder)))


def bundle(folder: Path, names: Sequence[str]) -> None:
    """Compile libraries for a wheel into `folder`, each for every processor of this machine's kind.

    Raises:
        BuildError: no compiler, or pillow-simd's source can't be had.
    """
    kinds = list(CPU_FLAGS) if platform.machine() in ("x86_64", "AMD64") else []
    with tempfile.TemporaryDirectory() as name:
        folder.mkdir(parents=True, exist_ok=True)
        source = Path(name)
        if RESIZE.name in names and kinds:
            source = fetch_source(source)
            shutil.copy(source / "LICENSE", folder / "LICENSE.pillow-simd")
        for library, release, instructions in (
            *((RESIZE, RELEASE, kind) for kind in kinds),
            *((COPY, __version__, kind) for kind in kinds or ["any"]),
        ):
            if library.name in names:
                path = compile_library(library, [f"-m{instructions}"] if kinds else [], source)
                build = Build(release, instructions, library.source_digest)
                shutil.move(path, folder / f"{library.name}-{build}.so")


def main() -> int:
    try:
        repair_pillow()
        install_resize()
    except BuildError as error:
        say(f"without pillow-simd: {error}")
    try:
        install_copy()
    except BuildError as error:
        say(f"without the compiled copy: {error}; numpy copies crops, less than half as fast")
    return run_checks()


def run_checks() -> int:
    """Check PIL, resizer and dependencies in fresh processes, which print what they find; the exit code."""
    modules = (["pipeline.image.check"], ["pip", "--disable-pip-version-check", "check"])
    codes = [subprocess.run([sys.executable, "-m", *module]).returncode for module in modules]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
