"""Report of a precompiled job, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dcompile.ir.diagram import count_text
from dcompile.precompile.build_only import BuiltProgram


@dataclass(frozen=True)
class RankReport:
    """Programs that one rank of one world size runs in its first steps."""

    world_size: int
    rank: int
    programs: tuple[BuiltProgram, ...]
    adapters: tuple[str, ...]
    """Adapter of each compiled model: "plain", "ddp", "fsdp2", ..."""
    notes: tuple[str, ...]
    """Reasons for stock PyTorch or eager fallbacks, as in the receipt."""
    seconds: float

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the cache entries that the rank loads."""
        return frozenset(program.key for program in self.programs if program.key is not None)

    @property
    def left(self) -> tuple[str, ...]:
        """Programs that cannot be cached, and are compiled at each start."""
        return tuple(program.name for program in self.programs if program.key is None)


@dataclass(frozen=True)
class PrecompileReport:
    """Programs that are ready for a job. `str(report)` is a page of text."""

    model: str
    directories: tuple[str, ...]
    """Directories of the caches with the programs."""
    ranks: tuple[RankReport, ...]

    @property
    def kernels(self) -> int:
        """Number of distinct kernels of all programs."""
        return len({kernel for rank in self.ranks for program in rank.programs for kernel in program.kernels})

    @property
    def built(self) -> int:
        """Number of kernels built now; the others were in the cache."""
        return sum(program.report.built for rank in self.ranks for program in rank.programs)

    @property
    def programs(self) -> int:
        """Number of distinct programs of all world sizes."""
        return len({key for rank in self.ranks for key in rank.keys})

    @property
    def seconds(self) -> float:
        """Total time in seconds."""
        return sum(rank.seconds for rank in self.ranks)

    @property
    def left(self) -> tuple[str, ...]:
        """Programs that cannot be cached, and are compiled at each start."""
        return tuple(dict.fromkeys(name for rank in self.ranks for name in rank.left))

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """World sizes, in the order in which they were precompiled."""
        return tuple(dict.fromkeys(rank.world_size for rank in self.ranks))

    def of(self, world_size: int) -> PrecompileReport:
        """Return the part about one world size."""
        return replace(self, ranks=tuple(rank for rank in self.ranks if rank.world_size == world_size))

    def differing(self) -> tuple[tuple[int, int, int], ...]:
        """Return (world size, rank, other rank) where two ranks have different programs."""
        found = []
        for world_size in self.world_sizes:
            first, *others = self.of(world_size).ranks
            found += [(world_size, first.rank, other.rank) for other in others if other.keys != first.keys]
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        adapters = dict.fromkeys(adapter for rank in self.ranks for adapter in rank.adapters)
        sizes = ", ".join(map(str, self.world_sizes))
        yield f"{self.model} ({' and '.join(adapters)}), precompiled for {sizes} ranks in {self.seconds:.1f} s"
        yield (
            f"{count_text(self.programs, 'program')}, {count_text(self.kernels, 'kernel')}: "
            f"{self.built} built, {self.kernels - self.built} from the cache; in {', '.join(self.directories)}"
        )
        for world_size in self.world_sizes:
            part = self.of(world_size)
            new = sum(not program.report.graphs_cached for rank in part.ranks for program in rank.programs)
            counts = f"{count_text(part.programs, 'program')}, {new} planned; {count_text(part.built, 'kernel')} built"
            yield f"  {world_size} ranks: {counts}"
        for name in self.left:
            yield f"left: {name} is compiled by each rank at each start: no cache can keep it"
        for world_size, one, other in self.differing():
            yield f"note: of {world_size} ranks, {one} and {other} run different programs; precompile each kind of rank"
        yield from (f"note: {note}" for note in dict.fromkeys(note for rank in self.ranks for note in rank.notes))
