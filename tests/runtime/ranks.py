"""Ranks that are threads of one process, with a store in memory: for whatever talks through the store alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from dcompile import compat
from dcompile.runtime.coordination import heartbeat as module
from dcompile.runtime.coordination.heartbeat import PeerCoordinator

_NUMBERS = itertools.count()


class Group:
    """As much of a process group as a line to its ranks asks for."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world, self.seconds = store, rank, world, 1800.0
        self.group_name = f"group {next(_NUMBERS)}"  # a line counts the groups of a name in its process

    def size(self) -> int:
        return self.world


class Ranks:
    """Lines of several ranks to one another; a rank without one never comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat.groups, "group_store", lambda group: group.store)
        monkeypatch.setattr(compat.groups, "exists", lambda group: True)
        monkeypatch.setattr(compat.groups, "can_abort", lambda group: False)
        monkeypatch.setattr(compat.groups, "time_limit", lambda group, device: group.seconds)
        monkeypatch.setattr(compat.groups, "own_store", lambda store, prefix: dist.PrefixStore(prefix, store))
        monkeypatch.setattr(module.dist, "get_rank", lambda group: group.rank)
        monkeypatch.setattr(module.dist, "get_world_size", lambda group: group.world)
        monkeypatch.setattr(module.dist, "get_backend", lambda group: "gloo")
        monkeypatch.setattr(module, "BEAT_S", 0.05)
        self.store = dist.HashStore()
        self.groups: list[Group] = []
        self.lines: list[PeerCoordinator] = []

    def start(self, world: int, present: int | None = None, store: Any = None) -> list[PeerCoordinator]:
        """Lines of the first `present` ranks of a group of `world`."""
        store = store or dist.HashStore()
        groups = [Group(store, rank, world) for rank in range(present or world)]
        self.groups += groups
        lines = [PeerCoordinator(group) for group in groups]
        self.lines += lines
        return lines

    def silence(self, line: PeerCoordinator, **process: Any) -> None:
        """Let a rank fall silent with no goodbye. `process`: what is different about its process (`RankProcess`)."""
        line._process = replace(line._process, **process)
        line._wake.set()
        while (said := line.status_of(line.rank)) is None or said.process != line._process:
            time.sleep(0.002)
        line._ended = True

    def each(self, function: Callable[[PeerCoordinator], Any], lines: list[PeerCoordinator]) -> list[Any]:
        """What `function` returns on each rank, or the text of what it raised."""

        def one(line: PeerCoordinator) -> Any:
            try:
                return function(line)
            except RuntimeError as error:
                return str(error)

        with ThreadPoolExecutor(len(lines)) as pool:
            return list(pool.map(one, lines))

    def stop(self) -> None:
        """End all threads, without goodbyes."""
        for line in self.lines:
            line._ended = True
            line._wake.set()
            line._thread.join()
