import os
from pathlib import Path

import pytest

from pipeline.store.atomic import TEMP_MARK, atomic_file, remove_temps, write_json

pytestmark = pytest.mark.quick


def test_success_renames_and_leaves_no_temp(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a", temp_id="run1") as file:
        file.write(b"new")
        assert (tmp_path / f"a{TEMP_MARK}run1").exists()
        assert not (tmp_path / "a").exists()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("where", ["body", "check"])
def test_failure_keeps_the_old_file(tmp_path: Path, where: str) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "a", check=fail) as file:
        file.write(b"new")
        if where == "body":
            fail()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(tmp_path / "a", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_remove_temps_touches_nothing_else(tmp_path: Path) -> None:
    temps = [f"a{TEMP_MARK}1", f"b{TEMP_MARK}2", f"c{TEMP_MARK}run"]
    for name in ("a", *temps):
        (tmp_path / name).touch()
    assert sorted(remove_temps(tmp_path, keep=["run"])) == temps[:2]
    assert sorted(os.listdir(tmp_path)) == ["a", temps[2]]
    remove_temps(tmp_path)
    assert os.listdir(tmp_path) == ["a"]
