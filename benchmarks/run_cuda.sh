#!/usr/bin/env bash
# Everything that needs a CUDA device, in one go: the tests of the Triton kernels (rollout, streamed head means), then
# the benchmarks of the rollout and of long-context capture. Needs torch, transformers, triton, numpy, jaxtyping,
# safetensors, einops and pytest there. No results are committed yet: not run.
#
#   benchmarks/run_cuda.sh DIR [--tune]
#
# Results and logs go to DIR (rollout-cuda.json, .csv, .md; long-context-cuda.json; *.log). PYTHON names the interpreter
# (default python3). A part that fails is reported and the others still run; the exit status is 1 then.
set -u
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/run_cuda.sh DIR [--tune]}
shift
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
started=$SECONDS
status=0

"$python" -c '
import torch, triton
print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name(0))' || exit 1

# Correctness, several processes at a time: most of this is compilation, and the timed run finds the compiled kernels.
pids=() names=()
for dtype in f32 bf16 f16; do
  tests=$dtype
  [ "$dtype" = f16 ] && tests="f16 and not bf16"
  [ "$dtype" = bf16 ] && tests="bf16 or run_to_run"
  timeout 150 "$python" -m pytest -q --noconftest -p no:cacheprovider -o filterwarnings=default -m cuda -k "$tests" \
    tests/test_fast_kernels.py >"$out/tests-$dtype.log" 2>&1 &
  pids+=($!) names+=("tests-$dtype")
done
timeout 200 "$python" -m pytest -q --noconftest -p no:cacheprovider -o filterwarnings=default -m cuda \
  tests/test_streamed_triton.py >"$out/tests-streamed.log" 2>&1 &
pids+=($!) names+=("tests-streamed")
timeout 150 "$python" benchmarks/long_context.py --device cuda --shape llama-1b --length 2048 \
  >"$out/check-streamed.log" 2>&1 &
pids+=($!) names+=("check-streamed")
for dtype in bfloat16 float16 float32 tf32; do
  timeout 150 "$python" benchmarks/rollout.py --device cuda --check-only --only " $dtype " "$@" \
    >"$out/check-$dtype.log" 2>&1 &
  pids+=($!) names+=("check-$dtype")
done
for i in "${!pids[@]}"; do
  wait "${pids[$i]}"
  code=$?
  if [ $code -ne 0 ]; then
    status=1
    echo "${names[$i]}: exit $code"
    grep -E "^(E  |FAILED|failed|wrong)" "$out/${names[$i]}.log" | head -12
    tail -n 3 "$out/${names[$i]}.log"
  else
    echo "${names[$i]}: $(tail -n 1 "$out/${names[$i]}.log")"
  fi
done
echo "tests and checks: $((SECONDS - started)) s"

timeout 150 "$python" benchmarks/rollout.py --device cuda --out "$out" --seconds 1.2 --rounds 11 "$@" || status=1
# capture of a Llama-shaped model at 32k tokens: at most 1.5 times its forward pass with fast attention
timeout 100 "$python" benchmarks/long_context.py --device cuda --shape llama-8b --length 32768 --dtype bfloat16 \
  --no-whole --no-materialised --rounds 5 --slowdown 1.5 --out "$out/long-context-cuda.json" || status=1
echo "all: $((SECONDS - started)) s"
exit $status
