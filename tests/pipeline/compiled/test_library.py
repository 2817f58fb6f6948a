"""A compiled library that doesn't fit isn't used, and it is said why."""

from __future__ import annotations

import pytest

from pipeline.compiled import library
from pipeline.compiled.library import RESIZE, Build, Library, installed, load

OLD = Build("12.1.1.post0", "sse4", "c0000000")
AVX2 = Build("12.1.1.post0", "avx2", RESIZE.source_digest)
SSE4 = Build("12.1.1.post0", "sse4", RESIZE.source_digest)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("build", "flags", "problem"),
    [
        (None, {"avx2"}, "isn't installed"),
        (AVX2, {"sse4_2"}, "built for avx2, which this processor lacks"),
        (OLD, {"sse4_2"}, "built from another release's source"),
        (SSE4, {"sse4_2"}, "can't be loaded"),
    ],
)
def test_an_unfit_library_is_not_used(
    monkeypatch: pytest.MonkeyPatch, build: Build | None, flags: set[str], problem: str
) -> None:
    monkeypatch.setattr(library, "installed", lambda _: build)
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(flags))
    loaded, why = load(Library("resize", "no-such-distribution", RESIZE.sources, RESIZE.functions))
    assert loaded is None
    assert problem in why


@pytest.mark.quick
def test_a_function_that_is_missing_is_noticed() -> None:
    if load(RESIZE)[0] is None:
        pytest.skip("pillow-simd can't be had here")
    loaded, why = load(Library("resize", RESIZE.distribution, RESIZE.sources, {"no_such_function": (None,)}))
    assert loaded is None
    assert "no_such_function" in why


@pytest.mark.quick
def test_version_names_release_instructions_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build("12.1.1.post0", "avx2", "c1a2b3c4")
    assert str(build) == "12.1.1.post0+avx2.c1a2b3c4"
    monkeypatch.setattr("importlib.metadata.version", lambda name: str(build))
    assert installed(RESIZE) == build
