"""Reports of a training run: metrics as JSON lines, a progress bar or log lines, and a loss curve."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import World, digest_of, gather
from errors import UserError, tell


class Reporter:
    """Writes metrics.jsonl and reports progress on rank 0; on other ranks every method does nothing."""

    def __init__(self, folder: Path, start: int, steps: int, log_freq: int, world: World) -> None:
        self.on = world.is_main
        self.steps, self.log_freq = steps, log_freq
        self.path = folder / "metrics.jsonl"
        self.bar: Any = None
        self.lost = False
        """Whether a failure to write metrics has been reported."""
        if not self.on:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output-dir {folder}: {error.strerror}") from None
        kept = [line for line in read_metrics(self.path) if line["step"] <= start] if start else []
        self.file = self.path.open("w", buffering=1)  # line by line, so that a killed run leaves whole lines
        for line in kept:
            self._write(line)
        with contextlib.suppress(Exception):  # without an open stream, log lines replace the bar
            if sys.stderr.isatty():
                from tqdm import tqdm

                self.bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)

    def _write(self, fields: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(fields) + "\n")
        except OSError as error:
            if not self.lost:
                self.lost = True
                self.say(f"metrics cannot be written to {self.path}: {error.strerror}; training goes on without them")

    def say(self, text: str) -> None:
        """Print a line on rank 0, above the progress bar if there is one."""
        if self.on and self.bar is not None:
            with contextlib.suppress(Exception):
                self.bar.write(text)
        elif self.on:
            tell(text, sys.stdout)

    def step(self, fields: dict[str, Any]) -> None:
        """Report a finished training step."""
        if not self.on:
            return
        self._write(fields)
        if self.bar is not None:
            speed = f"{fields['tokens_per_s']:.0f} tokens/s"
            with contextlib.suppress(Exception):  # the terminal may be closed
                self.bar.set_postfix_str(f"loss {fields['loss']:.4f}, {speed}", refresh=False)
                self.bar.update()
        elif fields["step"] % self.log_freq == 0 or fields["step"] == self.steps:
            self.say(
                f"step {fields['step']:>4}/{self.steps}  loss {fields['loss']:.4f}  "
                f"grad_norm {fields['grad_norm']:.3f}  lr {fields['lr']:.2e}  {fields['tokens_per_s']:.0f} tokens/s"
            )

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say beside the bar what is done meanwhile: the bar alone would stand still."""
        self._describe(f"{what}: ")
        yield
        self._describe("")

    def _describe(self, text: str) -> None:
        if self.bar is not None:
            with contextlib.suppress(Exception):
                self.bar.set_description_str(text)

    def held_out(self, step: int, loss: float) -> None:
        """Report an evaluation on held-out text."""
        if self.on:
            self._write({"step": step, "held_out_loss": loss})
            self.say(f"step {step:>4}/{self.steps}  held-out loss {loss:.4f}")

    def close(self) -> None:
        """End the metrics file and the bar, and draw the loss curve."""
        if not self.on:
            return
        try:
            self.file.close()
            with self.doing("loss curve"):
                draw_losses(self.path, self.path.with_name("loss.png"))
        except OSError as error:
            self.say(f"the loss curve of {self.path} cannot be drawn: {error.strerror}")
        if self.bar is not None:
            with contextlib.suppress(Exception):
                self.bar.close()
            self.bar = None


def say_result(report: Reporter, model: Any, folder: Path, world: World) -> int:
    """Report whether all ranks have the same parameters, and the output's place; return the exit status, 1 if not."""
    digests = gather(digest_of(model), world)
    equal = len(set(digests)) == 1
    report.say(f"parameters equal on all ranks: {'yes ' + digests[0] if equal else f'NO {digests}'}")
    report.say(f"metrics, loss curve and checkpoints are in {folder}, the model in {folder / 'hf'}")
    return 0 if equal else 1


def say_next(report: Reporter, backend: str, folder: Path) -> None:
    """Say what a user does after training: more steps, text by the model, the other compiler, a faster step."""
    if (advice := how_to_get_words(folder / "hf")) is not None:
        report.say(advice)
    model = "" if folder == Path("out/train") else f" MODEL={folder / 'hf'}"
    other = "inductor" if backend == "dcompile" else "dcompile"
    report.say(
        f"next: make generate{model} | make train BACKEND={other} to compare | docs/guide/faster.md to profile and tune"
    )


LOSS_OF_WORDS = 1.8
"""Held-out loss, in nats per byte, below which no advice is given: an estimate of where words begin."""

STEPS_TO_WORDS = 500
"""The fewest steps that are advised: an estimate. A model still above that loss then is advised twice its own steps."""


def how_to_get_words(model: Path | str | None) -> str | None:
    """Advice for a model that writes letters rather than words; None if it writes words, or was trained elsewhere."""
    folder = Path(model).parent if model is not None else None
    lines = read_metrics(folder / "metrics.jsonl") if folder is not None else []
    losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    if not losses or losses[-1] < LOSS_OF_WORDS:
        return None
    steps = max(line["step"] for line in lines)
    place = "" if folder == Path("out/train") else f" --output-dir {folder}"
    return (
        f"after {steps} steps this model writes letters more than words; more steps give words: "
        f'make train STEPS={max(STEPS_TO_WORDS, 2 * steps)} ARGS="--resume auto{place}"'
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a metrics file, none without a file. An incomplete last line is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def draw_losses(metrics: Path, image: Path) -> None:
    """Draw training and held-out loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_metrics(metrics)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for key, style, label in (("loss", "-", "training"), ("held_out_loss", "o", "held out")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)
