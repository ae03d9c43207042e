#!/usr/bin/env bash
# Everything that needs a GPU, in one go of at most nine minutes: measured rates, the tests marked gpu, the example, and predicted against
# measured memory; or, in a go of its own that takes as long, the largest models that train with offload to host memory.
# Results go into the folder that is given.
#
#     benchmarks/gpu_all.sh RESULTS_FOLDER
#     benchmarks/gpu_all.sh RESULTS_FOLDER offload
#
# Uses the python3 on the PATH, with the package's dependencies, transformers and peft installed.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${1:?give the folder for the results}
mkdir -p "$results"
failed=0
export PYTHONPATH=.
nvidia-smi > "$results/nvidia-smi.txt" || failed=1
if [ "${2:-}" = offload ]; then
	timeout 535 python3 benchmarks/offload_gpu.py --seconds 500 --json "$results/offload_gpu.json" 2>&1 | tee "$results/offload_gpu.txt" || failed=1
	exit $failed
fi
timeout 60 python3 -c "from lightning_autopar.cli import main; main(['calibrate', '--json'])" > "$results/calibration.json" 2> "$results/calibration.txt" || failed=1
timeout 270 python3 benchmarks/memory_gpu.py --seconds 210 --json "$results/memory_gpu.json" > "$results/memory_gpu.txt" 2>&1 || failed=1
tail -n 40 "$results/memory_gpu.txt"
timeout 140 python3 -m pytest -m gpu -v 2>&1 | tee "$results/gpu_tests.txt" || failed=1
timeout 60 python3 -c "import lightning_autopar, runpy; runpy.run_path('examples/train_gpt.py', run_name='__main__')" 2>&1 |
	tee "$results/train_gpt.txt" || failed=1
exit $failed
