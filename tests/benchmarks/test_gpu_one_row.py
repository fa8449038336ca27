"""The benchmark of products of one row: its program and its tiles."""

import numpy as np
import torch

from benchmarks import gpu_one_row
from dcompile.ir.interpret import interpret


def test_the_program_is_two_products_and_swiglu():
    program = gpu_one_row.product_program(2, 256, 288)
    generator = torch.Generator().manual_seed(0)
    shapes = ((256,), (288, 256), (288, 256))
    x, gate, up = (torch.randn(shape, generator=generator).bfloat16().float() / 4 for shape in shapes)
    given = {"x": x.numpy(), "w0": gate.numpy(), "w1": up.numpy()}
    (got,) = interpret(program, given)
    want = torch.nn.functional.silu((gate @ x).bfloat16()).float() * (up @ x).bfloat16().float()
    assert np.linalg.norm(got - want.numpy()) <= gpu_one_row.TOLERANCE * np.linalg.norm(want.numpy())


def test_a_size_has_several_tiles_and_todays():
    line = gpu_one_row.Line.of("down/2")
    texts = {tile: source.text for tile, source in line.kernels.items()}
    assert None in texts and len({*texts.values()}) > 4
    assert all("gdc_launch_dependents()\n    gdc_wait()" in text for text in texts.values())
    assert line.nbytes == 7168 * 4096 * 2
