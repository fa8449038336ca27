"""Find what makes a result wrong. The package can be called, `dcompile.bisect(model, *inputs)`: see `search.bisect`."""

import sys

from dcompile import FunctionPackage

sys.modules[__name__].__class__ = FunctionPackage
