"""What a forward saves lies where its backward looks for it, with symbolic strides as well."""

import pytest
import torch

import dcompile
from tests.poison import poisoned

pytestmark = pytest.mark.usefixtures("compiled_anew")


def shifted(ids, table):
    """What a table has for tokens one place to the right behind the last one, as MBart's decoder gets them."""
    start = ids.gather(1, (ids.ne(0).sum(1) - 1).unsqueeze(-1)).squeeze()
    moved = ids.clone()
    moved[:, 1:] = ids[:, :-1].clone()
    moved[:, 0] = start
    return torch.nn.functional.embedding(moved, table) * 2


def test_a_column_that_is_saved_with_gaps_is_read_with_gaps():
    """The backward puts the first column into place once more: it is saved with the stride of a column."""
    call = dcompile.compile(shifted, dynamic=True, options={"receipt": False, "verify": True})
    with poisoned():
        for rows, length in ((3, 5), (4, 7)):
            ids = torch.randint(1, 11, (rows, length))
            found = []
            for either in (call, shifted):
                table = torch.ones(11, 6, requires_grad=True)
                (either(ids, table) * torch.arange(1, length + 1)[:, None]).sum().backward()
                found.append(table.grad)
            torch.testing.assert_close(*found)
