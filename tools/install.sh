#!/usr/bin/env bash
# Install dcompile with one extra into a virtual environment. A torch in range that it can import already is kept.
set -euo pipefail
venv=$1 extra=$2 cpu_index=$3
python=$venv/bin/python

torch=$("$python" - <<'EOF'
try:
    import torch
except Exception:
    raise SystemExit  # none, or one that cannot be loaded: the pinned one is installed over it
if (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 16):
    print(torch.__version__)
EOF
)

constraints=$venv/constraints.txt
index=()
if [ -n "$torch" ]; then
    echo "using the torch $torch that is installed already"
    { grep -v '^torch==' constraints.txt; echo "torch==$torch"; } > "$constraints"
else
    cp constraints.txt "$constraints"
    # PyPI's wheel for Linux brings several GB of CUDA libraries, so without a GPU torch's own CPU index is tried first.
    # Asked with a short deadline: pip itself would go on retrying a host that cannot be reached.
    if ! command -v nvidia-smi > /dev/null && "$python" - "$cpu_index/torch/" <<'EOF' 2> /dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).close()
EOF
    then
        index=(--extra-index-url "$cpu_index")
    fi
fi

"$python" -m pip install --disable-pip-version-check -c "$constraints" ${index[@]+"${index[@]}"} -e ".[$extra]"
