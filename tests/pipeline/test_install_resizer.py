"""The arrangement of pillow-simd beside Pillow. The build itself is `make setup`'s; here it is a stand-in."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeline import install_resizer
from pipeline.install_resizer import BuildError

VERSION = "12.1.1.post0+avx2"


def simd_wheel(folder: Path) -> Path:
    """What building pillow-simd gives, in small."""
    path = folder / "pillow_simd-12.1.1.post0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("PIL/Image.py", "the whole of PIL")
        archive.writestr("PIL/_imaging.py", "ANSWER = 42\n")
        archive.writestr("PIL/_imagingmath.so", b"not needed")
        archive.writestr("pillow_simd-12.1.1.post0.dist-info/licenses/LICENSE", "MIT-CMU")
        archive.writestr(
            "pillow_simd-12.1.1.post0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
    return path


def test_repacked_core_installs_and_touches_no_pil(tmp_path: Path) -> None:
    wheel = install_resizer.repack(simd_wheel(tmp_path), VERSION)
    assert wheel.name == "pillow_simd_core-12.1.1.post0+avx2-py3-none-any.whl"
    target = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--find-links", str(tmp_path)]
    subprocess.run([sys.executable, *install, "--target", str(target), f"pillow-simd-core=={VERSION}"], check=True)
    names = sorted(path.name for path in target.iterdir())
    assert names == ["pillow_simd_core", "pillow_simd_core-12.1.1.post0+avx2.dist-info"]
    code = (
        "import importlib.metadata as m, pillow_simd_core._imaging as core;"
        "print(core.ANSWER, m.version('pillow-simd-core'))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=target, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["42", VERSION]
    assert (target / names[1] / "licenses" / "LICENSE").read_text() == "MIT-CMU"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", {"sse4_1", "avx2"}, "12.1.1.post0+avx2"),
        ("x86_64", {"sse4_1"}, "12.1.1.post0+sse4"),
        ("x86_64", {"sse2"}, None),
        ("aarch64", set(), None),
    ],
)
def test_version_for_a_machine(
    monkeypatch: pytest.MonkeyPatch, machine: str, flags: set[str], expected: str | None
) -> None:
    monkeypatch.setattr(install_resizer.sys, "platform", "linux")
    monkeypatch.setattr(install_resizer.platform, "machine", lambda: machine)
    monkeypatch.setattr(install_resizer, "cpu_flags", lambda: frozenset(flags))
    if expected is None:
        with pytest.raises(BuildError):
            install_resizer.wanted_version()
    else:
        assert install_resizer.wanted_version() == expected


@pytest.mark.quick
def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="build-essential"):
        install_resizer.compiler()


@pytest.mark.quick
def test_no_python_headers_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(install_resizer.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match="python3-dev"):
        install_resizer.compiler()
    (tmp_path / "Python.h").touch()
    assert install_resizer.compiler() == sys.executable


@pytest.mark.quick
def test_pip_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=r"pip install: .*no-such-file") as caught:
        install_resizer.pip("install", "--no-index", "/no-such-file.whl")
    assert "\n" not in str(caught.value)


@pytest.mark.quick
def test_failed_build_leaves_pillow_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(version: str, cc: str, folder: Path) -> Path:
        raise BuildError("error: command 'cc' failed")

    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install_resizer, "wanted_version", lambda: "99+avx2")
    monkeypatch.setattr(install_resizer, "compiler", lambda: "cc")
    monkeypatch.setattr(install_resizer, "build", fail)
    monkeypatch.setattr(install_resizer, "pip", lambda *arguments, **_: calls.append(arguments))
    monkeypatch.setattr(install_resizer, "run_checks", lambda: 0)
    assert install_resizer.main() == 0
    assert "without pillow-simd: error: command 'cc' failed" in capfd.readouterr().out
    assert all(call[0] == "uninstall" and call[-1] == "pillow-simd-core" for call in calls)


@pytest.mark.quick
def test_pillow_simd_laid_over_pillow_is_repaired(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install_resizer, "pil_owners", lambda: ["pillow", "pillow-simd"])
    monkeypatch.setattr(install_resizer, "pip", lambda *arguments, **_: calls.append(arguments))
    install_resizer.repair_pillow()
    assert calls[0] == ("uninstall", "--quiet", "--yes", "pillow", "pillow-simd")
    assert calls[1][:4] == ("install", "--quiet", "--no-deps", "--force-reinstall")
    assert calls[1][4].startswith("pillow==")
    assert "pillow and pillow-simd" in capsys.readouterr().out
    calls.clear()
    monkeypatch.setattr(install_resizer, "pil_owners", lambda: ["pillow"])
    install_resizer.repair_pillow()
    assert calls == []
    monkeypatch.setattr(install_resizer, "file_problems", lambda _: ["PIL/Image.py: altered"])
    install_resizer.repair_pillow()
    assert len(calls) == 1
    assert calls[0][0] == "install"


@pytest.mark.quick
def test_nothing_to_do_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_resizer, "wanted_version", lambda: VERSION)
    monkeypatch.setattr(install_resizer, "installed_core", lambda: VERSION)
    monkeypatch.setattr(install_resizer, "core_works", lambda: True)
    monkeypatch.setattr(install_resizer, "build", None)
    install_resizer.install()
