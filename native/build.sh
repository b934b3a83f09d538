#!/usr/bin/env bash
# Build the extension module into src/kvterrace, where it has changed. Called by make, with the folder of the environment's
# programs. KVTERRACE_NATIVE: auto (the default: without a compiler, go on without the module), require, off.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1

without() {
  rm -f src/kvterrace/_native*.so  # an old one would not fit the code any more
  echo "kvterrace: no extension module: $1" >&2
}

case ${KVTERRACE_NATIVE:-auto} in
  off) without "KVTERRACE_NATIVE=off"; exit 0 ;;
  auto | require) ;;
  *) echo "KVTERRACE_NATIVE must be auto, require or off, not '$KVTERRACE_NATIVE'" >&2; exit 2 ;;
esac

build() {
  local tools=()
  "$bin/python" -c 'import nanobind' 2>/dev/null || tools+=("nanobind>=2.5")
  command -v cmake >/dev/null || [ -x "$bin/cmake" ] || tools+=("cmake>=3.20")
  command -v ninja >/dev/null || [ -x "$bin/ninja" ] || tools+=("ninja>=1.11")
  [ ${#tools[@]} -eq 0 ] || "$bin/python" -m pip --disable-pip-version-check install --quiet "${tools[@]}" || return
  PATH=$PATH:$bin
  # CMake remembers an interpreter or a source tree that may be gone.
  if ! cmake -S native -B build/native -G Ninja -DPython_EXECUTABLE="$PWD/$bin/python" -DCMAKE_BUILD_TYPE=Release \
    -DKVTERRACE_OUTPUT="$PWD/src/kvterrace" >build/native.log 2>&1; then
    rm -rf build/native
    cmake -S native -B build/native -G Ninja -DPython_EXECUTABLE="$PWD/$bin/python" -DCMAKE_BUILD_TYPE=Release \
      -DKVTERRACE_OUTPUT="$PWD/src/kvterrace" >build/native.log 2>&1 || return
  fi
  cmake --build build/native --target _native >>build/native.log 2>&1
}

mkdir -p build
if ! build; then
  tail -n 20 build/native.log >&2 || true
  without "it could not be built, see build/native.log; a C++20 compiler is needed (on Debian and Ubuntu: apt install g++)"
  if [ "${KVTERRACE_NATIVE:-auto}" = require ]; then exit 1; fi
  echo "kvterrace: going on with the engine of Python threads, which is slower" >&2
fi
