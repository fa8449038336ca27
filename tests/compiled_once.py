"""A C++ compiler that compiles each text once in this process and its children: what it made is copied from then on.

For tests of caches that begin empty, which is not what takes the time: g++ takes a third of a second for a kernel.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

SCRIPT = """#!/bin/sh
# Flags and text are what a result depends on; the last argument is where it goes.
case "$*" in *--version*) exec g++ --version;; esac
for output; do :; done
text=${output%/*}/text
cat > "$text" || exit
name=$({ echo "$*" | sed "s|$output||"; cat "$text"; } | sha256sum) || exit
kept=KEPT/${name%% *}
if [ ! -f "$kept" ]; then
    g++ "$@" < "$text" || exit
    cp "$output" "$kept.$$" && mv "$kept.$$" "$kept"
else
    cp "$kept" "$output"
fi
"""


@functools.cache
def compiler() -> str:
    """To set CXX to."""
    folder = tempfile.TemporaryDirectory(prefix="compiled-once")
    atexit.register(folder.cleanup)
    script = Path(folder.name) / "c++"
    kept = Path(folder.name) / "kept"
    kept.mkdir()
    script.write_text(SCRIPT.replace("KEPT", str(kept)))
    script.chmod(0o755)
    return str(script)
