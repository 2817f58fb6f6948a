"""The faults still fit the code; that each is noticed takes a quarter of an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, copy_project, is_noticed
from tests.mutants.faults import MUTANTS, Mutant


@pytest.mark.quick
@pytest.mark.parametrize("name", MUTANTS)
def test_a_faults_text_occurs_once(name: str) -> None:
    mutant = MUTANTS[name]
    text = (ROOT / "trainer" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    path, _, test = mutant.tests.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text()


@pytest.mark.quick
def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 40


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutants")
    copy_project(folder)
    return folder


@pytest.mark.slow
def test_no_fault_is_not_noticed(copied: Path) -> None:
    """Or the tests would fail for another reason than a fault."""
    assert not is_noticed(Mutant("stop.py", "math", "math", MUTANTS["usr1-kills"].tests), copied)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_noticed(name: str, copied: Path) -> None:
    assert is_noticed(MUTANTS[name], copied)
