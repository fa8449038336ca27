"""Encoders over text, and models with an encoder and a decoder. All aspects: `make models`; here a sample."""

import pytest

from tests.models.encoders import ENCODERS, SEQ2SEQ
from tests.models.plan import check, every

# Dynamo itself reads .grad of what crosses a graph break; others warn of what they will change
pytestmark = pytest.mark.filterwarnings("ignore")

ALL = ENCODERS | SEQ2SEQ
SAMPLE = {
    "modernbert": "infer",
    "bart": "infer",
}


@every(ALL, SAMPLE)
def test_against_eager(name, aspect):
    check(name, ALL[name], aspect)
