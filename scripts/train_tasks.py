"""Train one model on a task and store what later analysis needs: curves, sparse float16 snapshots, the final model.

python scripts/train_tasks.py OUT --task number --seed 0 --lr 3e-4 --snapshots log
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch

from posattn.tasks.training import GraphCaptureError, TrainingConfig, log_steps, save_model, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", default="number")
    parser.add_argument("--distractors", choices=["published", "clean"])
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--steps", type=int, default=6750)
    parser.add_argument("--schedule-steps", type=int)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--snapshots", default="final", help="'log', 'final' or comma-separated steps")
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graph", action="store_true", help="replay the step as a CUDA graph; eager when that fails")
    parser.add_argument(
        "--evaluate", help="MODULE:FUNCTION called with (model, step); its dict joins each record of the curve"
    )
    parser.add_argument("--track", type=int, metavar="N", help="score every head each N steps (a multiple of --every)")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-state", action="store_true", help="delete the resumable state at the end")
    args = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    parameters = {"distractors": args.distractors} if args.distractors else {}
    config = TrainingConfig(
        task=args.task,
        task_parameters=parameters,
        preset=args.preset,
        steps=args.steps,
        schedule_steps=args.schedule_steps,
        learning_rate=args.lr,
        dropout=args.dropout,
        seed=args.seed,
        every=args.every,
        autocast=args.bf16,
    )
    if args.snapshots == "log":
        steps = log_steps(args.steps)
    elif args.snapshots == "final":
        steps = []
    else:
        steps = [int(x) for x in args.snapshots.split(",")]
    callback = None
    if args.evaluate:
        module, _, function = args.evaluate.partition(":")
        callback = getattr(importlib.import_module(module), function)
    if args.track:
        from posattn.tasks.tracking import HeadTracker

        callback = HeadTracker.for_task(config.make_task(), args.track, seed=args.seed)
    try:
        run = train(
            config,
            callback,
            out=args.out,
            resume=args.resume,
            device=args.device,
            save_every=500,
            snapshots=steps,
            max_seconds=args.max_seconds,
            graph=args.graph,
        )
    except GraphCaptureError as error:
        # a failed capture can leave the CUDA context unusable: start this process anew without graphs
        sys.stderr.write(f"no CUDA graph ({error}); training step by step\n")
        argv = [a for a in sys.argv if a != "--graph"]
        if args.max_seconds is not None:
            argv += ["--max-seconds", str(args.max_seconds - (time.monotonic() - started))]
        os.execv(sys.executable, [sys.executable, *argv])
    last = run.curves[-1]
    facts = {
        "steps": run.step,
        "stopped": run.stopped,
        "converged": run.converged,
        "seconds": round(time.monotonic() - started, 1),
        "torch": torch.__version__,
        "device": args.device,
        "graph": args.graph,
        "last": last,
    }
    facts["last"] = {k: v for k, v in last.items() if k not in ("positional", "symbolic", "entropy", "frequency_id")}
    save_model(run.model, config, args.out / "model", facts)
    if args.no_state:
        (args.out / "training.safetensors").unlink(missing_ok=True)
    sys.stderr.write(
        json.dumps({k: facts[k] for k in ("steps", "stopped", "seconds")} | {"accuracy": last["accuracy"]}) + "\n"
    )


if __name__ == "__main__":
    main()
