"""`python -m posattn` is the `posattn` command."""

from __future__ import annotations

import sys

from posattn.cli import main

sys.exit(main())
