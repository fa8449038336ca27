"""Models in plain torch.nn. All aspects of each: `make models`; a sample of them in each test run."""

import pytest

from tests.models.modules import MODULES
from tests.models.plan import check, every

# Dynamo itself reads .grad of what crosses a graph break; others warn of what they will change
pytestmark = pytest.mark.filterwarnings("ignore")

ALL = MODULES
SAMPLE = {
    "lstm": "inference_mode",
    "lstm-projected": "train",
    "rnn": "bfloat16",
    "u-net": "infer",
    "bag-mean": "train",
    "fourier": "train",
    "messages": "train",
    "normalised": "infer",
    "branching": "train",
    "conditional": "train",
    "nested": "train dynamic",
    "ensemble": "train",
    "hooked": "train dynamic",
    "statistics": "train",
    "in-place": "train",
    "losses": "train",
    "attention": "inference_mode",
}


@every(ALL, SAMPLE)
def test_against_eager(name, aspect):
    check(name, ALL[name], aspect)
