"""`python -m pipeline`."""

import sys

if __name__ == "__main__":
    try:
        from pipeline.cli import main
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C before anything began
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}; `source .venv/bin/activate` first, or install with `make setup`")
    sys.exit(main())
