"""Which parameters lack a gradient at the start of a forward, in the order of events that DDP's reducer sees."""

import pytest

from dcompile import compat
from dcompile.capture.adapters.prior_reduction import PriorReduction

NAMES = {3: "a.weight", 5: "b.weight", 8: "c.weight"}
PLACES = {3: 0, 5: 1, 8: 2}


def after(*events, frozen=()):
    """State behind events: "prepare", or parameters that got gradients in a backward."""
    prior = PriorReduction(PLACES, lambda number: number not in frozen)
    for event in events:
        prior.prepare() if event == "prepare" else prior.mark(event)
    return prior


@pytest.mark.parametrize(
    ("events", "frozen", "expects", "missing"),
    [
        ((), (), False, []),
        (("prepare",), (), True, []),  # a forward alone
        (("prepare", {3, 5, 8}), (), False, []),
        (("prepare", {3, 5}), (), True, [8]),
        (("prepare", {3, 5}, {8}), (), False, []),  # losses apart
        (("prepare", {3, 5}, "prepare"), (), True, []),
        (({3, 5},), (), False, []),  # under no_sync
        (("prepare", {3, 5, 8}, {3}), (), False, []),
        (("prepare", {3}), (5, 8), False, []),
        (("prepare", {3}), (5,), True, [8]),
    ],
)
def test_what_has_begun_and_not_finished(events, frozen, expects, missing):
    prior = after(*events, frozen=frozen)
    assert prior.expects is expects and prior.missing() == missing
    assert bool(prior.error(NAMES.__getitem__, 0)) is bool(missing)


@pytest.mark.parametrize("debug", [False, True])
def test_the_error_names_parameters_and_their_places_in_the_reducer(monkeypatch, debug):
    monkeypatch.setattr(compat.ddp, "names_parameters", lambda: debug)
    text = after("prepare", {5}).error(NAMES.__getitem__, 1)
    assert text.startswith("Expected to have finished reduction in the prior iteration before starting a new one.")
    assert "did not receive grad for rank 1: a.weight, c.weight\n" in text
    assert "Parameter indices which did not receive grad for rank 1: 0 2" in text
    assert ("TORCH_DISTRIBUTED_DEBUG" in text) is not debug
