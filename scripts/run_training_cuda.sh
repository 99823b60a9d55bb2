#!/usr/bin/env bash
# Train everything that ships and everything the docs compare, in parallel processes, and pack it.
#
#   bash scripts/run_training_cuda.sh OUTDIR
#
# PLAN=core|full   core: both language models and two seeds of both tasks. full (default): the comparisons as well
# LIMIT=270        seconds a process may take; it then stops cleanly with what it has
# JOBS=0           processes at a time (0: all). DEVICE=cuda|cpu. STEPS=6750, LM_STEPS=6000. PYTHON=python3
# LM_ARGS, TASK_ARGS: further arguments of scripts/train_bytes.py and scripts/train_tasks.py; TASK_ARGS='--track 50' scores
#   every head each 50 steps (without it scripts/learning_tables.py scores the snapshots afterwards)
# CORPUS=.corpus/python-docs.jsonl (python scripts/train_bytes.py corpus PATH); without it the interpreter's own text is used
#
# OUTDIR receives at most 8 tar files of at most 15 MiB, most important first; WORK (default: a new folder) keeps everything.
set -u
OUT=${1:?usage: run_training_cuda.sh OUTDIR}
PLAN=${PLAN:-full} LIMIT=${LIMIT:-270} JOBS=${JOBS:-0} DEVICE=${DEVICE:-cuda} STEPS=${STEPS:-6750} LM_STEPS=${LM_STEPS:-6000}
PYTHON=${PYTHON:-python3} CORPUS=${CORPUS:-.corpus/python-docs.jsonl} LM_ARGS=${LM_ARGS:-} TASK_ARGS=${TASK_ARGS:-}
WORK=${WORK:-$(mktemp -d)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
mkdir -p "$OUT" "$WORK"
GRAPH="" BF16=""
[ "$DEVICE" = cuda ] && GRAPH=--graph BF16=--bf16

bytes() { echo "$1 scripts/train_bytes.py train $WORK/$1 --arch $2 --corpus $CORPUS --device $DEVICE --steps $LM_STEPS --max-seconds $LIMIT $BF16 $LM_ARGS"; }
task() { local name=$1; shift; echo "$name scripts/train_tasks.py $WORK/$name --device $DEVICE --steps $STEPS --schedule-steps 6750 --max-seconds $LIMIT --no-state $GRAPH $TASK_ARGS $*"; }
SPARSE=250,500,750,1000,1250,1500,2000,2500,3000,4000
{
  bytes bytes llama
  bytes bytes-alibi mpt
  task number-s0 --task number --seed 0 --snapshots "$SPARSE"
  task letter-s0 --task letter --seed 0 --snapshots "$SPARSE"
  task number-s1 --task number --seed 1
  task letter-s1 --task letter --seed 1
  if [ "$PLAN" = full ]; then
    task number-lr1e-4-s0 --task number --seed 0 --lr 1e-4
    task number-nodrop-s0 --task number --seed 0 --dropout 0
    task number-seedpreset-s0 --task number --preset seed --seed 0
    task letter-seedpreset-s0 --task letter --preset seed --seed 0
    task letter-clean-s0 --task letter --distractors clean --seed 0
    task number-lr1e-4-s1 --task number --seed 1 --lr 1e-4
  fi
} > "$WORK/plan"
[ "$JOBS" = 0 ] && JOBS=$(wc -l < "$WORK/plan")
[ "$DEVICE" = cuda ] && nvidia-smi --query-gpu=name,memory.used --format=csv,noheader
export PYTHON WORK
xargs -P "$JOBS" -L 1 sh -c 'name=$1; shift; mkdir -p "$WORK/$name"; "$PYTHON" "$@" > "$WORK/$name/stdout.log" 2> "$WORK/$name/stderr.log"; echo "$name: exit $?; $(tail -n 1 "$WORK/$name/stderr.log" | cut -c 1-300)"' run < "$WORK/plan"

"$PYTHON" - "$WORK" "$OUT" <<'PY'
"""Pack: records of every run and the language models first, then final models, then snapshots, until the limits are reached."""
import io, pathlib, sys, tarfile
work, out = map(pathlib.Path, sys.argv[1:])
LIMIT, FILES, TOTAL = 15 * 2**20, 8, 62 * 2**20
names = [line.split()[0] for line in (work / "plan").read_text().splitlines()]
first, final, sparse = [], [], []
for name in names:
    folder = work / name
    first += [p for p in folder.glob("*") if p.is_file() and p.suffix in (".log", ".jsonl", ".json")]
    weights = sorted((folder / "model").glob("*"))
    first += [p for p in weights if p.suffix != ".safetensors"]
    final += [p for p in weights if p.suffix == ".safetensors"]
    sparse += [(name, p) for p in sorted((folder / "snapshots").glob("*.safetensors"))]
# where the tasks are learned (published and seen: letters near 1250, numbers near 2500) matters most
order = ["step-002500", "step-001250", "step-001000", "step-002000", "step-001500", "step-003000", "step-000500", "step-000750", "step-000250", "step-004000"]
sparse = [p for _, p in sorted(sparse, key=lambda x: order.index(x[1].stem) if x[1].stem in order else 99)]
bins, left_out = [], []
for path in first + final + sparse:
    size = path.stat().st_size + 2048
    if sum(b[0] for b in bins) + size > TOTAL:
        left_out.append(path)
        continue
    for b in bins:
        if b[0] + size <= LIMIT:
            break
    else:
        if len(bins) == FILES:
            left_out.append(path)
            continue
        b = [20480, []]
        bins.append(b)
    b[0] += size
    b[1].append(path)
for i, (_, paths) in enumerate(bins):
    with tarfile.open(out / f"training-{i}.tar", "w") as tar:
        for path in paths:
            tar.add(path, arcname=str(path.relative_to(work)))
        if i == 0:
            note = "\n".join(str(p.relative_to(work)) for p in left_out).encode()
            info = tarfile.TarInfo("left_out.txt"); info.size = len(note)
            tar.addfile(info, io.BytesIO(note))
print("packed", sum(len(b[1]) for b in bins), "files in", len(bins), "archives; left out", len(left_out), [str(p.relative_to(work)) for p in left_out])
PY
