#!/usr/bin/env bash
# What a GPU is asked first, in at most seven minutes: does the stub GPU tell the truth, do fits end and come back, do the caps hold, where do
# seconds go. Results go into the folder that is given, a file a part, whatever becomes of the others.
#
#     benchmarks/gpu_all.sh RESULTS_FOLDER
#     benchmarks/gpu_all.sh RESULTS_FOLDER memory    # in a go of its own: predicted beside measured bytes of many models
#     benchmarks/gpu_all.sh RESULTS_FOLDER offload   # in a go of its own: the largest models that train with offload to host memory
#     benchmarks/gpu_all.sh RESULTS_FOLDER large     # in a go of its own: seven billion parameters where 24 GiB may be used
#
# Uses the python3 on the PATH (or $PYTHON), with torch, lightning, transformers, peft and the package's other dependencies; the tests also
# want pytest.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_all.py" "${1:?give the folder for the results}" "${2:-first}"
