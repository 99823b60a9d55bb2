"""`python -m posattn` is the `posattn` command; torchrun starts several of it."""

from __future__ import annotations

import os
import sys

from posattn.cli import main

code = main()
if os.environ.get("WORLD_SIZE", "1") != "1":
    from posattn.distributed import leave

    leave(code)
sys.exit(code)
