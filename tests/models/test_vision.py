"""Images and sound. All aspects of each: `make models`; a sample of them in each test run."""

import pytest

from tests.models.audio import AUDIO
from tests.models.plan import check, every
from tests.models.vision import VISION

# Dynamo itself reads .grad of what crosses a graph break; others warn of what they will change
pytestmark = pytest.mark.filterwarnings("ignore")

ALL = VISION | AUDIO
SAMPLE = {
    "convnext": "bfloat16",
    "whisper": "infer",
}


@every(ALL, SAMPLE)
def test_against_eager(name, aspect):
    check(name, ALL[name], aspect)
