"""Generate text with a byte-level Llama, split over the ranks by tensor parallelism, decoding through one graph.

torchrun --standalone --nproc-per-node 2 launch/generate.py --tp 2 --config llama_debug --check
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from common import UserError, World, clear_errors, gather, join_world, leave_world, load_config
from tensor_parallel import shard
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

INIT_STD = 0.12
"""Six times the usual spread of random weights: with less, a random model says the same byte for ever."""

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token ids [1, n], their positions [1, n]) -> logits of the last one [vocab]."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from logits: greedy at temperature 0."""

    temperature: float
    top_k: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Generated:
    """The new tokens, and the seconds that each decode step took."""

    tokens: list[int]
    seconds: list[float]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama_debug", help="name in launch/configs, or a JSON file")
    parser.add_argument("--tp", type=int, help="ranks that share one model; default: all")
    parser.add_argument("--prompt", default="def main():", help="text; its UTF-8 bytes are the tokens")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw among the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and of sampling")
    parser.add_argument("--backend", default="dcompile", choices=("eager", "inductor", "dcompile"))
    parser.add_argument("--compile-prefill", action="store_true", help="compile the prompt's graph too")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--check", action="store_true", help="compare with one process; count graphs and all-reduces")
    return parser.parse_args()


def build_model(config: LlamaConfig, seed: int, device: torch.device) -> LlamaForCausalLM:
    """The whole model with random weights, drawn on the CPU so that they are the same everywhere."""
    torch.manual_seed(seed)
    config.initializer_range = INIT_STD
    config.use_cache = True
    return LlamaForCausalLM(config).eval().to(device)


def make_cache(model: LlamaForCausalLM, tp: int, length: int, device: torch.device) -> StaticCache:
    """Room for `length` keys and values of this rank's heads, allocated now, so that addresses never change."""
    config = model.config
    heads = config.num_key_value_heads // tp
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(1, heads, config.head_dim, model.dtype, device)
    return cache


def make_step(model: LlamaForCausalLM, cache: StaticCache) -> Step:
    """One call of the model. The cache counts its tokens in a tensor, so every decode step runs the same graph."""

    def step(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(tokens, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits[0, -1]

    return step


def sample(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token, the same on all ranks: an all-reduce leaves the same bits everywhere, and so does a seed."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.float().cpu() / sampling.temperature
    if sampling.top_k is not None:
        kept, indices = scaled.topk(min(sampling.top_k, scaled.numel()))
        return int(indices[torch.multinomial(kept.softmax(0), 1, generator=generator)])
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))


@torch.no_grad()
def generate(
    prefill: Step,
    decode: Step,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    device: torch.device,
    around_call: Callable[[int], contextlib.AbstractContextManager[Any]] = lambda call: contextlib.nullcontext(),
) -> Generated:
    """Run the prompt, then `count - 1` decode steps. `around_call(n)` is entered around decode call n."""
    generator = torch.Generator().manual_seed(sampling.seed)
    logits = prefill(torch.tensor([prompt], device=device), torch.arange(len(prompt), device=device)[None])
    tokens = [sample(logits, sampling, generator)]
    seconds: list[float] = []
    for call in range(count - 1):
        token = torch.tensor([[tokens[-1]]], device=device)
        position = torch.tensor([[len(prompt) + call]], device=device)
        start = time.perf_counter()
        with around_call(call):
            tokens.append(sample(decode(token, position), sampling, generator))
        seconds.append(time.perf_counter() - start)
    return Generated(tokens, seconds)


class Checks:
    """Looks on while decoding: refuses a second graph, and counts the all-reduces that one step really performs."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.all_reduces = 0

    @contextlib.contextmanager
    def __call__(self, call: int) -> Iterator[None]:
        if call == 0:  # compiles, in one graph because of fullgraph=True
            yield
        elif call == 1:
            with self._no_new_graph(), torch.profiler.profile(acc_events=True) as profile:
                yield
            names = [event.name for event in profile.events()]
            self.all_reduces = sum(name in ("gloo:all_reduce", "nccl:all_reduce") for name in names)
        else:
            with self._no_new_graph():
                yield

    def _no_new_graph(self) -> contextlib.AbstractContextManager[Any]:
        return torch.compiler.set_stance("fail_on_recompile") if self.compiled else contextlib.nullcontext()


def check(generated: Generated, expected: Generated, checks: Checks, layers: int, world: World) -> str:
    """Raise if the ranks did not do what one process does, with two all-reduces a layer; else say so."""
    wanted = 2 * layers if world.size > 1 else 0
    for rank, tokens in enumerate(gather(generated.tokens, world)):
        if tokens != expected.tokens:
            raise UserError(f"--check: rank {rank} generated {tokens}, a single eager process {expected.tokens}")
    if checks.all_reduces != wanted:
        raise UserError(f"--check: {checks.all_reduces} all-reduces in a decode step instead of {wanted}")
    graphs = "1 decode graph, 0 recompiles" if checks.compiled else "not compiled"
    return f"check: tokens equal a single process's, {graphs}, {wanted} all-reduces a decode step"


def print_results(arguments: argparse.Namespace, prompt: list[int], generated: Generated, decode: Step) -> None:
    print("tokens", *generated.tokens)
    print("text", repr(bytes(t for t in [*prompt, *generated.tokens] if t < 256).decode(errors="replace")))
    if steady := generated.seconds[1:]:
        first = f"first decode call {generated.seconds[0]:.2f} s, not counted"
        print(f"{len(steady) / sum(steady):.1f} tokens/s over {len(steady)} decode steps ({first})")
    if arguments.backend == "dcompile" and generated.seconds:
        import dcompile

        print(str(dcompile.receipt(decode)).splitlines()[0])


def run(arguments: argparse.Namespace, world: World) -> None:
    if arguments.tp not in (None, world.size):
        raise UserError(f"--tp {arguments.tp} with {world.size} rank(s): give torchrun --nproc-per-node {arguments.tp}")
    if not arguments.prompt or arguments.max_new_tokens < 1 or (arguments.check and arguments.max_new_tokens < 3):
        raise UserError("--prompt must not be empty, --max-new-tokens at least 1, and at least 3 with --check")
    config = load_config(arguments.config)
    prompt = list(arguments.prompt.encode())
    length = len(prompt) + arguments.max_new_tokens
    if length > config.max_position_embeddings:
        raise UserError(f"prompt and new tokens are {length}; the model has {config.max_position_embeddings} positions")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.seed)

    model = build_model(config, arguments.seed, world.device)
    shard(model, world.rank, world.size)
    prefill = decode = make_step(model, make_cache(model, world.size, length, world.device))
    if arguments.backend != "eager":
        decode = torch.compile(decode, backend=arguments.backend, fullgraph=True, dynamic=False)
        prefill = decode if arguments.compile_prefill else prefill

    checks = Checks(arguments.backend != "eager")
    around = {"around_call": checks} if arguments.check else {}
    generated = generate(prefill, decode, prompt, arguments.max_new_tokens, sampling, world.device, **around)
    if world.is_main:
        print_results(arguments, prompt, generated, decode)
    if arguments.check:
        whole = build_model(config, arguments.seed, world.device)
        alone = make_step(whole, make_cache(whole, 1, length, world.device))
        expected = generate(alone, alone, prompt, arguments.max_new_tokens, sampling, world.device)
        verdict = check(generated, expected, checks, config.num_hidden_layers, world)
        if world.is_main:
            print(verdict)


def main() -> None:
    with clear_errors():
        arguments = parse_arguments()
        world = join_world(arguments.device)
        try:
            run(arguments, world)
        finally:
            leave_world()


if __name__ == "__main__":
    main()
