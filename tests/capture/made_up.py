"""Made-up parts around a compiled model: services that keep what they were asked, an adapter, and a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dcompile.capture.adapters.gradient_sync import BackwardCall, GradientSync
from dcompile.capture.adapters.plain import PlainAdapter, new_subject
from dcompile.capture.call_state import GraphView, Invocation, Variant
from dcompile.capture.compiled_model import CompiledModel, Settings
from dcompile.capture.services import Services
from dcompile.collectives.contract import BucketRule, Foreseen, ParamInfo, Request
from dcompile.config import Config
from dcompile.machine_model import CPU
from tests.capture.double import InterpreterCompiler, InterpreterExecutable


class MadeUpPeers:
    """Other ranks that never answer; what this one says of itself is kept."""

    def __init__(self) -> None:
        self.entered = 0
        self.work: list[str] = []

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        self.work.append(what)
        yield

    def enter(self) -> None:
        self.entered += 1


class MadeUpCompiler(InterpreterCompiler):
    """Runs graphs as they are; what a forward's compilation could foresee is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.foreseen: list[tuple[Any, Request] | None] = []

    def compile_graph(self, gm: Any, request: Request, foreseen: Foreseen | None = None) -> InterpreterExecutable:
        self.foreseen += [] if foreseen is None else [foreseen()]
        return super().compile_graph(gm, request)


class MadeUpAdapter(PlainAdapter):
    """Parameters that are known by number, and process groups that are any objects."""

    name = "made up"

    def __init__(self, *parameters: torch.Tensor, groups: dict[str, Any] | None = None) -> None:
        self.parameters, self.groups = parameters, groups or {}
        self.group = next(iter(self.groups.values()), None)
        self.infos = tuple(
            ParamInfo(number, f"p{number}", tuple(p.shape), "float32", "cpu") for number, p in enumerate(parameters)
        )
        self.rule: BucketRule | None = None
        self.compared: set[tuple[str, ...]] = set()
        self.moved = self.changed = False
        self.left: list[str] = []
        self.restored: list[str] = []

    def number_of(self, parameter: Any) -> int | None:
        return next((number for number, known in enumerate(self.parameters) if known is parameter), None)

    def param_infos(self) -> tuple[ParamInfo, ...]:
        return self.infos

    def exchanged(self, used: Any) -> tuple[ParamInfo, ...]:
        return tuple(self.infos[number] for number in sorted(used))

    def bucket_rule(self) -> BucketRule | None:
        return self.rule

    def has_moved(self) -> bool:
        return self.moved

    def leave(self, reason: str) -> None:
        self.left.append(reason)

    def has_new_parameters(self) -> bool:
        return self.changed

    def subject_of(self, plan: tuple[str, ...]) -> str | None:
        return new_subject(self.compared, plan, "collectives")

    def process_groups(self) -> list[Any]:
        return list({id(group): group for group in self.groups.values()}.values())

    def communicators(self) -> dict[str, Any]:
        return self.groups

    def restore(self, reason: str) -> None:
        self.restored.append(reason)


class MadeUpSync(GradientSync):
    """Notes what it is asked, and answers as it is told to."""

    def __init__(self, adapter: PlainAdapter) -> None:
        super().__init__(adapter)
        self.asked: list[str] = []
        self.objections: tuple[str, ...] = ()
        self.settled = True
        self.tokens: list[torch.Tensor] = []
        self.made: list[Any] = []

    def begin_call(self, call: Invocation) -> None:
        self.asked.append("begin call")

    def on_forward(self, call: Invocation, graph: GraphView) -> None:
        self.asked.append(f"forward {graph.number}")

    def token(self, call: Invocation | None) -> torch.Tensor | None:
        return self.tokens[0] if self.tokens else None

    def check_result(self, result: Any) -> None:
        self.asked.append(f"check {result}")

    def objections_to(self, key: tuple[int, ...], result: Any) -> tuple[str, ...]:
        self.asked.append(f"objections to {key}")
        return self.objections

    def after_call(self, variant: Variant, call: Invocation, result: Any) -> None:
        self.asked.append(f"after call {variant.graphs}")

    def no_graph_ran(self, call: Invocation, result: Any) -> None:
        self.asked.append("no graph ran")

    def before_backward(self, graph: GraphView, sync: bool) -> bool:
        self.asked.append(f"before backward {graph.number}, sync {sync}")
        return self.settled

    def run_backward(self, call: BackwardCall) -> list[Any]:
        self.asked.append(f"backward, sync {call.sync}, without {sorted(call.absent())}")
        return super().run_backward(call)

    def make_buckets(self, buckets: Any) -> Any:
        self.made.append(buckets)
        return self

    def forget_buckets(self) -> None:
        self.asked.append("forget buckets")


@dataclass(eq=False)
class MadeUpGraph:
    """A captured graph by its number."""

    number: int
    training: bool = True
    captured: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class MadeUp:
    """A compiled model and all that is around it."""

    model: CompiledModel
    compiler: MadeUpCompiler
    peers: list[MadeUpPeers]
    met: list[Any]
    """Process groups whose other ranks were met."""
    agreed: list[tuple[Any, str, list[Any]]]
    """(group, subject, lines) of each comparison."""
    reports: list[CompiledModel]
    """Models whose first step was reported."""

    @property
    def sync(self) -> MadeUpSync:
        assert isinstance(self.model.sync, MadeUpSync)
        return self.model.sync


def made_up(adapter: PlainAdapter | None = None, **options: Any) -> MadeUp:
    """A model under a made-up strategy."""
    compiler, peers, met, agreed, reports = MadeUpCompiler(), list[MadeUpPeers](), list[Any](), list[Any](), list[Any]()

    def connect_peers(group: Any) -> MadeUpPeers:
        met.append(group)
        peers.append(MadeUpPeers())
        return peers[-1]

    services = Services(
        compiler=compiler,  # type: ignore[arg-type]
        make_buckets=lambda *_: None,  # type: ignore[arg-type, return-value]
        agree=lambda group, subject, lines, *_, **__: agreed.append((group, subject, list(lines))),
        average=lambda *_: None,
        first_step=reports.append,
        make_shards=lambda *_: None,  # type: ignore[arg-type, return-value]
        connect_peers=connect_peers,
        figures=lambda device, group: CPU,
    )
    config = Config.make(options={"receipt": False, **options})
    model = CompiledModel(Settings(config), services)
    model.adopt(MadeUpSync(adapter or PlainAdapter()))
    return MadeUp(model, compiler, peers, met, agreed, reports)
