"""The arrangement of pillow-simd beside Pillow. Source and compiler are `make setup`'s; here they are stand-ins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import __version__
from pipeline.compiled import install as install_resizer
from pipeline.compiled.install import BuildError
from pipeline.compiled.library import COPY, RESIZE, SOURCES, Build, Library

BUILD = Build("12.1.1.post0", "avx2", RESIZE.source_digest)


def test_packed_library_installs_and_touches_no_pil(tmp_path: Path) -> None:
    library, licence = tmp_path / "resize.so", tmp_path / "LICENSE"
    library.write_bytes(b"machine code")
    licence.write_text("MIT-CMU")
    wheel = install_resizer.pack(RESIZE, BUILD, tmp_path)
    assert wheel.name.startswith(f"pillow_simd_resize-{BUILD}-py3-none-linux_")
    target = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--find-links", str(tmp_path)]
    subprocess.run([sys.executable, *install, "--target", str(target), f"pillow-simd-resize=={BUILD}"], check=True)
    names = sorted(path.name for path in target.iterdir())
    assert names == ["pillow_simd_resize", f"pillow_simd_resize-{BUILD}.dist-info"]
    assert (target / names[0] / "resize.so").read_bytes() == b"machine code"
    assert (target / names[1] / "licenses" / "LICENSE").read_text() == "MIT-CMU"
    code = "import importlib.metadata as m; print(m.version('pillow-simd-resize'))"
    out = subprocess.run([sys.executable, "-c", code], cwd=target, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(BUILD)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", {"sse4_2", "avx2"}, "avx2"),
        ("x86_64", {"sse4_2"}, "sse4"),
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
            install_resizer.wanted_build()
    else:
        assert install_resizer.wanted_build() == Build("12.1.1.post0", expected, RESIZE.source_digest)


@pytest.mark.quick
def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="build-essential"):
        install_resizer.compiler()


@pytest.mark.quick
def test_compiler_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{sys.executable} -m compiler")
    assert install_resizer.compiler() == [sys.executable, "-m", "compiler"]


@pytest.mark.quick
def test_failing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(BuildError) as caught:
        install_resizer.compile_library(RESIZE, [], tmp_path)
    assert str(caught.value) == "false: no output"


@pytest.mark.quick
def test_source_digest_follows_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in SOURCES.glob("*.[ch]"):
        (tmp_path / path.name).write_bytes(path.read_bytes() + b" ")
    monkeypatch.setattr("pipeline.compiled.library.SOURCES", tmp_path)
    assert Library("resize", "any", RESIZE.sources, {}).source_digest != BUILD.source


@pytest.mark.quick
def test_pip_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=r"pip install: .*no-such-file") as caught:
        install_resizer.pip("install", "--no-index", "/no-such-file.whl")
    assert "\n" not in str(caught.value)


@pytest.mark.quick
def test_failed_build_leaves_pillow_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path) -> Path:
        raise BuildError("pip download: error: no network")

    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install_resizer, "install_copy", lambda: None)
    monkeypatch.setattr(install_resizer, "wanted_build", lambda: Build("99", "avx2", "c0000000"))
    monkeypatch.setattr(install_resizer, "compiler", lambda: ["cc"])
    monkeypatch.setattr(install_resizer, "fetch_source", fail)
    monkeypatch.setattr(install_resizer, "pip", lambda *arguments, **_: calls.append(arguments))
    monkeypatch.setattr(install_resizer, "run_checks", lambda: 0)
    assert install_resizer.main() == 0
    assert "without pillow-simd: pip download: error: no network" in capfd.readouterr().out
    assert all(call[0] == "uninstall" and call[-1] == "pillow-simd-resize" for call in calls)


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
    monkeypatch.setattr(install_resizer, "wanted_build", lambda: BUILD)
    monkeypatch.setattr(install_resizer, "installed", lambda library: BUILD)
    monkeypatch.setattr(install_resizer, "resize_works", lambda: True)
    monkeypatch.setattr(install_resizer, "fetch_source", None)
    install_resizer.install_resize()


@pytest.mark.parametrize(("flags", "instructions"), [({"avx2"}, "avx2"), ({"sse4_2"}, "sse4"), (set(), "any")])
def test_the_copy_is_built_for_any_processor_without_other_sources(monkeypatch, flags, instructions):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install_resizer, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(install_resizer, "installed", lambda library: None)
    monkeypatch.setattr(install_resizer, "pip", lambda *arguments: calls.append(arguments))
    install_resizer.install_copy()
    assert [call[0] for call in calls] == ["install"]
    assert f"efficient_imagenet_copy-{__version__}+{instructions}.{COPY.source_digest}" in calls[0][-1]
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="no C compiler"):
        install_resizer.install_copy()
