"""What adapters of ZeRO decide without DeepSpeed and without other ranks: buckets, layers, parts of flat groups."""

import types

import pytest
import torch

from dcompile import compat
from dcompile.capture.adapters.zero import in_buckets, layer_of
from dcompile.compat.deepspeed import FlatGroup


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("model.layers.13.norm.weight", "model.layers.13"),
        ("0.weight", "0"),
        ("experts.2.5.weight", "experts.2"),
        ("lm_head.weight", "lm_head"),
        ("model.embed2.weight", "model.embed2"),
        ("scale", ""),
    ],
)
def test_a_layer_is_gathered_together(name, layer):
    assert layer_of(name) == layer


def test_buckets_begin_with_the_last_parameters_and_hold_rows_of_them():
    sizes = [10, 20, 30, 5, 5, 40]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    places = list(zip(parameters, [0, 10, 30, 60, 65, 70], strict=True))
    found = in_buckets(places, itemsize=4, first_bytes=40, cap_bytes=120)
    assert [[place for _, place in bucket] for bucket in found] == [[70], [30, 60, 65], [0, 10]]
    assert [p.numel() for bucket in found for p, _ in bucket] == [40, 30, 5, 5, 10, 20]


def test_gradients_of_a_part_are_views_that_mark_what_belongs_to_no_parameter():
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (5,), (4,))]
    group = FlatGroup(0, 8, ((parameters[0], 0), (parameters[1], 8), (parameters[2], 13)))
    engine = types.SimpleNamespace(optimizer=types.SimpleNamespace(gradient_accumulation_dtype=torch.float32))
    first = compat.deepspeed.new_partition(engine, group, 0)
    second = compat.deepspeed.new_partition(engine, group, 1)
    assert [tuple(view.shape) for view in first] == [(2, 3), (2,)]
    assert [getattr(view, "_zero_padding", False) for view in first] == [False, True]
    assert [tuple(view.shape) for view in second] == [(5,), (3,)], "the last parameter's end belongs to the next rank"
    second.flat_partition[5:] = 1.0
    assert second[1].tolist() == [1.0, 1.0, 1.0]
    assert torch.cat([view.flatten() for view in first]).numel() == 8
