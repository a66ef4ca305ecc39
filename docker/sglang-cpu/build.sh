#!/bin/bash
# build.sh PYTHON FOLDER: an environment in FOLDER in which a real SGLang server runs on a CPU.
set -euo pipefail
python=$1 folder=$2
here=$(cd "$(dirname "$0")" && pwd)
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT

"$python" -m venv --clear "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$here/constraints.txt")
"${pip[@]}" --requirement "$here/requirements.txt"
# Its own list is for CUDA, and pins other versions of torch and transformers.
"${pip[@]}" --no-deps sglang
# A copy: building a package leaves files beside it.
cp -r "$here/sgl_kernel_stand_in" "$temporary/"
"$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "$temporary/sgl_kernel_stand_in"
# The operators of torchvision's wheel do not fit a CPU build of torch, and SGLang imports only its Python parts.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
: > "$site/torchvision/_meta_registrations.py"
"$folder/bin/python" -c 'import importlib.metadata; print("sglang", importlib.metadata.version("sglang"))'
