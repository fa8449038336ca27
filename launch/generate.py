"""Generate text with a Llama, Mistral or Qwen model, split over the ranks, with one graph for decoding.

torchrun --standalone --nproc-per-node 2 launch/generate.py --tp 2 --model FOLDER --prompt "Once upon a time"
torchrun --standalone --nproc-per-node 2 launch/generate.py --tp 2 --config llama_debug --check
"""

from __future__ import annotations

import argparse

from flags import ROUTES, Parser, add_compile_flags, add_model_flags, positive


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__file__, __doc__)
    add = parser.add_argument
    add("--model", metavar="FOLDER", help="Hugging Face folder, such as out/train/hf; without it, random weights")
    add_model_flags(parser, "llama_debug")
    add_compile_flags(parser)
    add("--tp", type=positive, help="ranks that share one model; default: all")
    add("--route", choices=ROUTES, default="manual", help="who splits it: tensor_parallel.py, torch, transformers")
    dtypes = ("auto", "fp32", "bf16", "fp16")
    add("--dtype", choices=dtypes, default="auto", help="auto: the checkpoint's or bf16; fp32 on CPUs")
    add("--prompt", action="append", help="text to go on with, such as 'def main():'; repeat it for a batch")
    add("--chat", action="store_true", help="read lines from the terminal and answer them")
    add("--batch-size", type=positive, help="sequences at a time; prompts are repeated to fill it")
    add("--max-new-tokens", type=positive, default=32, help="tokens of each answer at most")
    add("--cache-len", type=positive, help="slots of the key-value cache, such as 4096; default: what is needed")
    add("--prefill-chunk", type=positive, default=256, help="tokens of a prompt that go through the model at a time")
    add("--compile-prefill", action="store_true", help="compile the prompt's graph too; chunks then have one size")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token, 0.8 varies")
    add("--top-k", type=int, help="draw among the k likeliest tokens only, such as 40")
    add("--top-p", type=float, help="draw among the likeliest tokens that have this probability together, such as 0.9")
    add("--min-p", type=float, help="leave out tokens less likely than this share of the likeliest one, such as 0.05")
    add("--repetition-penalty", type=float, default=1.0, help="over 1, such as 1.1: said tokens become less likely")
    add("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; repeatable")
    add("--ignore-eos", action="store_true", help="do not end at the model's end-of-text tokens")
    add("--benchmark", action="store_true", help="measure prefill, decode and bandwidth")
    add("--check", action="store_true", help="compare with one process; count graphs and all-reduces")
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse_arguments()  # here for --help and wrong flags, since the imports below take seconds

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from answer import Answer
from chat import chat
from common import ARCHITECTURES, World, join_world, leave_world, load_config, parse_options, stop_on_signals
from decoding import Decoder, Generated, generate
from errors import UserError, clear_errors
from generation_checks import Checks, check, check_ranks_agree
from inference_benchmark import measure
from inference_model import build, open_weights
from kv_cache import FixedCache
from report import how_to_get_words
from sampling import Sampling
from torch.distributed.elastic.multiprocessing.errors import record

CHAT_SLOTS = 4096
"""Slots of a conversation's cache without --cache-len."""
SLOT_MULTIPLE = 64
"""The default number of slots is a multiple of this: attention kernels copy masks with unaligned rows."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_tokenizer(folder: str | None) -> Any:
    """Load the folder's tokenizer, or make a byte tokenizer for a random model."""
    if folder is None:
        from hf_folder import byte_tokenizer

        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {folder}: no tokenizer: {str(error).splitlines()[0]}") from None


def find_stop_tokens(config: Any, tokenizer: Any, folder: str | None) -> set[int]:
    """Return the token ids that end an answer, from the config, the tokenizer, and generation_config.json."""
    found = [config.eos_token_id, tokenizer.eos_token_id]
    path = Path(folder or "") / "generation_config.json"
    if folder and path.is_file():
        found.append(json.loads(path.read_text()).get("eos_token_id"))
    return {token for ids in found if ids is not None for token in (ids if isinstance(ids, list) else [ids])}


class Session:
    """A loaded model with its tokenizer and the command line's arguments."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world = args, world
        self.sampling = Sampling(
            args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed
        )
        if args.model is not None and not (Path(args.model) / "config.json").is_file():
            raise UserError(f"--model {args.model}: no config.json there; `make train` leaves a model in out/train/hf")
        self.config = load_config(args.model or args.config, tuple(ARCHITECTURES))
        if getattr(self.config, "quantization_config", None):
            raise UserError(f"--model {args.model or args.config}: quantized; give a checkpoint in fp32, bf16 or fp16")
        self.tokenizer = load_tokenizer(args.model)
        if len(self.tokenizer) > self.config.vocab_size and args.model is None:
            raise UserError(
                f"--config {args.config}: vocab_size {self.config.vocab_size} leaves no room for 258 tokens"
            )
        self.stop_tokens = set() if args.ignore_eos else find_stop_tokens(self.config, self.tokenizer, args.model)
        self.dtype = self._dtype()
        self.weights = open_weights(args.model, args.seed, world)

    def _dtype(self) -> torch.dtype:
        if self.args.dtype != "auto":
            return DTYPES[self.args.dtype]
        if self.world.device.type == "cpu" or self.args.check:
            return torch.float32  # 16-bit sums over ranks are rounded differently from those of one process
        return self.config.dtype or torch.bfloat16 if self.args.model else torch.bfloat16

    def make_decoder(self, batch: int, slots: int, alone: bool = False) -> Decoder:
        """Make a decoder with a cache of this size; `alone`: the whole model in this process, eager."""
        args, world = self.args, self.world
        rank, size = (0, 1) if alone else (world.rank, world.size)
        model = build(self.config, self.weights, args.route, rank, size, self.dtype, world.device)
        heads = self.config.num_key_value_heads // size
        cache = FixedCache(model.config, batch, slots, heads, self.dtype, world.device)
        compile_with = None if alone or args.backend == "eager" else self._compile_with()
        return Decoder(model, cache, args.prefill_chunk, compile_with, args.compile_prefill)

    def _compile_with(self) -> Callable[[Any], Any]:
        args = self.args
        options: dict[str, Any] = dict(parse_options(args.compile_options))
        if args.backend == "dcompile" and not args.compile_mode:
            options.setdefault("receipt", False)  # it would be printed in the middle of an answer
        return functools.partial(
            torch.compile,
            backend=args.backend,
            fullgraph=True,
            dynamic=False,
            mode=args.compile_mode,
            options=options or None,
        )

    def slots_for(self, prompts: list[list[int]]) -> int:
        """Return the number of cache slots: --cache-len, or enough for the prompts and answers.

        Raises UserError if these do not fit.
        """
        args = self.args
        longest = max(len(prompt) for prompt in prompts)
        chunk = args.prefill_chunk if args.compile_prefill and args.backend != "eager" else 1
        needed = -(-longest // chunk) * chunk + args.max_new_tokens
        positions = self.config.max_position_embeddings
        if longest + args.max_new_tokens > positions:
            raise UserError(
                f"prompt and new tokens are {longest + args.max_new_tokens}; the model has {positions} positions"
            )
        if args.cache_len is not None and needed > args.cache_len:
            raise UserError(
                f"--cache-len {args.cache_len}: the prompt takes {needed - args.max_new_tokens} slots, "
                f"and --max-new-tokens {args.max_new_tokens} need as many more: give {needed}"
            )
        return args.cache_len or -(-needed // SLOT_MULTIPLE) * SLOT_MULTIPLE

    def answers(self, count: int, show: Callable[[str], None]) -> list[Answer]:
        """Make an answer for each sequence; a single one is streamed."""
        streamed = show if count == 1 else lambda text: None
        return [Answer(self.tokenizer, self.stop_tokens, self.args.stop, streamed) for _ in range(count)]


def encode_prompts(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each sequence of the batch."""
    texts = args.prompt or ["def main():"]
    batch = args.batch_size or len(texts)
    if batch < len(texts):
        raise UserError(f"--batch-size {batch}: there are {len(texts)} prompts")
    prompts = [list(tokenizer(texts[row % len(texts)])["input_ids"]) for row in range(batch)]
    if not all(prompts) or not all(texts):
        raise UserError("--prompt must not be empty")
    return prompts


def answer_prompts(session: Session) -> None:
    """Answer the command line's prompts and print the answers; with --check, compare them with one process."""
    args, world = session.args, session.world
    prompts = encode_prompts(args, session.tokenizer)
    slots = session.slots_for(prompts)
    decoder = session.make_decoder(len(prompts), slots)
    checks = Checks(args.backend != "eager")
    around: dict[str, Any] = {"around_call": checks} if args.check else {}
    show = (lambda text: print(text, end="", flush=True)) if world.is_main else (lambda text: None)
    answers = session.answers(len(prompts), show)
    if len(prompts) == 1:
        show(session.tokenizer.decode(prompts[0], skip_special_tokens=True))
    generated = generate(
        decoder, prompts, args.max_new_tokens, session.sampling, lambda row, token: answers[row].add(token), **around
    )
    texts = [answer.finish() for answer in answers]
    check_ranks_agree(generated.tokens, world)
    if world.is_main:
        print_results(session, decoder, prompts, texts, generated)
    if args.check:
        alone = session.make_decoder(len(prompts), slots, alone=True)
        again = session.answers(len(prompts), lambda text: None)
        expected = generate(
            alone, prompts, args.max_new_tokens, session.sampling, lambda row, token: again[row].add(token)
        )
        layers, exact = session.config.num_hidden_layers, args.route == "manual"
        verdict = check(generated, expected, checks, layers, exact, world)
        if world.is_main:
            print(verdict)


def print_results(
    session: Session, decoder: Decoder, prompts: list[list[int]], texts: list[str], generated: Generated
) -> None:
    """Print texts that were not streamed, with --check the tokens, and the speed."""
    if len(prompts) == 1:
        print()
    else:
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            print(f"[{row}] {session.tokenizer.decode(prompt, skip_special_tokens=True)}{text}")
    if session.args.check:
        for tokens in generated.tokens:
            print("tokens", *tokens)
    if (advice := how_to_get_words(session.args.model)) is not None:
        print(advice)
    if steady := generated.seconds[1:]:
        first = f"first decode call {generated.seconds[0]:.2f} s, not counted"
        rate = len(prompts) * len(steady) / sum(steady)
        print(f"{rate:.1f} tokens/s over {len(steady)} decode steps ({first}), seed {session.args.seed}")
    if session.args.backend == "dcompile" and generated.seconds:
        import dcompile

        print(dcompile.receipt(decoder.decode_call))


def converse(session: Session) -> None:
    """Run a conversation (--chat)."""
    args = session.args
    positions = session.config.max_position_embeddings
    decoder = session.make_decoder(1, args.cache_len or min(positions, CHAT_SLOTS))
    if decoder.cache.slots > positions:
        raise UserError(f"--cache-len {args.cache_len}: the model has {positions} positions")

    def reply(prompt: list[int], show: Callable[[str], None]) -> Answer:
        (answer,) = session.answers(1, show)
        room = decoder.cache.slots - decoder.slots_of([len(prompt)])
        count = max(1, min(args.max_new_tokens, room))
        generated = generate(decoder, [prompt], count, session.sampling, lambda row, token: answer.add(token))
        check_ranks_agree(generated.tokens, session.world)
        answer.finish()
        return answer

    chat(session.tokenizer, reply, session.world)


def benchmark(session: Session) -> None:
    """Measure the speed of generation (--benchmark)."""
    prompts = encode_prompts(session.args, session.tokenizer)
    decoder = session.make_decoder(len(prompts), session.slots_for(prompts))
    speed = measure(decoder, prompts, session.args.max_new_tokens, session.sampling, session.world)
    if session.world.is_main:
        print(*speed.lines(), sep="\n")


def run(args: argparse.Namespace, world: World) -> None:
    """Load the model, and run the command line's task."""
    if args.tp not in (None, world.size):
        raise UserError(f"--tp {args.tp} with {world.size} rank(s): give torchrun --nproc-per-node {args.tp}")
    if (args.check or args.benchmark) and args.max_new_tokens < 3:
        raise UserError("--check and --benchmark need --max-new-tokens of at least 3")
    session = Session(args, world)
    if args.chat:
        converse(session)
    elif args.benchmark:
        benchmark(session)
    else:
        answer_prompts(session)


@record
def main() -> None:
    stop_on_signals()
    with clear_errors():
        args = parse_arguments()
        world = join_world(args.device)
        try:
            run(args, world)
        finally:
            leave_world()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
