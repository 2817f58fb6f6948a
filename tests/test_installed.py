"""What a wheel holds, and the public API under one name."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeline.compiled.install import BuildError, compiler

ROOT = Path(__file__).resolve().parent.parent


def tracked() -> list[str]:
    """Files of the checkout that git doesn't ignore; skips outside a checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [name for name in found.stdout.splitlines() if (ROOT / name).is_file()]


def has_compiler() -> bool:
    try:
        return sys.platform == "linux" and bool(compiler())
    except BuildError:
        return False


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():  # a copy, as setuptools leaves a folder `build` behind
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    libraries = {"EFFICIENT_IMAGENET_LIBRARIES": "copy" if has_compiler() else ""}  # resize would download its source
    subprocess.run([*command, str(folder), str(folder / "source")], check=True, env=os.environ | libraries)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl" if has_compiler() else "-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def python(code: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in `folder` with `path` before all else on sys.path."""
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_a_wheel_holds_every_file_that_the_checkout_has(installed: Path) -> None:
    ours = [name for name in tracked() if name.startswith(("pipeline/", "trainer/", "efficient_imagenet"))]
    assert ours
    assert [name for name in ours if not (installed / name).exists()] == []
    assert not (installed / "tests").exists()


def test_a_wheel_brings_its_own_library_for_each_processor(installed: Path, tmp_path: Path) -> None:
    if not has_compiler():
        pytest.skip("no C compiler, or not Linux")
    code = (
        "import importlib.metadata as m\n"
        "def none(name): raise m.PackageNotFoundError(name)\n"
        "m.version = none\n"
        "sys.modules['efficient_imagenet_copy'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name: None if name == 'efficient_imagenet_copy' else found(name)\n"
        "from pipeline.compiled.library import COPY, CPU_FLAGS, cpu_flags, load\n"
        "library, why = load(COPY)\n"
        "assert library is not None, why\n"
        "best = next((name for name, flag in CPU_FLAGS.items() if flag in cpu_flags()), 'any')\n"
        "assert f'+{best}.' in library._name and library._name.startswith(sys.path[0]), library._name"
    )
    done = python(code, tmp_path, installed)
    assert done.returncode == 0, done.stderr
    ours = list((installed / "pipeline" / "compiled" / "bundled").iterdir())
    assert len(ours) == (2 if platform.machine() == "x86_64" else 1)


def test_the_public_api_under_one_name(installed: Path, tmp_path: Path) -> None:
    code = (
        "import efficient_imagenet as e, pipeline\n"
        "assert pipeline.__file__.startswith(sys.path[0])\n"
        "assert 'torch' not in sys.modules and 'joblib' not in sys.modules\n"
        "print([getattr(e, name).__name__ for name in e.__all__])"
    )
    done = python(code, tmp_path, installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['Loader', 'RankPartitionedDataset', 'convert', 'open_store']"


@pytest.mark.parametrize("name", ["pipeline", "trainer"])
def test_another_package_of_the_same_name_is_named(name: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("")
    done = python(f"sys.path.insert(0, {str(tmp_path)!r})\nimport efficient_imagenet", tmp_path, installed)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError")
    assert str(tmp_path / f"{name}.py") in last
