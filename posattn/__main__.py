"""`python -m posattn` and `posattn` are this; torchrun starts several of it."""

from __future__ import annotations

import os
import sys


def run() -> int:
    """Run the command line and return its exit code, also when it is interrupted before it has begun."""
    try:
        from posattn.cli import main

        return main()
    except KeyboardInterrupt:  # while things are imported, or when all is done
        print("posattn: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    code = run()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from posattn.distributed import leave

        leave(code)
    sys.exit(code)
