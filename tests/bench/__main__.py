"""All benchmarks that need nothing but this project, one after the other: `make bench` (about ten minutes).

    python -m tests.bench [NAME ...]

Each one's header says what it measures, its options, and what it gave on which machine.
"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("decode", "conversion", "source_reading", "cold_source", "loading", "pages", "dataset_report")


def main() -> int:
    chosen = sys.argv[1:] or BENCHMARKS
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        sys.stderr.write(f"error: no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}\n")
        return 2
    codes = []
    for name in chosen:
        sys.stdout.write(f"== {name}\n")
        sys.stdout.flush()
        codes.append(subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
