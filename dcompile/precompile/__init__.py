"""Precompile a job in one process. The package can be called: `dcompile.precompile(build, world_size=1024)`.

See `job.precompile`; `python -m dcompile.precompile` does the same for a training script.
"""

import sys

from dcompile import FunctionPackage

sys.modules[__name__].__class__ = FunctionPackage
