"""Digests of parameters tell replicas that have drifted apart, and cost a few steps in a thousand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcompile.runtime.coordination import replicas
from dcompile.runtime.coordination.replicas import MAX_NAMED, ReplicaWatch, checksum, is_due
from tests.distributed.harness import Ranks

CASE = "tests.distributed.replica_cases:"


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = list[str]()
    monkeypatch.setattr(replicas, "report", lambda _, text: found.append(text))
    return found


class Store(dict[str, Any]):
    """A store in this process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def compare_set(self, key: str, _: str, value: str) -> None:
        self.setdefault(key, value.encode())

    def get(self, key: str, default: Any = None) -> Any:  # as of a store: there is no default
        return self[key]


def watches(monkeypatch: pytest.MonkeyPatch, *parameters: dict[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    """(coordinator, watch) of each rank, on one store."""
    store, made = Store(), []
    for rank, own in enumerate(parameters):
        peers = SimpleNamespace(rank=rank, world=len(parameters), started=0, watches=[], store=store)
        monkeypatch.setattr(replicas, "peers_of", lambda _, peers=peers: peers)
        made.append((peers, ReplicaWatch(None, lambda own=own: list(own.items()))))
    return made


def step(ranks: list[tuple[Any, Any]]) -> None:
    for peers, watch in ranks:
        peers.started += 3
        watch.on_call()


def exchange(ranks: list[tuple[Any, Any]]) -> None:
    for peers, watch in ranks:
        watch.exchange(peers.store)


def test_few_steps_have_a_digest() -> None:
    due = [step for step in range(1, 5001) if is_due(step)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(5, 3), (4, 4), ()])
def test_one_changed_bit_changes_a_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    bits = value.clone().reshape(-1).view(torch.uint8)
    bits[-1] ^= 1
    assert checksum(value) == checksum(value.clone()) and checksum(value) != checksum(bits)
    assert checksum(value).dtype == torch.int32


def test_a_part_of_memory_that_is_not_aligned_has_the_checksum_of_its_copy() -> None:
    value = torch.randn(9, dtype=torch.bfloat16)
    assert checksum(value[1:]) == checksum(value[1:].clone())
    assert checksum(torch.randn(4, 6).T[1:]) is not None


def test_equal_replicas_say_nothing(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    ranks = watches(monkeypatch, {"a": torch.ones(4)}, {"a": torch.ones(4)})
    for _ in range(20):
        step(ranks)
        exchange(ranks)
    assert not messages and [watch.status() for _, watch in ranks] == ["", ""]


def test_another_parameter_is_named_with_its_rank_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    own = [{"a": torch.ones(4), "b": torch.ones(3)} for _ in range(3)]
    ranks = watches(monkeypatch, *own)
    step(ranks)
    exchange(ranks)
    own[2]["b"][1] += 2**-23
    step(ranks)
    exchange(ranks)
    (message,) = messages
    assert message.startswith("rank 2: replicas have drifted apart: rank 2 has other bits than rank 0 in 1 of 2")
    assert message.endswith("as training step 2 begins: b")
    assert all(watch.status() in message and watch.status() for _, watch in ranks)


def test_ranks_that_come_late_are_compared_later(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    ranks = watches(monkeypatch, {"a": torch.zeros(4)}, {"a": torch.ones(4)})
    first, second = ([ranks[0]], [ranks[1]])
    for _ in range(3):
        step(second)
        exchange(second)  # rank 0 has published nothing
    assert not messages
    step(first)
    exchange(first)
    exchange(second)
    assert len(messages) == 1 and "as training step 1 begins" in messages[0]


def test_calls_between_two_reductions_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ((peers, watch),) = watches(monkeypatch, {"a": torch.ones(4)})
    taken = list[int]()
    monkeypatch.setattr(replicas, "take_digest", lambda at, *_: taken.append(at))
    for started in (3, 3, 3, 6, 6, 9, 12):
        peers.started = started
        watch.on_call()
    assert taken == [3, 6, 12]


def test_many_parameters_are_counted(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    names = [f"layer{number}" for number in range(MAX_NAMED + 3)]
    ranks = watches(monkeypatch, {n: torch.zeros(2) for n in names}, {n: torch.ones(2) for n in names})
    step(ranks)
    exchange(ranks)
    assert messages[0].endswith(f"layer{MAX_NAMED - 1} and 3 more")


def test_models_of_other_parameters_are_not_compared(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    ranks = watches(monkeypatch, {"a": torch.zeros(2)}, {"b": torch.ones(2)})
    step(ranks)
    exchange(ranks)
    assert not messages


@pytest.fixture(scope="module")
def pair() -> Any:
    ranks = Ranks()
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("how", ["ddp", "hsdp"])
def test_a_rank_whose_parameter_was_changed_is_named(how: str, pair: Ranks) -> None:
    for said in pair.run(CASE + "drifts", 120, how=how):
        assert "rank 1 has other bits than rank 0 in 1 of" in said and "2.weight" in said


@pytest.mark.parametrize("how", ["ddp", "hsdp"])
def test_a_checkpoint_of_one_rank_neither_hangs_nor_alarms(how: str, pair: Ranks) -> None:
    for rank, (said, digests, saved) in enumerate(pair.run(CASE + "saves_on_one_rank", 120, how=how)):
        assert not said and digests >= 3 and bool(saved) == (rank == 0)
