#!/usr/bin/env bash
# Fuzz the parsers for FUZZ_S seconds, half of it each: the native pass over a record with libFuzzer, the parsers of segments
# (footer, trailer, records) with atheris, or with a loop of their own where PyPI has none for this Python. Called by make,
# with the folder of the environment's programs. What fails is left in build/fuzz.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
seconds=$(((${FUZZ_S:-60} + 1) / 2))
folder=build/fuzz
mkdir -p $folder/record $folder/segments

sources=(native/tests/record_fuzz.cpp native/src/record/{crc32c,header,places,hooks}.cpp)
flags=(-std=c++20 -g -O1 -Inative/src)
if command -v clang++ >/dev/null; then
  # Seeds: choices (right as it is, cut, raw, with a CRC that fits, some parts only), a length, one patch.
  for choices in 00 01 02 08 0c 18 38 78; do printf "\x$choices\x00\x11\x18\x00\x01" >$folder/record/seed-$choices; done
  clang++ "${flags[@]}" -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all "${sources[@]}" -o $folder/record_fuzz
  $folder/record_fuzz -max_total_time="$seconds" -max_len=9000 -artifact_prefix=$folder/ -print_final_stats=1 $folder/record
else
  echo "kvterrace: no clang++, so no libFuzzer: random inputs, without coverage" >&2
  c++ "${flags[@]}" -fsanitize=address,undefined -DKVTERRACE_FUZZ_MAIN "${sources[@]}" -o $folder/record_fuzz
  $folder/record_fuzz "$seconds"
fi

export PYTHONPATH=$PWD/src:$PWD/$folder/atheris
if [ -d $folder/atheris ] || "$bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --only-binary :all: \
  --target $folder/atheris atheris; then
  "$bin/python" -m tests.fuzz.segments --seeds $folder/segments
  "$bin/python" -m tests.fuzz.segments --atheris -max_total_time="$seconds" -max_len=64 -artifact_prefix=$folder/ $folder/segments
else
  echo "kvterrace: no atheris for this Python: random mutations, without coverage" >&2
  "$bin/python" -m tests.fuzz.segments "$seconds"
fi
