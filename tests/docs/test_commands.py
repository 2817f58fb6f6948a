"""Every command of the documents' bash blocks is run, as it stands there but for small data and few steps.

A scenario runs the commands of whole sections one after the other, in a folder that looks like the checkout with
an empty `data/` and `runs/`. So a command that is added to a section runs with it, and one in another section fails
`test_every_command_is_run` until that section has a scenario.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torchvision
from documents import DOCUMENTS, ROOT
from folders import make_folder, make_image
from layouts import SYNSETS, tar_bytes, val_name, write_devkit

from pipeline import convert, open_store
from trainer.flags import parse as parse_training

ELSEWHERE = {
    "make setup": "CI's first step: it has made the environment that these tests run in",
    "make demo": "a step of CI",
    "npx http-server data --cors -p 8000": "tests/docs/test_browser.py reads through a server of its own",
    **dict.fromkeys(
        (
            "python -m pipeline copy data/imagenet-256.zarr s3://bucket/imagenet-256.zarr",
            "python -m pipeline copy s3://bucket/imagenet-256.zarr data/imagenet-256.zarr",
            "python -m pipeline copy data/imagenet-256.zarr /archive/imagenet-256.zarr --codec max",
            "python -m pipeline info   s3://bucket/imagenet-256.zarr",
            "python -m pipeline report s3://bucket/imagenet-256.zarr",
            "python -m pipeline verify s3://bucket/imagenet-256.zarr --sample 10",
        ),
        "tests/pipeline/commands and tests/pipeline/store, with fsspec's memory and a server that speaks S3",
    ),
    "torchrun --nproc-per-node=8 trainer/main.py --config resnet50 --data s3://bucket/imagenet-256.zarr --cache "
    "/nvme/cache --order windowed --out runs/first": "tests/trainer/reading/test_cache.py",
}
"""Commands that no scenario runs, and who does."""

GPU_CHECK = "--model=resnet_small --size=16 --crop=12 --batch-size=8 --images=40 --steps=3 --device=cpu --threads=[1,2]"

REPLACED = {
    "make ": "make --old-file=.venv/.setup ",  # the environment is there, whether or not this Makefile made it
    "make --old-file=.venv/.setup gpu-check": (
        f"make --old-file=.venv/.setup gpu-check ARGS='{GPU_CHECK} --compile=false --threshold=0'"
    ),
    "/path/to/imagenet": "imagenet",
    " /data/imagenet": " imagenet",
    " /data/shards": " shards",
    "/scratch/": "scratch/",
    "/shared/": "shared/",
    "SRC": "pictures",
    "DST": "data/own-224.zarr",
    "--nproc-per-node=8": "--nproc-per-node=2",
    "python -m pipeline bench": "python short_bench.py bench",
    "node0:29400": "localhost:0 --rdzv-conf=last_call_timeout=1",  # which waits for 30 s for other machines
}
"""What stands in the documents -> what is run; in this order."""

SHORT_BENCH = """
import sys
from pipeline import cli
from trainer.bench import passes as measurement
measurement.REPEATS, measurement.PASS_SECONDS = 1, 0.0
sys.exit(cli.main())
"""

SBATCH = """#!/usr/bin/env bash
# In Slurm's place: the last argument for each index of the array, two at a time.
range=${1#--array=}
seq "${range%-*}" "${range#*-}" | xargs -P 2 -I INDEX env SLURM_ARRAY_TASK_ID=INDEX bash -c "${!#}"
"""

RUN = "--device cpu --global-batch 8 --warmup-epochs 0 --no-compile --no-amp --no-zero-init-residual"
SMALL = f"{RUN} --model resnet_small --crop 16 --eval-crop 16"
STAGES = "[{epoch: 0, size: 256, crop: 16}, {epoch: 1, size: 256, crop: 24}]"
"""Flags that follow a training command's own."""


LANGUAGES = (None, "", "bash", "console", "html", "py", "python", "text", "yaml")


def sections() -> dict[str, list[str]]:
    """`PAGE: HEADING` -> the commands of its bash blocks, without comments."""
    found: dict[str, list[str]] = {}
    for document in DOCUMENTS:
        heading, language = "", None
        for line in document.read_text().replace("\\\n ", "").splitlines():
            if line.strip().startswith("```"):
                language = line.strip(" `") if language is None else None
                assert language in LANGUAGES, f"{document}: {line}"
            elif language is None and line.startswith("#"):
                heading = f"{document.relative_to(ROOT)}: {line.strip('# ')}"
            elif language == "bash" and (command := re.sub(r"(^|\s+)# .*", "", line).strip()):
                found.setdefault(heading, []).append(command)
    return found


SECTIONS = sections()


def renamed(name: str) -> Callable[[Path], None]:
    """Make room for another conversion into the same place."""

    def rename(folder: Path) -> None:
        (folder / "data" / "own-224.zarr").rename(folder / "data" / name)

    return rename


def merge_parts(folder: Path) -> None:
    """Of 16 parts the third finished here, the others in a work folder of their own: nobody saw all and committed."""
    here, others = folder / "data" / "own-224.zarr.work", folder / "data" / "others.zarr"
    for part in range(1, 17):
        if part != 3:
            convert(folder / "pictures", others, size=256, part=f"{part}/16", n_jobs=1, quiet=True)
    assert not others.exists()
    for split in ("train", "val"):
        for kind in ("receipts", "split/images"):
            shutil.copytree(
                others.with_name("others.zarr.work") / split / kind, here / split / kind, dirs_exist_ok=True
            )


def train_own(folder: Path) -> None:
    fields = f"{SMALL} --epochs 1 --data data/own-224.zarr --out runs/own"
    subprocess.run([sys.executable, "trainer/main.py", *shlex.split(fields)], cwd=folder, check=True)


SERVERS = {
    "tcp://HOST:8786": "from distributed import LocalCluster\n"
    "print(LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None).scheduler_address, flush=True)",
    "HOST:6379": "import ray\n"
    "print(ray.init(num_cpus=1, include_dashboard=False).address_info['gcs_address'], flush=True)",
}
"""Documented address -> code that starts a cluster of that kind and prints its address."""

RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}  # else Ray writes a token into the home folder


@contextmanager
def clusters() -> Iterator[dict[str, str]]:
    """Dask and Ray, each in a process of its own until the end of its standard input."""
    addresses = {}
    with ExitStack() as stack:
        for documented, code in SERVERS.items():
            command = [sys.executable, "-c", f"{code}\ninput()"]
            server = stack.enter_context(
                subprocess.Popen(
                    command,
                    env=os.environ | RAY,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            assert server.stdout is not None
            found = (re.search(r"(tcp://)?[\d.]+:\d+$", line.strip()) for line in server.stdout)
            address = next((match[0] for match in found if match), None)
            assert address, f"no cluster from {code}"
            addresses[documented] = address
        yield addresses


@dataclass(frozen=True)
class Scenario:
    """Sections whose commands run in one folder, one after the other. A command that comes again isn't run again."""

    sections: tuple[str, ...]
    given: tuple[str, ...] = ()
    """Stores that are there already."""
    flags: str = SMALL
    """What follows a training command's own flags."""
    epochs: int = 1
    """Of the first training; each one after it has one more, which is what a resumed run does."""
    also: tuple[str, ...] = ()
    """Commands of the sections' text to run at the end."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    """Part of a command -> what happens before it."""
    setting: Callable[[], AbstractContextManager[Mapping[str, str]]] = lambda: contextlib.nullcontext({})
    """What runs meanwhile; gives more to replace."""
    leaves: tuple[str, ...] = ()
    """Files that the commands promise, beside those that `check_outcome` knows."""
    slow: bool = False


SCENARIOS = [
    Scenario(("README.md: ImageNet in five commands", "README.md: Training"), slow=True),
    Scenario(("README.md: Your own images",), leaves=("data/own-224.html", "runs/own/report.html")),
    Scenario(("docs/training.md: CIFAR-10 on two CPU cores",), slow=True),
    Scenario(
        ("docs/clusters.md: Spreading a conversion over machines",),
        setting=clusters,
        before={
            "--backend ray": renamed("dask.zarr"),
            "--part 3/16": renamed("ray.zarr"),
            "pipeline commit": merge_parts,
        },
        slow=True,
    ),
    Scenario(
        ("docs/training.md: A run", "docs/training.md: Stopping and going on"),
        given=("data/imagenet-256.zarr", "data/own-256.zarr"),
        slow=True,
        flags=f"{RUN} --model resnet18 --crop 32 --eval-crop 32",  # torchvision has weights for it
        replaced={"--nproc-per-node=2": "--nproc-per-node=1", "--nproc-per-node=8": "--nproc-per-node=2"},
    ),
    Scenario(("docs/training.md: Growing resolution",)),
    Scenario(
        ("docs/training.md: Using the weights",), given=("data/own-224.zarr",), before={"trainer.predict": train_own}
    ),
    Scenario(("docs/training.md: A val split of your own",), before={"--val-fraction": renamed("two-folders.zarr")}),
    Scenario(
        ("docs/training.md: Restarts and changing machines",),
        given=("data/imagenet-256.zarr", "shared/imagenet-256.zarr"),
        slow=True,
    ),
    Scenario(("docs/migration.md: From ImageFolder and DataLoader", "docs/migration.md: From WebDataset")),
    Scenario(
        ("docs/migration.md: From FFCV",),
        flags=f"{RUN} --model resnet_small --stages '{STAGES}' --eval-crop 24",
        epochs=2,
        slow=True,
    ),
    Scenario(
        (
            "docs/performance.md: Performance",
            "docs/troubleshooting.md: The GPU is idle",
            "docs/troubleshooting.md: The resizer is slow",
        ),
        given=("data/imagenet-256.zarr",),
    ),
]


def test_every_command_is_run() -> None:
    run = {section for scenario in SCENARIOS for section in scenario.sections}
    left = [
        command
        for section, commands in SECTIONS.items()
        for command in commands
        if section not in run and command not in ELSEWHERE
    ]
    assert not left, f"no scenario runs {left}: put their sections into SCENARIOS"
    assert run <= SECTIONS.keys(), f"no section has commands like {run - SECTIONS.keys()}"
    documented = {command for commands in SECTIONS.values() for command in commands}
    assert documented >= ELSEWHERE.keys()
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert all(command in text for scenario in SCENARIOS for command in scenario.also)
    assert all(words in " ".join(documented) for words in (*REPLACED, *SERVERS) if "--old-file" not in words)


TRAINING = [line for lines in SECTIONS.values() for line in lines if "trainer/main.py --" in line]


@pytest.mark.parametrize("command", dict.fromkeys(line for line in TRAINING if "--config runs/" not in line))
def test_flags_go_together_as_they_stand(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the small ones that a scenario appends would hide."""
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command.partition("trainer/main.py ")[2])
    parse_training(arguments)


def jpeg(seed: int) -> bytes:
    buffer = BytesIO()
    make_image(seed).save(buffer, "JPEG")
    return buffer.getvalue()


def write_archives(folder: Path) -> None:
    """ImageNet's official archives with three classes, 27 training and 6 validation images."""
    folder.mkdir()
    classes = [wnid for _, wnid, _, children in SYNSETS if not children]
    train = {
        f"{wnid}.tar": tar_bytes({f"{wnid}_{i}.JPEG": jpeg(100 * number + i) for i in range(9)})
        for number, wnid in enumerate(classes)
    }
    val = {val_name(number): jpeg(1000 + number) for number in range(1, 7)}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar_bytes(train))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar_bytes(val))
    write_devkit(folder / "ILSVRC2012_devkit_t12.tar.gz", [1, 2, 3, 1, 2, 3])


def write_shards(folder: Path) -> None:
    folder.mkdir()
    for shard in range(2):
        files: dict[str, bytes] = {}
        for i in range(6):
            files |= {f"{i:04d}.jpg": jpeg(10 * shard + i), f"{i:04d}.cls": str(i % 2).encode()}
        (folder / f"train-{shard:04d}.tar").write_bytes(tar_bytes(files))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands read: images in every layout that they name, and below `made` stores and torchvision's weights."""
    folder = tmp_path_factory.mktemp("inputs")
    write_archives(folder / "imagenet")
    write_shards(folder / "shards")
    train, val = {"cat": 12, "dog": 12}, {"cat": 3, "dog": 3}
    make_folder(folder / "pictures", {"train": train, "val": val})
    make_folder(folder / "cifar10", {"train": train, "test": val}, suffix=".png")
    make_folder(folder, {"photos-train": train, "photos-val": val, "photos": train})
    for source, name, size in (("imagenet", "imagenet", 256), ("pictures", "own", 224), ("pictures", "own", 256)):
        convert(folder / source, folder / "made" / f"{name}-{size}.zarr", size=size, n_jobs=1, quiet=True)
    weights = torchvision.models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    checkpoints = folder / "made" / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    torch.save(torchvision.models.resnet18().state_dict(), checkpoints / weights)
    return folder


@pytest.fixture
def checkout(inputs: Path, tmp_path: Path) -> Path:
    """A folder like the checkout, with images beside it and nothing in `data` and `runs`."""
    for name in ("Makefile", "pyproject.toml", "pipeline", "trainer"):
        (tmp_path / name).symlink_to(ROOT / name)
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    for name in ("data", "runs", "shared", "scratch", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "short_bench.py").write_text(SHORT_BENCH)
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    return tmp_path


def small(scenario: Scenario, command: str, earlier: Sequence[str]) -> str:
    """The documented command with small-run flags; `earlier` are the scenario's documented commands before it."""
    trainings = [line.partition("trainer/main.py")[2] for line in earlier if "trainer/main.py" in line]
    if "trainer/main.py" not in command:
        return command
    if " ... " in command:
        command = command.replace(" ...", trainings[-1])
    return f"{command} {scenario.flags} --epochs {scenario.epochs + len(trainings)}"


MAKE = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
MAKE |= {*re.findall(r"^([A-Z]+) +\?=", (ROOT / "Makefile").read_text(), re.MULTILINE)}
"""What `make test ARGS=...` would hand down to another make."""


def run(command: str, checkout: Path, inputs: Path) -> str:
    """Run a line in a shell; returns what it printed."""
    path = [checkout / "bin", checkout / ".venv" / "bin", os.environ["PATH"]]
    environment = {
        **{name: value for name, value in os.environ.items() if name not in MAKE},
        "PATH": os.pathsep.join(map(str, path)),
        "TORCH_HOME": str(inputs / "made"),
        "OMP_NUM_THREADS": "1",  # else torchrun sets it, with a warning
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **RAY,
    }
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Traceback" not in output, output
    return output


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, marks=[pytest.mark.slow] * scenario.slow, id=", ".join(scenario.sections))
        for scenario in SCENARIOS
    ],
)
def test_commands_run(scenario: Scenario, checkout: Path, inputs: Path) -> None:
    for store in scenario.given:
        (checkout / store).symlink_to(inputs / "made" / Path(store).name)
    once: dict[str, str] = {}
    for command in (command for section in scenario.sections for command in SECTIONS[section]):
        if command not in ELSEWHERE:
            once.setdefault(command.removeprefix(".venv/bin/"), command)
    commands = [*once.values(), *scenario.also]
    with scenario.setting() as more:
        for i, documented in enumerate(commands):
            command = small(scenario, documented, commands[:i])
            for words, shorter in {**scenario.replaced, **REPLACED, **more}.items():
                command = command.replace(words, shorter)
            for words, prepare in scenario.before.items():
                if words in documented:
                    prepare(checkout)
            print(f"$ {command}")  # noqa: T201 (pytest shows it where the test fails)
            check_outcome(command, run(command, checkout, inputs), checkout)
    for path in scenario.leaves:
        assert (checkout / path).is_file(), path


OUTCOMES = {
    "trainer/main.py .*--eval-only": r"on \d+ samples: loss .*, top-1 ",
    "trainer/main.py .*--resume": r"(?s)resuming from \S+: [1-9].*output in (?P<run>\S+)",
    "trainer/main.py ": r"output in (?P<run>\S+)",
    "trainer.predict ": r"(?m)^photos/cat/000.jpg: .*cat \d",
    "trainer.report ": r"(?m)^(?P<page>\S+\.html)$",
    "pipeline report ": r"(?m)^(?P<page>\S+\.html)$",
    "pipeline convert .*--dry-run": "bytes",
    "sbatch ": r"(?m)^(?P<store>\S+): train, val$",
    "pipeline convert .*--part ": "other parts are still to come",
    "pipeline (convert|commit) |make .*dataset ": r"(?m)^(?P<store>\S+\.zarr): \w+",
    "pipeline verify ": "every check passed",
    "pipeline info": "resizer",
    "pipeline.image.check": "resizer: ",
    "short_bench.py ": "from memory",
    "make .*gpu-check": "(?m)^passed$",
}
"""Kind of command -> what it prints; the first that fits. What is named there must exist, and be complete."""


def check_outcome(command: str, output: str, checkout: Path) -> None:
    """What a user would look at."""
    promised = next((text for kind, text in OUTCOMES.items() if re.search(kind, command)), None)
    assert promised, f"say in OUTCOMES what this prints: {command}"
    found = re.search(promised, output)
    assert found, f"{promised!r} isn't in {output}"
    for kind, path in found.groupdict().items():
        if kind == "store":
            opened = open_store(checkout / path.replace("{size}", "256"))
            assert opened.splits
            assert all(opened[split].num_valid for split in opened.splits), path
        elif kind == "page":
            assert "</html>" in (checkout / path).read_text(), path
        else:
            for name in ("config.yaml", "metrics.jsonl", "last.pt", "best.pt", "curves.png", "starts.jsonl"):
                assert (checkout / path / name).is_file(), name
            assert "done: best top-1 " in output
