"""Tables of kernel launches, without a GPU."""

from dcompile.runtime.program.argument_table import Address
from dcompile.runtime.program.cuda_launch import LaunchTable


def test_kernels_of_a_table_start_in_turn():
    rows = [11, 12, 13, 1, 21, 22, 23, 1]
    table = LaunchTable.laid_out([1, 2, 99, 0], [0, 0, 0], rows, [0, Address(7), 0])
    table.names, table.first_row = ["first", "second"], 4 + 3
    before = list(table.words)
    table.start_in_turn()
    changed = {
        place: (old, new) for place, (old, new) in enumerate(zip(before, table.words, strict=True)) if old != new
    }
    assert changed == {10: (1, 0), 14: (1, 0)}
