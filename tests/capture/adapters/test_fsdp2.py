"""How FSDP2's inputs and outputs are converted: as stock does it, and so that Dynamo can trace it."""

import collections
import copy
import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.utils import _apply_to_tensors
from torch.nn.utils.rnn import pack_padded_sequence
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

import dcompile
from dcompile.capture.adapters.fsdp2 import convert_floats


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Inner:
    x: Any
    flag: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    n: int = 3


class Color(enum.Enum):
    RED = 1


class Sub(dict):  # type: ignore[type-arg]
    pass


class Plain:
    x = torch.ones(3)


PLAIN, LAYER = Plain(), torch.nn.Linear(2, 2)


def x() -> torch.Tensor:
    return torch.full((3,), 0.3)


CASES = {
    "none": lambda: (x(), None, [None, x()], {"a": None}),
    "scalars": lambda: (x(), 1, 0.5, True, 1j, "s", b"b", ..., torch.float32, torch.device("cpu"), torch.strided),
    "integers": lambda: (x(), torch.arange(3), torch.ones(2, dtype=torch.bool)),
    "nested": lambda: [x(), (x(), {"k": [x(), {3: x()}]})],
    "dataclass": lambda: Inner(Inner(x(), 2), [Inner(x()), Frozen(x())]),
    "named tuple": lambda: Pair(x(), Pair(None, x())),
    "enum": lambda: (x(), Color.RED),
    "subclass of dict": lambda: Sub(a=x()),
    "ordered": lambda: collections.OrderedDict(a=x(), b=None),
    "default": lambda: collections.defaultdict(list, a=x()),
    "sets": lambda: (x(), {1, 2}, frozenset([1])),
    "ranges": lambda: (x(), range(3), slice(0, 1), torch.Size([1, 2])),
    "objects": lambda: (x(), PLAIN, LAYER, len, functools.partial(len), Plain, int),
    "packed": lambda: pack_padded_sequence(torch.rand(3, 2, 1), torch.tensor([3, 2])),
    "transformers": lambda: BaseModelOutputWithPast(last_hidden_state=x(), hidden_states=(x(), x())),
    "cache": lambda: (x(), DynamicCache()),
    "empty": lambda: ([], (), {}),
}


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type | dict):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return [found for item in items for found in tensors(item)]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert [(t.dtype, t.tolist()) for t in tensors(found)] == [(t.dtype, t.tolist()) for t in tensors(expected)]


@pytest.mark.parametrize("name", CASES)
def test_values_are_converted_as_by_fsdp_and_in_one_graph(name):
    value = CASES[name]()
    expected = _apply_to_tensors(functools.partial(_cast_fp_tensor, torch.bfloat16), value)
    assert_same(convert_floats(value, torch.bfloat16), expected)

    def hooked(y: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return y * 2, convert_floats(args, torch.bfloat16), convert_floats(kwargs, torch.bfloat16)

    torch._dynamo.reset()
    _, args, kwargs = torch.compile(hooked, backend="eager", fullgraph=True)(x(), value, None, key=value)
    assert_same(args[0], expected)
    assert_same(kwargs["key"], expected)
    assert args[1] is None


def test_what_is_of_the_dtype_already_stays_itself():
    y = torch.ones(2, dtype=torch.bfloat16)
    assert convert_floats([y], torch.bfloat16)[0] is y


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("why", ["an all-reduce hook", "option stock"])
def test_blocks_compiled_whole_run_where_fsdp_stays_stock(mesh, why):
    model = torch.nn.Sequential(Block(), Block())
    for block in model:
        dcompile.compile(block, fullgraph=True, options={"distributed": "stock"} if why == "option stock" else None)
    value = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(copy.deepcopy(model)(value).sum(), value)[0]
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    if why == "an all-reduce hook":
        for block in model:
            block.set_all_reduce_hook(lambda gradient: None)
    assert torch.equal(torch.autograd.grad(model(value).sum(), value)[0], expected)
    receipt = dcompile.receipt(model[0])
    assert (receipt.graphs, receipt.eligible) == (1, False)
