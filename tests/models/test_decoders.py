"""Causal language models, mixtures of experts, state spaces, recurrences. All aspects: `make models`; here a sample.

Mixtures of experts train in test_experts.py.
"""

import pytest

from tests.models.decoders import DECODERS, EXPERTS, RECURRENT
from tests.models.plan import check, every

# Dynamo itself reads .grad of what crosses a graph break; others warn of what they will change
pytestmark = pytest.mark.filterwarnings("ignore")

ALL = DECODERS | EXPERTS | RECURRENT
SAMPLE = {
    "gemma2": "infer",
    "mamba": "infer",
}


@every(ALL, SAMPLE)
def test_against_eager(name, aspect):
    check(name, ALL[name], aspect)
