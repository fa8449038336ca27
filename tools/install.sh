#!/usr/bin/env bash
# install.sh PYTHON VENV EXTRA CPU_INDEX: a virtual environment with dcompile and one of its extras.
# A torch in range that PYTHON can import is used as it is; otherwise the pinned one is installed.
set -euo pipefail
python=$1 venv=$2 extra=$3 cpu_index=$4

usable_torch() { # version of the torch that a Python can import, and where it is; nothing if there is none in range
    "$1" - << 'EOF' 2> /dev/null
import pathlib, torch
if (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 16):
    print(torch.__version__, pathlib.Path(torch.__file__).parents[1])
EOF
}

if [ ! -e "$venv/.made" ]; then
    # Other packages of the system are seen only where its torch is wanted, lest their versions get in the way.
    if found=$(usable_torch "$python") && [ -n "$found" ]; then
        "$python" -m venv --clear --system-site-packages "$venv"
        if [ -z "$(usable_torch "$venv/bin/python")" ]; then # PYTHON is in a virtual environment itself
            echo "${found#* }" > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/torch-of-python.pth"
        fi
    else
        "$python" -m venv --clear "$venv"
    fi
    touch "$venv/.made"
fi

python=$venv/bin/python constraints=$venv/constraints.txt index=()
if found=$(usable_torch "$python") && [ -n "$found" ]; then
    { grep -v -e '^torch==' -e '^triton==' constraints.txt; echo "torch==${found%% *}"; } > "$constraints"
else
    cp constraints.txt "$constraints"
    # PyPI's wheel for Linux brings several GB of CUDA libraries, so without a GPU torch's own CPU index is tried first.
    # Asked with a short deadline: pip itself would go on retrying a host that cannot be reached.
    if ! command -v nvidia-smi > /dev/null && "$python" - "$cpu_index/torch/" << 'EOF' 2> /dev/null; then
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
EOF
        index=(--extra-index-url "$cpu_index")
    fi
fi

"$python" -m pip install --disable-pip-version-check -c "$constraints" ${index[@]+"${index[@]}"} -e ".[$extra]"
