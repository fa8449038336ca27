"""A conversation on the terminal: rank 0 reads and writes, all ranks generate."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from answer import Answer
from common import World
from errors import UserError, tell

Reply = Callable[[list[int], Callable[[str], None]], Answer]
"""(prompt tokens, callback for new text) -> the answer."""


PATIENCE = timedelta(days=7)
"""Maximum wait of ranks for the user. A process group's default timeout is minutes."""


def read_line(world: World, group: dist.ProcessGroup) -> str | None:
    """Return the next line that the user types, on all ranks; None at the end of the input."""
    line: list[str | None] = [None]
    if world.is_main:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line[0] = sys.stdin.readline() or None
        if sys.stdin.isatty() and line[0] is None:
            print()
    dist.broadcast_object_list(line, 0, group=group)
    return line[0]


class Conversation:
    """The conversation so far, in the model's chat template, or as plain text if it has none."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_template = getattr(tokenizer, "chat_template", None) is not None
        self.messages: list[dict[str, str]] = []
        self.text = ""

    def ask(self, line: str) -> list[int]:
        """Add the user's line; return the tokens of the whole conversation."""
        if self.has_template:
            self.messages.append({"role": "user", "content": line.rstrip("\n")})
            text = self.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        self.text += line
        return list(self.tokenizer(self.text)["input_ids"])

    def answered(self, text: str) -> None:
        """Add the model's answer."""
        if self.has_template:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.text += text


def chat(tokenizer: Any, reply: Reply, world: World) -> None:
    """Answer line by line until the input ends. `/clear` starts a new conversation, and so does a full cache."""
    conversation = Conversation(tokenizer)
    waiting = dist.new_group(backend="gloo", timeout=PATIENCE)
    say = (lambda text: print(text, end="", flush=True)) if world.is_main else (lambda text: None)
    if not conversation.has_template:
        say("this model has no chat template: it goes on with the text that you type\n")
    asked = False
    while (line := read_line(world, waiting)) is not None:
        asked = True
        if line.strip() == "/clear":
            conversation = Conversation(tokenizer)
            continue
        try:
            answer = reply(conversation.ask(line), say)
        except UserError as error:
            if world.is_main:
                tell(f"{error}; the conversation starts anew", sys.stderr)
            conversation = Conversation(tokenizer)
            continue
        conversation.answered(answer.text)
        say("\n")
    if not asked and not sys.stdin.isatty():
        say('nothing was typed: run it in a terminal, or give a text: make generate PROMPT="def main("\n')
