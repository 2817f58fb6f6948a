"""Configs from flags and YAML, and what is refused."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from pipeline.errors import UsageError
from trainer.config import Config, Stage, parse

RECIPES = sorted((Path(__file__).parents[2] / "trainer" / "recipes").glob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.quick
def test_flags_with_dashes_or_underscores_and_bare_booleans() -> None:
    config = parse(["--data", "s.zarr", "--global-batch", "64", "--batch_size=8", "--eval-only", "--weights=w.pt"])
    assert (config.global_batch, config.batch_size, config.eval_only) == (64, 8, True)
    assert parse(["--data=s", "--no-amp", "--compile", "true"]) == Config("s", amp=False, compile=True)
    assert parse(["--data=s"]).amp is None


@pytest.mark.quick
def test_yaml_with_underscores_or_dashes_and_flags_that_win(tmp_path: Path) -> None:
    recipe = write(
        tmp_path / "r.yaml", "global_batch: 64\nlabel-smoothing: 0.2\nlr: 1e-3\nstages:\n- {epoch: 0, crop: 8}\n"
    )
    config = parse(["--config", str(recipe), "--data", "s", "--lr", "0.5"])
    assert (config.global_batch, config.label_smoothing, config.lr) == (64, 0.2, 0.5)
    assert config.stages == [Stage(0, crop=8)]


@pytest.mark.quick
def test_config_yaml_round_trip(tmp_path: Path) -> None:
    config = Config("x-{size}.zarr", stages=[Stage(0, 8, 6), Stage(2, 16)], amp=True, lr=2e-3, ema=0.99)
    recipe = write(tmp_path / "c.yaml", yaml.safe_dump(asdict(config)))
    assert parse(["--config", str(recipe)]) == config


@pytest.mark.quick
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["data", "required"]),
        (["--data=s", "--globl-batch=3"], ["--globl-batch", "did you mean global_batch?"]),
        (["--data=s", "--lr=fast"], ["--lr", "float", "fast"]),
        (["--data=s", "--epochs=2.5"], ["--epochs", "int", "2.5"]),
        (["--data=s", "--optimizer=adam"], ["--optimizer", "adamw", "adam"]),
        (["--data=s", "--lr=-1"], ["--lr -1", "0 or more"]),
        (["--data=s", "--lr=.nan"], ["--lr nan"]),
        (["--data=s", "--epochs=0"], ["--epochs 0", "above 0"]),
        (["--data=s", "--warmup-epochs=16"], ["--warmup-epochs 16", "below --epochs 16"]),
        (["--data=s", "--stages=[{epoch: 1}]"], ["--stages", "first at 0"]),
        (["--data=s", "--stages=[{epoch: 0, pixels: 3}]"], ["--stages", "pixels"]),
        (["--data=s-{size}.zarr"], ["{size}", "stages"]),
        (["--data=s", "--eval-only"], ["--eval-only", "--weights"]),
        (["--data=s", "--config=/nowhere.yaml"], ["--config", "/nowhere.yaml"]),
        (["--data=s", "stray"], ["stray"]),
    ],
)
def test_refusals_are_one_line(args: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(args)
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("global_bach: 3\n", ["r.yaml", "global_bach", "did you mean global_batch?"]),
        ("epochs: many\n", ["--epochs", "many"]),
        ("epochs: [1, 2\n", ["r.yaml"]),
        ("[1, 2]\n", ["r.yaml"]),
    ],
)
def test_bad_recipes_name_file_or_key(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--data=s", f"--config={write(tmp_path / 'r.yaml', text)}"])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.quick
def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for item in fields(Config):
        assert f"--{item.name.replace('_', '-')}" in text
    assert "_batch" not in text.replace("GLOBAL_BATCH", "")
    assert "examples:\n  torchrun" in text


@pytest.mark.quick
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_load(recipe: Path) -> None:
    parse(["--config", str(recipe), "--data", "x-{size}.zarr" if "stages" in recipe.read_text() else "x.zarr"])
    header = recipe.read_text().splitlines()[:10]
    assert any(line.startswith(("# Measured", "# Expected")) for line in header)


@pytest.mark.quick
def test_stage_of_an_epoch() -> None:
    config = Config("x-{size}", stages=[Stage(0, 8, 6), Stage(3, 16, 12)])
    assert [config.stage(epoch).size for epoch in range(5)] == [8, 8, 8, 16, 16]
    assert Config("x", crop=24).stage(7) == Stage(0, crop=24)
