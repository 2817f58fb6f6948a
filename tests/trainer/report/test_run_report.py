from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import Element, read_page

from pipeline.errors import Error
from trainer.report.__main__ import main, write_report
from trainer.report.records import compare_configs, config_text, load_runs
from trainer.schedule import learning_rate

LINE = {
    "epoch": 1,
    "step": 10,
    "train_loss": 2.5,
    "val_loss": 2.25,
    "val_top1": 0.25,
    "val_top5": 0.5,
    "lr": 0.1,
    "images_per_second": 1000.0,
    "data_wait_share": 0.5,
    "peak_memory_bytes": 2_000_000_000,
}


def make_run(folder: Path, lines: list[dict[str, Any]], config: dict[str, Any] | None = None, end: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    if config is not None:
        (folder / "config.yaml").write_text("# a comment\n" + yaml.safe_dump(config, sort_keys=False))
    return folder


def epochs(num: int, **figures: list[Any]) -> list[dict[str, Any]]:
    return [
        {**LINE, "epoch": i + 1, "step": 10 * (i + 1), **{key: values[i] for key, values in figures.items()}}
        for i in range(num)
    ]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    config = {"data": "data/x.zarr", "out": "a", "model": "resnet18", "epochs": 4, "lr": 0.1, "stages": []}
    first = epochs(
        4,
        val_top1=[0.1, 0.4, 0.38, 0.4],
        val_loss=[2.0, 1.5, 1.75, None],
        images_per_second=[100.0, 5000.0, 5200.0, 5100.0],
        data_wait_share=[0.9, 0.01, 0.03, 0.02],
    )
    second = epochs(2, val_top1=[0.2, 0.3], train_loss=[3.0, None], peak_memory_bytes=[10**9, 3 * 10**9])
    return [
        make_run(tmp_path / "runs" / "one", first, config),
        make_run(
            tmp_path / "runs" / "two", second, {**config, "out": "b", "lr": 0.2, "stages": [{"epoch": 0, "size": 64}]}
        ),
    ]


def test_figures_are_those_of_the_runs(runs: list[Path]) -> None:
    path = write_report(runs)
    assert path.absolute() == runs[0].parent.parent / "runs.html"
    page = read_page(path)
    tables = page.tables()
    assert tables["Runs at a glance"] == [
        ["Run", "Epochs", "Best top-1", "at epoch", "Last top-1", "Last top-5", "Last val. loss", "Images/s",
         "Data wait", "Peak memory, GB"],
        ["one", "4 of 4", "★ 40.00% (best)", "2", "★ 40.00% (best)", "50.00%", "★ 1.7500 (best)", "★ 5,100 (best)",
         "★ 2.00% (best)", "★ 2.00 (best)"],
        ["two", "2 of 4", "30.00%", "2", "30.00%", "50.00%", "2.2500", "1,000", "50.00%", "3.00"],
    ]  # fmt: skip
    assert statistics.median([5000, 5200, 5100]) == 5100
    facts = page.facts()
    assert facts["Epochs"] == "6in all"
    assert facts["Best top-1"] == "40.00%epoch 2 · one"
    assert facts["Lowest validation loss"] == "1.5000epoch 2 · one"
    assert facts["Fastest"] == "5,100images/s · one"
    assert "resnet18 trained on x.zarr." in page.text
    assert tables["Epochs of one"][2] == [
        "2", "20", "2.5000", "1.5000", "40.00%", "50.00%", "0.1000", "5,000", "1.00%", "2.00"
    ]  # fmt: skip
    assert tables["Epochs of one"][4][3] == "–"
    assert page.find("h1")[0].text == "2 runs"


def test_differences_of_configs_stand_out(runs: list[Path]) -> None:
    page = read_page(write_report(runs))
    assert page.tables()["Fields that differ"] == [
        ["Field", "one", "two"],
        ["lr", "0.1", "● 0.2 (differs)"],
        ["stages", "[]", "● [{epoch: 0, size: 64}] (differs)"],
    ]
    assert "2 fields differ, 3 are the same in all runs." in page.text
    assert page.one("config").facts() == {"data": "data/x.zarr", "model": "resnet18", "epochs": "4"}


def test_the_odd_ones_are_those_unlike_most(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / str(i), [LINE], {"a": a, "b": 1}) for i, a in enumerate([1, 2, 2, None])]
    folders.append(make_run(tmp_path / "4", [LINE], {"b": 1}))
    assert compare_configs(load_runs(folders)) == ({"a": ["1", "2", "2", "null", ""]}, {"b": "1"})
    rows = read_page(write_report(folders)).tables()["Fields that differ"]
    assert rows[1] == ["a", "● 1 (differs)", "2", "2", "● null (differs)", "● not set (differs)"]


@pytest.mark.parametrize(
    ("value", "text"),
    [("crop", "crop"), (None, "null"), (True, "true"), (5e-5, "5.0e-05"), ([1, {"a": 2}], "[1, {a: 2}]")],
)
def test_config_values_are_one_line(value: Any, text: str) -> None:
    assert config_text(value) == text


def chart(page: Element, title: str) -> Element:
    (found,) = [e for e in page.find("figure") if e.find("figcaption")[0].text == title]
    return found


def test_curves_go_through_the_figures(runs: list[Path]) -> None:
    page = read_page(write_report(runs))
    accuracy = chart(page, "Validation accuracy")
    top1, top5 = (accuracy.find("circle")[i : i + 6] for i in (0, 6))
    dots = [dot.find("title")[0].text for dot in top1]
    assert dots == [
        f"{name}, top-1, epoch {epoch}: {value}.00%"
        for name, values in [("one", [10, 40, 38, 40]), ("two", [20, 30])]
        for epoch, value in enumerate(values, 1)
    ]
    heights = [float(dot.attributes["cy"]) for dot in top1]
    assert heights[1] == heights[3] == min(heights)
    assert heights[0] == max(heights)
    assert (heights[0] - heights[4]) == pytest.approx((heights[0] - heights[1]) / 3, abs=0.15)
    assert (float(top5[0].attributes["cy"]) - heights[1]) == pytest.approx((heights[1] - heights[0]) / 3, abs=0.15)
    assert len(accuracy.find("path", "line")) == 4
    assert len(accuracy.find("path", "thin")) == 2
    label = accuracy.find("svg")[0].attributes["aria-label"]
    assert "one, top-1: from 10.00% to 40.00%. two, top-1: from 20.00% to 30.00%." in label
    assert [item.text for item in page.one("curves").find("ul", "legend")[0].find("li")] == ["one", "two"]


def test_losses_share_one_scale(runs: list[Path]) -> None:
    figure = chart(read_page(write_report(runs)), "Loss")
    place = {dot.find("title")[0].text: float(dot.attributes["cy"]) for dot in figure.find("circle")}
    assert len(place) == 3 + 2 + 4 + 1  # values that are null have none
    assert place["one, training loss, epoch 1: 2.5000"] == place["one, training loss, epoch 2: 2.5000"]
    per_unit = place["one, validation loss, epoch 2: 1.5000"] - place["one, validation loss, epoch 1: 2.0000"]
    assert place["two, training loss, epoch 1: 3.0000"] == pytest.approx(
        place["one, validation loss, epoch 1: 2.0000"] - 2 * per_unit, abs=0.15
    )
    assert [item.text for item in figure.find("li")] == ["validation loss", "training loss"]


def scheduled(folder: Path, num_epochs: int, **config: Any) -> Path:
    """A run of 10 steps an epoch whose rates are those of its config."""
    rates = [learning_rate(10 * (i + 1) - 1, 10 * 4, 5, 0.5) for i in range(num_epochs)]
    fields = {"lr": 2.0, "global_batch": 64, "warmup_epochs": 0.5, "epochs": 4, "data": "x", "model": "m", **config}
    return make_run(folder, epochs(num_epochs, lr=rates), fields)


def test_learning_rate_shows_every_step_of_the_warm_up(tmp_path: Path) -> None:
    (run,) = load_runs([scheduled(tmp_path / "a", 3)])
    xs, ys = run.rates_by_step(150)
    assert xs == pytest.approx([i / 10 for i in range(1, 31)])
    assert ys == pytest.approx(
        [0.5 * (i + 1) / 6 for i in range(5)] + [learning_rate(i, 40, 5, 0.5) for i in range(5, 30)]
    )
    few = run.rates_by_step(16)
    assert len(few[0]) < 25
    assert set(zip(*few, strict=True)) <= set(zip(xs, ys, strict=True))
    path = chart(read_page(write_report([run.folder])), "Learning rate").find("path", "line")[0].attributes["d"]
    heights = [float(pair.split()[1]) for pair in path[1:].split("L")]
    assert len(heights) == 30
    assert heights.index(min(heights)) == 5
    assert heights[0] > heights[29]


def test_global_batch_of_the_start_counts(tmp_path: Path) -> None:
    folder = scheduled(tmp_path / "a", 3, global_batch=None)
    assert load_runs([folder])[0].rates_by_step(150) == ([], [])
    (folder / "starts.jsonl").write_text(json.dumps({"global_batch": 64}) + "\n")
    assert len(load_runs([folder])[0].rates_by_step(150)[0]) == 30


@pytest.mark.parametrize(
    "change", [{"lr": 1.0}, {"epochs": 5}, {"warmup_epochs": 1.0}, {"warmup_epochs": None}, {"lr": "x"}]
)
def test_rates_by_epoch_where_the_config_tells_others(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = scheduled(tmp_path / "a", 3, **change)
    assert load_runs([folder])[0].rates_by_step(150) == ([], [])
    assert len(chart(read_page(write_report([folder])), "Learning rate").find("circle")) == 3


def test_runs_on_different_data_are_not_ranked(runs: list[Path], tmp_path: Path) -> None:
    config = yaml.safe_load((runs[0] / "config.yaml").read_text())
    other = make_run(tmp_path / "runs" / "other", epochs(1, val_top1=[0.99]), {**config, "data": "data/y.zarr"})
    page = read_page(write_report([*runs, other]))
    head, *rows = page.tables()["Runs at a glance"]
    assert [row[head.index("Data")] for row in rows] == ["x.zarr", "x.zarr", "y.zarr"]
    assert [row[head.index("Best top-1")] for row in rows] == ["★ 40.00% (best)", "30.00%", "99.00%"]
    assert set(page.facts()) & {"Best top-1", "Lowest validation loss", "Fastest"} == set()
    assert page.facts()["Datasets"] == "2"


def test_equal_figures_have_no_star(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, epochs(1, val_top1=[value])) for name, value in [("a", 0.5), ("b", 0.5000001)]]
    assert "★" not in str(read_page(write_report(folders)).tables()["Runs at a glance"])


def test_top5_is_left_out_where_it_says_nothing(tmp_path: Path) -> None:
    page = read_page(write_report([make_run(tmp_path / "a", epochs(2, val_top5=[1.0, 1.0]))]))
    assert "Last top-5" not in page.tables()["Runs at a glance"][0]
    assert "Top-5" not in page.tables()["Epochs of a"][0]
    assert len(chart(page, "Validation accuracy").find("path", "line")) == 1
    assert "Not recorded" not in page.text


def test_memory_has_one_unit(tmp_path: Path) -> None:
    made = epochs(2, peak_memory_bytes=[900_000_000, 12_300_000_000], lr=[0.0003, 0.0])
    page = read_page(write_report([make_run(tmp_path / "a", made)]))
    rows = page.tables()["Epochs of a"]
    assert rows[0][-1] == "Peak memory, GB"
    assert [row[-1] for row in rows[1:]] == ["0.90", "12.30"]
    assert [row[rows[0].index("LR")] for row in rows[1:]] == ["0.0003000", "0.0000000"]
    ticks = [text.text for text in chart(page, "Peak memory per rank").find("text")]
    assert {"0 GB", "2.5 GB", "5 GB", "10 GB", "12.5 GB"} <= set(ticks)


def test_epochs_without_evaluation_are_no_gap(tmp_path: Path) -> None:
    figures = [2.0, None, 1.0, None, 0.5]
    page = read_page(write_report([make_run(tmp_path / "a", epochs(5, val_loss=figures, train_loss=figures))]))
    lines = [line.attributes["d"] for line in chart(page, "Loss").find("path", "line")]
    assert [line.count("L") for line in lines] == [2]  # training loss has three lone points, as its gaps are gaps
    assert len(chart(page, "Loss").find("circle")) == 6


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    page_path = write_report([make_run(tmp_path / str(i), epochs(1000)) for i in range(40)])
    assert page_path.stat().st_size < 3_000_000
    page = read_page(page_path)
    rows = page.tables()["Epochs of 7"]
    assert (rows[1][0], rows[-1][0]) == ("1", "1000")
    assert len(rows) <= 80
    line = chart(page, "Learning rate").find("path", "line")[0].attributes["d"]
    assert line.count("L") == 149


def test_a_single_run_has_its_page_inside(runs: list[Path]) -> None:
    path = write_report(runs[:1])
    assert path == runs[0] / "report.html"
    page = read_page(path)
    assert page.find("h1")[0].text == "one"
    assert "★" not in page.text
    assert "The page is complete in itself" in page.text
    assert [item.text for item in page.find("ul", "legend")[0].find("li")] == ["validation loss", "training loss"]
    assert not page.find("path", "thin")


def test_runs_without_config_validation_or_epochs(tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", [{"epoch": 1, "train_loss": 1.0, "val_loss": None, "val_top1": None}])
    fresh = make_run(tmp_path / "fresh", [])
    page = read_page(write_report([bare, fresh]))
    assert "Not recorded: validation loss, top-1, top-5, learning rate." in page.text
    assert "fresh: no epoch is finished yet." in page.text
    assert "The runs' folders hold no config.yaml." in page.text
    assert page.tables()["Runs at a glance"][2] == ["fresh", "0", *["–"] * 8]
    read_page(write_report([fresh]))


def test_names_are_text_and_tell_runs_apart(tmp_path: Path) -> None:
    odd = make_run(tmp_path / "a" / "<img src=x>", [LINE], {"model": "<script>", "data": "</style>"})
    twin = make_run(tmp_path / "b" / "<img src=x>", [LINE])
    path = write_report([odd, twin, odd])
    assert "<img" not in path.read_text()
    assert "<script" not in path.read_text()
    rows = read_page(path).tables()["Runs at a glance"]
    assert [row[0] for row in rows[1:]] == ["a/<img src=x>", "b/<img src=x>"]


def test_commits_and_machines(runs: list[Path]) -> None:
    starts = [
        {"git_commit": "a" * 40, "git_modified": False, "world_size": 8, "device": "cuda"},
        {"git_commit": "b" * 40, "git_modified": True, "world_size": 4, "device": "GPU", "software": {"torch": "2.9"}},
        {"git_commit": "b" * 40, "git_modified": True, "world_size": 4, "device": "GPU", "software": {"torch": "2.9"}},
    ]
    (runs[0] / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    rows = read_page(write_report(runs)).tables()["What the runs ran on"]
    assert rows[1] == ["one", f"{'a' * 12}, {'b' * 12} (modified)", "GPU", "2.9", "4", "3"]
    assert rows[2] == ["two", "not recorded", "–", "–", "–", "–"]


def test_a_line_cut_short_is_left_out_and_said(tmp_path: Path) -> None:
    cut = make_run(tmp_path / "cut", [LINE], end='{"epoch": 2, "tra')
    page = read_page(write_report([cut]))
    assert "cut: the last line was cut short by a crash and is left out." in page.text
    assert page.facts()["Epochs"].startswith("1")


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ("oops\n{}\n", r"metrics\.jsonl: line 2 is broken \(.*\); mend or delete that line"),
        ("[1]\n", r"line 2 is broken \(no JSON object\)"),
        ('{"step": 3}\n', r"line 2: no epoch in it; mend"),
        ('{"epoch": 2, "val_top1": "high"}\n', r"line 2: val_top1 is 'high', not a number"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, wanted: str) -> None:
    run = make_run(tmp_path / "broken", [LINE], end=end)
    with pytest.raises(Error, match=wanted):
        write_report([run])
    assert main([str(run)]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: .*\n", error)


def test_wrong_use_is_one_line(tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = make_run(tmp_path / "broken", [LINE])
    (broken / "config.yaml").write_text("a: [1,")
    for arguments, code, wanted in [
        ([str(empty)], 2, "has no metrics.jsonl; give the folder of a run"),
        ([str(tmp_path / "none")], 2, "none: no such folder"),
        ([str(runs[0]), "--out", str(tmp_path)], 2, "is a folder; give --out the name of a file"),
        ([str(runs[0]), "--oops"], 2, "see `python -m trainer.report --help`"),
        ([], 2, "see `python -m trainer.report --help`"),
        ([str(broken)], 1, "config.yaml: can't be read"),
        ([str(runs[0]), "--out", "/proc/nothing/x.html"], 1, "can't be written"),
    ]:
        assert main(arguments) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert wanted in captured.err
        assert captured.err.count("\n") == 1


def test_runs_that_never_began_are_left_out(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = tmp_path / "runs" / "refused\x1b[2J"
    refused.mkdir()
    (refused / "lock").write_text("none")
    assert main([*map(str, runs), str(refused)]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"note: .*/refused\\x1b\[2J: left out, .*\n", captured.err)
    page = read_page(Path(captured.out.strip()))
    assert [row[0] for row in page.tables()["Runs at a glance"]] == ["Run", "one", "two"]
    assert main([str(refused)]) == 2
    assert "no run that began among those given" in capsys.readouterr().err


def test_command_writes_where_it_is_told(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "r.html"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    read_page(out)


def test_the_page_of_several_runs_is_in_the_current_folder(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs[0].parent)
    for _ in range(2):  # the second time `*` names the page, too
        assert main(sorted(path.name for path in Path().iterdir())) == 0
        assert capsys.readouterr().out == "runs.html\n"
    read_page(Path("runs.html"))
    assert not (runs[0].parent.parent / "runs.html").exists()
    assert main(["one", "two", "--out", "s3://bucket/x.html"]) == 2


def test_needs_no_torch() -> None:
    code = "import sys, trainer.report; print([m for m in ('torch', 'PIL', 'joblib', 'zarr') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
