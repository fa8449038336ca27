"""What a training step would cost on machines that are not there: memory, collectives and time of each rank."""

from dcompile.simulate.estimate import Estimate, Setup, estimate
from dcompile.simulate.trace import Spread, Traced, trace

__all__ = ["Estimate", "Setup", "Spread", "Traced", "estimate", "trace"]
