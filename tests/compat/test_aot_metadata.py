"""What AOTAutograd describes inputs and outputs of its graphs by."""

from dcompile import compat


def test_a_gradients_input():
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput

    primal_index = compat.aot_metadata.primal_index
    assert primal_index(GradAOTOutput(PlainAOTInput(4))) == 4
    assert primal_index(PlainAOTOutput(4)) is None and primal_index(None) is None
