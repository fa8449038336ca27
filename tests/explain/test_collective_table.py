"""What a report says of the collectives of a planned program."""

import pytest

from dcompile.codegen.schedule.order.overlap_collectives import overlap_collectives, predict_schedule
from dcompile.explain.collective_table import exchange_lines, exchanges_of
from tests.codegen.schedule.order.test_overlap_collectives import GROUPS, backward, machine


def test_collectives_say_what_blocks_them_and_what_would_change_it():
    program = overlap_collectives(backward([1000, 1000], kernels=3), machine(gbs=1.0), GROUPS)
    schedule, _, exposed_us = predict_schedule(program, machine(gbs=1.0), GROUPS)
    found = {exchange.bucket: exchange for exchange in exchanges_of(program, {0: "a.weight"}, schedule)}
    assert list(found) == ["gather0", "gather1", "reduce_scatter0", "reduce_scatter1"]
    assert sum(exchange.exposed for exchange in found.values()) * 1e6 == pytest.approx(exposed_us)

    first, last = found["gather0"], found["reduce_scatter1"]
    assert (first.producer, first.consumer) == ("nothing: shards are there from the start", "k_a0_0")
    assert first.nbytes == 4000 and first.exposed == first.seconds > 0
    assert first.advice.startswith("mostly a fixed cost per collective: one fully_shard over several")
    assert (last.producer, last.consumer) == ("k_grad1", "the end of the program") and last.exposed > 0
    hidden = found["reduce_scatter0"]
    assert (hidden.producer, hidden.exposed, hidden.advice) == ("k_grad0", 0, "hidden: nothing waits for it")

    lines = list(exchange_lines(last))
    assert lines[0] == "reduce_scatter reduce_scatter1 over g: 1.0 KiB, 1 parameter (a.weight)"
    assert lines[1] == "  starts after k_grad1; the end of the program waits for it"
    assert "by the cost model" in lines[2] and last.advice in lines[2]
