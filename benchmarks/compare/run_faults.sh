#!/usr/bin/env bash
# Every fault on every side; one line of JSON each to stdout or $OUT. About 15 minutes on two cores.
#
#   KVTERRACE_PYTHON  default .venv/bin/python (`make env`)
#   LMCACHE_PYTHON    of the environment with requirements-lmcache.txt; without it, kvterrace's side alone
#   DIR               on the drive to be used, 2 GiB free; default build/compare
#   SCENARIOS, SIDES  to run some only
#
# "full" mounts a tmpfs and needs root; "hang" needs a C compiler.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
kvterrace=${KVTERRACE_PYTHON:-.venv/bin/python}
dir=${DIR:-build/compare}
out=${OUT:-/dev/stdout}
sides=${SIDES:-kvterrace${LMCACHE_PYTHON:+ lmcache-disk lmcache-disk-async lmcache-fs lmcache-fs-native lmcache-fs-aesgcm}}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
cc -shared -fPIC -O1 -o "$dir/hang_reads.so" "$here/hang_reads.c" -ldl
export HANG_UNDER=$dir HANG_WHILE=$dir.hanging

for side in $sides; do
  case $side in
    lmcache-disk-async) scenarios="short" ;;
    lmcache-fs-aesgcm) scenarios="damage" ;;
    *) scenarios="damage restart full burst two short hang" ;;
  esac
  for scenario in $scenarios; do
    case " ${SCENARIOS:-$scenarios} " in *" $scenario "*) ;; *) continue ;; esac
    preload=
    [ "$scenario" = hang ] && preload="$dir/hang_reads.so"
    if [ "$side" = kvterrace ]; then run=("$kvterrace" "$here/kvterrace_side.py"); else run=("$LMCACHE_PYTHON" "$here/lmcache_side.py"); fi
    echo "== $side: $scenario" >&2
    rm -f "$HANG_WHILE"
    LD_PRELOAD=$preload timeout -k 5 400 "${run[@]}" "$side" "$scenario" --dir "$dir" 2>"$dir/$side-$scenario.err" </dev/null |
      grep '^{' >>"$out" || echo "$side: $scenario failed; see $dir/$side-$scenario.err" >&2
    rm -rf "${dir:?}/$side"
  done
done
rm -f "$HANG_WHILE"
