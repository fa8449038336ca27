#!/usr/bin/env bash
# sanitized.sh COMMAND...: run a command with CPU kernels that AddressSanitizer watches, and memory that it hands out.
#
#     tools/sanitized.sh .venv/bin/python -m tests.ops.sweep --json build/sanitized.jsonl
#     tools/sanitized.sh .venv/bin/python -m pytest tests/codegen
#
# A kernel that reads or writes beyond a tensor, and a block that is freed twice, end their process; what and where is in
# build/sanitized/report.*, and the status is 1 if there is a new one. Offsets within the arena are not watched: it is one
# block. Needs g++ and its libasan; takes two to three times as long.
set -uo pipefail
cd "$(dirname "$0")/.."
compiler=${CXX:-g++}
preload=
for name in libasan.so libstdc++.so; do # the second, or what throws before it is loaded by another library is not found
    path=$(readlink -f "$($compiler -print-file-name="$name")")
    [ -e "$path" ] || { echo "sanitized.sh: $compiler has no $name" >&2; exit 2; }
    preload="$preload$path "
done
mkdir -p build/sanitized
report=build/sanitized/report.$$ # of this run: a test among what it runs may start another
rm -f "$report".*
options=detect_leaks=0:handle_segv=0:handle_abort=0:allocator_may_return_null=1
env LD_PRELOAD="$preload" CXX="$compiler -fsanitize=address" DCOMPILE_CACHE_DIR="$PWD/build/sanitized/cache" \
    ASAN_OPTIONS="$options:log_path=$PWD/$report" "$@"
status=$?
if compgen -G "$report.*" > /dev/null; then
    head -n 40 "$report".* >&2
    exit 1
fi
exit $status
