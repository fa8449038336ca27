"""What a user's Accelerate script looks like: accumulation, clipping, checkpoints. Prints one JSON line on rank 0."""

import argparse
import json
import sys
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION = 2


class Model(nn.Module):
    """An embedding, two blocks, a head: about what a small language model does to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make_plugin(backend: str):
    if backend == "eager":
        return None
    if backend == "dcompile":
        from dcompile.integrations.accelerate import DcompilePlugin

        return DcompilePlugin(fullgraph=True, receipt=False)
    from accelerate.utils import TorchDynamoPlugin

    return TorchDynamoPlugin(backend=backend)


def train(accelerator, model, optimizer, batches) -> list[float]:
    losses = []
    for tokens, labels in batches:
        with accelerator.accumulate(model):
            loss = model(tokens, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--folder", required=True)
    arguments = parser.parse_args()

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATION, dynamo_plugin=make_plugin(arguments.backend)
    )
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 50, (32, 8), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = list(loader)

    result = {"ranks": accelerator.num_processes, "first": train(accelerator, model, optimizer, batches[:4])}
    accelerator.save_state(arguments.folder)
    result["second"] = train(accelerator, model, optimizer, batches[4:])
    accelerator.load_state(arguments.folder)
    result["again"] = train(accelerator, model, optimizer, batches[4:])

    raw = accelerator.unwrap_model(model, keep_torch_compile=False)
    flat = torch.cat([p.detach().flatten() for p in raw.parameters()])
    everyone = accelerator.gather(flat[None])
    result["ranks_equal"] = bool((everyone == everyone[0]).all())
    result["names"] = [name for name, _ in raw.named_parameters()]
    if arguments.backend == "dcompile":
        import dcompile

        receipt = dcompile.receipt(model)
        result["receipt"] = {name: getattr(receipt, name) for name in ("adapter", "eligible", "reasons", "graphs")}
        result["receipt"] |= {name: getattr(receipt, name) for name in ("graph_breaks", "collectives", "buckets")}
    if accelerator.is_main_process:
        sys.stdout.write("RESULT " + json.dumps(result, default=list) + "\n")
    accelerator.wait_for_everyone()  # else one rank may close connections while the other still reads
    time.sleep(0.5)  # else Gloo's thread may let go of what it gathered while Python ends, which aborts (torch 2.13)
    accelerator.end_training()


if __name__ == "__main__":
    main()
