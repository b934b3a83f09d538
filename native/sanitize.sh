#!/usr/bin/env bash
# Build with a sanitizer (address, undefined or thread) and run the stress test with it; for the first two, the Python tests
# of the engines and of the record passes as well. Called by make, with the sanitizer and the folder of the environment's programs.
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=$1 bin=$2
folder=build/native-$sanitizer
PATH=$PATH:$bin

mkdir -p "$folder"
rm -rf "$folder/src"
cp -r src "$folder/src"
rm -f "$folder"/src/kvterrace/_native*.so
cmake -S native -B "$folder/cmake" -G Ninja -DPython_EXECUTABLE="$PWD/$bin/python" -DCMAKE_BUILD_TYPE=Debug \
  -DKVTERRACE_SANITIZE="$sanitizer" -DKVTERRACE_OUTPUT="$PWD/$folder/src/kvterrace" >/dev/null
cmake --build "$folder/cmake" $([ "$sanitizer" = thread ] && echo "--target kvterrace_stress")

export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
# Leaks: Python leaves much behind at its end, and so do engines that hang, on purpose.
"$folder/cmake/kvterrace_stress" "$folder"
if [ "$sanitizer" = thread ]; then exit 0; fi
library=$(c++ -print-file-name="lib$([ "$sanitizer" = address ] && echo asan || echo ubsan).so")
LD_PRELOAD="$library $(c++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$folder/src" \
  "$bin/python" -m pytest -q tests/unit/test_io_native.py tests/unit/test_io_native_contract.py \
  tests/unit/test_io_scheduler.py tests/unit/test_io_depth.py tests/unit/test_ladder_native.py tests/unit/test_native_*.py \
  tests/unit/test_return_index*.py tests/property/test_directory_properties.py \
  tests/property/test_native_passes.py tests/property/test_passes_agree.py
