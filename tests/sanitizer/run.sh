#!/usr/bin/env bash
# Runs every kernel under compute-sanitizer: [OUT=folder] [PYTHON=python3] tests/sanitizer/run.sh [tool...]
# Needs a CUDA GPU and compute-sanitizer on PATH. Ends with 1 if any tool or launch found anything.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-build/sanitizer}
python=${PYTHON:-python3}
limit=${LIMIT_S:-120}
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck synccheck)
mkdir -p "$out"
export PYTHONPATH=.:lowering PYTORCH_NO_CUDA_MEMORY_CACHING=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/greyhound-sanitizer-cache}
status=0

# First without a sanitizer and in many processes: compiling takes longer than all launches, and what
# fails here already need not be looked for below.
parts=12
for part in $(seq $parts); do
  timeout 300 "$python" tests/sanitizer/launch.py --part "$part/$parts" \
    >"$out/plain-$part.out" 2>&1 || echo "plain $part/$parts: exit $?" >>"$out/plain-$part.out" &
done
wait
for part in $(seq $parts); do
  if [ "$(tail -n 1 "$out/plain-$part.out")" != "0 failed" ]; then
    status=1
    echo "plain $part/$parts:"
    tail -n 12 "$out/plain-$part.out" | cut -c1-400
  fi
done
launches=$(grep -hoE '[0-9]+ launches' "$out"/plain-*.out | awk '{n += $1} END {print n}')
echo "plain launches: $launches, $([ $status = 0 ] && echo all right || echo FAILED)"

# Children are left alone: ptxas and the like are none of ours.
parts=3
for tool in "${tools[@]}"; do
  for part in $(seq $parts); do
    (
      timeout "$limit" compute-sanitizer --tool "$tool" --target-processes application-only \
        --error-exitcode 9 --log-file "$out/$tool-$part.log" \
        "$python" tests/sanitizer/launch.py --part "$part/$parts" >"$out/$tool-$part.out" 2>&1
      echo "exit $?" >>"$out/$tool-$part.out"
    ) &
  done
done
wait
for tool in "${tools[@]}"; do
  for part in $(seq $parts); do
    code=$(tail -n 1 "$out/$tool-$part.out")
    echo "$tool $part/$parts: $code (124: over $limit s), $(tail -n 2 "$out/$tool-$part.out" | head -n 1)"
    tail -n 1 "$out/$tool-$part.log" 2>/dev/null
    if [ "$code" != "exit 0" ]; then
      status=1
      grep -hE "^========= (Invalid|Uninit|Error|Warning|Race|Barrier|Program)|at .*_kernel" \
        "$out/$tool-$part.log" 2>/dev/null | sort | uniq -c | sort -rn | head -n 8 | cut -c1-240
    fi
  done
done
exit $status
