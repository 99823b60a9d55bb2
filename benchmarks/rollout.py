"""Rollout: implementations × shapes × dtypes, each checked against the float64 reference before it is timed."""

from __future__ import annotations

import sys

from common import main

from posattn import bench

if __name__ == "__main__":
    sys.exit(main("rollout", lambda args: bench.rollout_groups(args.device, tune=args.tune, small=args.small), None))
