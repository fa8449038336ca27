#!/usr/bin/env bash
# install.sh PYTHON VENV EXTRA CPU_INDEX [TORCH]: a virtual environment with dcompile and one of its extras.
#
# Which torch it gets: TORCH where that is given; otherwise one in range that PYTHON can import; otherwise the pinned one.
# All other packages get their pins. Triton does too, unless it is there already: the torch that brought it needs that one.
set -euo pipefail
python=$1 venv=$2 extra=$3 cpu_index=$4 torch=${5:-}

usable_torch() { # version of the torch that a Python can import, and where it is; nothing if there is none in range
    # as pip knows it: a wheel of 2.13.0 from the package index calls itself 2.13.0+cu130, which pip cannot find
    "$1" - << 'CODE' 2> /dev/null
import importlib.metadata, pathlib, torch
version = next((found.version for found in importlib.metadata.distributions(name="torch")), torch.__version__)
if (2, 11) <= tuple(map(int, version.split(".")[:2])) < (2, 16):
    print(version, pathlib.Path(torch.__file__).parents[1])
CODE
}

version_of() { # version of an installed package; nothing if it is not installed
    "$python" - "$1" << 'CODE' 2> /dev/null || true
import importlib.metadata, sys
print(importlib.metadata.version(sys.argv[1]))
CODE
}

pin() { # pin NAME VERSION: this version of a package in place of the one in constraints.txt
    { grep -v "^$1==" "$constraints"; echo "$1==$2"; } > "$constraints.new"
    mv "$constraints.new" "$constraints"
}

if [ ! -e "$venv/.made" ]; then
    # Other packages of the system are seen only where its torch is wanted, lest their versions get in the way.
    if [ -z "$torch" ] && found=$(usable_torch "$python") && [ -n "$found" ]; then
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
install() { "$python" -m pip install -q --disable-pip-version-check -c "$constraints" ${index[@]+"${index[@]}"} "$@"; }

cp constraints.txt "$constraints"
if [ -z "$(usable_torch "$python")" ]; then
    # PyPI's wheel for Linux brings several GB of CUDA libraries, so without a GPU torch's own CPU index is tried first.
    # Asked with a short deadline: pip itself would go on retrying a host that cannot be reached.
    if ! command -v nvidia-smi > /dev/null && "$python" - "$cpu_index/torch/" << 'CODE' 2> /dev/null; then
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
CODE
        index=(--extra-index-url "$cpu_index")
    fi
    if [ -n "$torch" ]; then # with the Triton that it asks for itself, if it does
        echo "Installing torch $torch into $venv ..."
        sed -i -e '/^torch==/d' -e '/^triton==/d' "$constraints"
        install "torch==$torch"
        cp constraints.txt "$constraints"
    fi
fi
found=$(usable_torch "$python" || true) triton=$(version_of triton)
if [ -n "$found" ]; then pin torch "${found%% *}"; fi
if [ -n "$triton" ]; then pin triton "$triton"; fi

echo "Installing dcompile[$extra] into $venv, with $(grep '^torch==' "$constraints"), as $constraints pins it ..."
install -e ".[$extra]"
