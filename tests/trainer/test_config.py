"""Configs from flags and YAML, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import trainer
from pipeline import __version__
from pipeline.errors import UsageError
from trainer import flags
from trainer.config import Config, Stage
from trainer.flags import dump, parse

RECIPES = sorted((Path(__file__).parents[2] / "trainer" / "recipes").glob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("latin-1"))
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
@pytest.mark.parametrize("name", ["runs/own", "1e5", "12e3456", ".5E-2", "1_0e+3", "17", "1e400", "-", "ä #1"])
def test_config_yaml_round_trip(name: str, tmp_path: Path) -> None:
    config = Config("x-{size}.zarr", name, stages=[Stage(0, 8, 6), Stage(2, 16)], amp=True, lr=2e-30, ema=0.99)
    (tmp_path / "c.yaml").write_text(dump(config))
    assert parse(["--config", str(tmp_path / "c.yaml")]) == config
    assert yaml.safe_load(dump(config))["out"] == name


@pytest.mark.quick
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--data is required"]),
        (["--data=s", "--globl-batch=3"], ["--globl-batch", "did you mean --global-batch?"]),
        (["--data=s", "--conf=r.yaml"], ["--conf"]),
        (["--data=s", "--lr=fast"], ["--lr fast: must be a number"]),
        (["--data=s", "--epochs=2.5"], ["--epochs 2.5: must be a whole number"]),
        (["--data=s", "--optimizer=adam"], ["--optimizer adam: must be sgd or adamw"]),
        (["--data=s", "--lr=-1"], ["--lr -1", "0 or more"]),
        (["--data=s", "--lr=.nan"], ["--lr nan"]),
        (["--data=s", "--epochs=0"], ["--epochs 0", "above 0"]),
        (["--data=s", "--warmup-epochs=16"], ["--warmup-epochs 16", "below --epochs 16"]),
        (["--data=s", "--crop=1e2"], ["--crop 1e2: must be a whole number"]),
        (["--data=s", "--crop=wide"], ["--crop wide: must be a whole number"]),
        (["--data=s", "--amp=maybe"], ["--amp maybe: must be true or false"]),
        (["--data=s", "--crop="], ["--crop (empty): must be a whole number"]),
        (["--data=s", "--stages=[{epoch: 1}]"], ["--stages at epochs 1: must rise, the first at 0"]),
        (["--data=s", "--stages=[{epoch: 0, size: 0}]"], ["--stages at epoch 0: size and crop must be above 0"]),
        (["--data=s", "--stages=[{epoch: 0}]", "--crop=9"], ["--crop 9: not with --stages"]),
        (["--data=s", "--stages=[3]"], ["--stages [3]: must be a list of {epoch: N, size: PX, crop: PX}"]),
        (["--data=s", "--stages=[{epoch: 0, pixels: 3}]"], ["--stages", "pixels", "must be a list"]),
        (["--data=s-{size}.zarr"], ["{size}", "stages"]),
        (["--data=s", "--eval-only"], ["--eval-only", "--weights"]),
        (["--data=s", "--config=/nowhere.yaml"], ["--config", "/nowhere.yaml"]),
        (["--data=s", "stray"], ["stray"]),
        (
            ["--data=s", "--seed=99999999999999999999"],
            ["--seed 99999999999999999999: must be 0 or more, and below 2^32"],
        ),
        (["--data="], ["--data (empty): must be the path of a store"]),
    ],
)
def test_refusals_are_one_line(args: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(args)
    text = str(caught.value)
    assert "\n" not in text
    assert not re.search(r"\w\(|<|typing|Union|Literal|class_path", text)  # no Python in it
    assert all(word in text for word in words), text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("global_bach: 3\n", ["r.yaml", "global_bach", "did you mean global_batch?"]),
        ("epochs: many\n", ["--epochs", "many"]),
        ("epochs: [1, 2\n", ["r.yaml"]),
        ("[1, 2]\n", ["r.yaml"]),
        ("", ["r.yaml: holds no fields"]),
        ("# nothing but this\n", ["r.yaml: holds no fields"]),
        ("lr: 1\nepochs:\n", ["--epochs", "a whole number"]),
        ("epochs: null\n", ["--epochs", "a whole number"]),
        ("stages: null\n", ["--stages"]),
        ("stages: &all [*all]\n", ["r.yaml", "aliases"]),
        ("a: &a [0,0,0,0,0,0,0,0,0]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n", ["r.yaml", "aliases", "line 2"]),
        ("stages: [{class_path: antigravity.X}]\n", ["--stages", "must be a list"]),
        ("model: !!python/object/apply:os.system [ls]\n", ["r.yaml", "tag"]),
        ("lr: " + "[" * 5000 + "]" * 5000, ["r.yaml"]),
        ('out: "a\\0b"\n', ["--out: holds a NUL byte"]),
        ("model: r\xe9seau\n", ["r.yaml: not a text in UTF-8 (byte 8)"]),
    ],
)
def test_bad_recipes_name_file_or_key(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--data=s", f"--config={write(tmp_path / 'r.yaml', text)}"])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    assert "antigravity" not in sys.modules  # no code is imported by its name


@pytest.mark.quick
def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for item in fields(Config):
        assert f"\n  --{item.name.replace('_', '-')}" in text
    assert not re.search(r"--\w+_", text)
    assert "  --order random|windowed " in text
    assert "(default: 500)" in text
    assert text.index("\nschedule and optimizer:") < text.index("  --lr X") < text.index("\naugmentation:")
    assert max(map(len, text.partition("examples:")[0].splitlines())) <= 110


@pytest.mark.quick
def test_a_recipe_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(trainer.__file__).parent / "recipes" / "resnet50-16.yaml"
    assert parse(["--config", "resnet50-16", "--data=s"]) == parse([f"--config={path}", "--data=s"])
    with pytest.raises(UsageError, match=r"--config resnet51: No such file.*resnet50-16, .*vit_s"):
        parse(["--config", "resnet51", "--data=s"])
    with pytest.raises(UsageError, match="--config recipes/resnet50: No such file"):
        parse(["--config", "recipes/resnet50", "--data=s"])
    (tmp_path / "resnet50").write_text("epochs: 3")  # a file goes first
    assert parse(["--config", "resnet50", "--data=s"]).epochs == 3


@pytest.mark.quick
def test_version_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, wanted in (("--version", f"trainer/main.py {__version__}\n"), ("--print-completion=jsonschema", "{")):
        with pytest.raises(SystemExit) as caught:
            parse([flag])
        assert caught.value.code in (0, None)
        output = capsys.readouterr().out
        assert output.startswith(wanted)
    assert "global_batch" in json.loads(output)["properties"]


def test_completion_of_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    """As the documentation sets it up: for torchrun's command line."""
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        parse(["--print-completion=shtab-bash"])
    flags._parser.cache_clear()  # shtab has changed it
    script = capsys.readouterr().out
    ask = "COMP_WORDS=(torchrun trainer/main.py --glob); COMP_CWORD=2; _shtab_trainer_main_py; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--global-batch"]


@pytest.mark.quick
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_load(recipe: Path) -> None:
    text = recipe.read_text()
    config = parse(["--config", str(recipe), "--data", "x-{size}.zarr" if "{size}" in text else "x.zarr"])
    header = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    assert re.search(r"\bMeasured( on [^:]*)?: [\d.]+ %|\bExpected, not measured by us: .* after ", header)
    assert f"--config trainer/recipes/{recipe.name} " in header
    for stated in re.findall(r"^# ImageNet, [^,]*, (\d+) epochs", text):
        assert int(stated) == config.epochs
    if "{size}" in text:
        sizes = {int(size) for size in re.findall(r"--size (\d+)", header)}
        assert sizes == {stage.size for stage in config.stages} | {config.eval_size}
    if "FFCV" in header:  # the rate is the source's
        rate, batch = re.search(r"rate ([\d.]+) at a batch of ([\d,]+)", header).groups()
        assert config.lr == pytest.approx(float(rate) / int(batch.replace(",", "")) * 256, rel=0.01)


@pytest.mark.quick
def test_stage_of_an_epoch() -> None:
    config = Config("x-{size}", stages=[Stage(0, 8, 6), Stage(3, 16, 12)])
    assert [config.stage(epoch).size for epoch in range(5)] == [8, 8, 8, 16, 16]
    assert Config("x", crop=24).stage(7) == Stage(0, crop=24)
