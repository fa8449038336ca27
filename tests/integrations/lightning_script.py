"""What a user's Lightning script looks like, with Trainer or Fabric, on two ranks. Prints one JSON line on rank 0."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings

import lightning
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
STEPS = 4


class Net(nn.Module):
    """An embedding, a block, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(50, 32), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.block(x))


class Lit(lightning.LightningModule):
    """It logs in the middle of a step, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        loss = nn.functional.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(tokens).flatten(0, 1), labels.flatten()), sync_dist=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(self.all_gather(outputs["loss"]).mean()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> DataLoader:
    tokens = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(1)).repeat(2 * STEPS, 1)
    return DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=2)


def by_trainer(backend: str, folder: str, step: bool = False) -> tuple[dict, nn.Module]:
    callbacks = []
    if backend == "dcompile":
        from dcompile.integrations.lightning import DcompileCallback

        callbacks = [DcompileCallback(options={"receipt": False}, step=step)]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1.0,
        callbacks=callbacks, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    model = Lit()
    trainer.fit(model, loader(), loader())
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    keys = list(torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"])
    return {"losses": model.losses, "val": float(trainer.callback_metrics["val_loss"]), "keys": keys}, model


def by_fabric(backend: str, folder: str, before: bool = False, step: bool = False) -> tuple[dict, nn.Module]:
    """`before`: torch.compile comes first, and Fabric applies it again to what it has wrapped. `step`: with updates."""
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net: nn.Module = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if backend == "dcompile" and before:
        net = torch.compile(net, backend="dcompile", options={"receipt": False})
    model, optimizer = fabric.setup(net, optimizer)
    if backend == "dcompile" and not before:
        from dcompile.integrations.lightning import compile

        assert compile(model, options={"receipt": False}, optimizer=optimizer if step else None) is model
    data, losses = fabric.setup_dataloaders(loader()), []
    for number, (tokens, labels) in enumerate(data):
        last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            fabric.backward(loss)
        losses.append(float(fabric.all_reduce(loss.detach())))
        if last:
            # the norm is read before the step if it must be finite, and the update then follows the backward
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=not step)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(f"{folder}/last.ckpt", {"model": model})
    keys = list(torch.load(f"{folder}/last.ckpt", weights_only=False)["model"])
    return {"losses": losses, "keys": keys}, model


def by_steps(backend: str, folder: str) -> tuple[dict, nn.Module]:
    """What ModelParallelStrategy does, which wants GPUs: steps of a module whose parts are sharded."""
    torch.distributed.init_process_group("gloo")
    model = Lit()
    for part in (model.net.block, model.net):
        fully_shard(part)
    if backend == "dcompile":
        from dcompile.integrations.lightning import DcompileCallback

        model.callback = DcompileCallback(options={"receipt": False})  # type: ignore[assignment]
        model.callback.setup(None, model, "fit")
    (optimizer, losses) = (model.configure_optimizers(), [])
    rank = torch.distributed.get_rank()
    for number, batch in enumerate(list(loader())[rank::2]):
        loss = model.training_step(batch, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(mean := loss.detach() / 2)
        losses.append(float(mean))
    return {"losses": losses, "keys": list(model.state_dict())}, model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--door", default="trainer")
    parser.add_argument("--folder", required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    name, _, how = arguments.door.partition(", ")
    door = {"trainer": by_trainer, "fully_shard": by_steps}.get(name, by_fabric)
    more = {"torch.compile": {"before": True}, "step": {"step": True}}.get(how, {})
    result, model = door(arguments.backend, arguments.folder, **more)
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    everyone = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(everyone, flat)
    result["ranks_equal"] = torch.equal(*everyone)
    if arguments.backend == "dcompile":
        import dcompile

        receipt = dcompile.receipt(model)
        result["receipt"] = {name: getattr(receipt, name) for name in ("adapter", "eligible", "reasons", "graphs")}
        result["receipt"] |= {name: getattr(receipt, name) for name in ("graph_breaks", "collectives", "notes")}
    if os.environ.get("RANK") == "0":
        sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    torch.distributed.barrier()
    time.sleep(0.5)  # else Gloo's thread may let go of tensors while Python ends, which aborts (torch 2.13)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
