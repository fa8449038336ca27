"""Benchmark of other workloads than language models under AMP against torch.compile and eager.

    python -m benchmarks.gpu_breadth [--only vae,unet] [--jobs 3] [--longest] [--json] [--save]
    python -m benchmarks.gpu_breadth --merge FIRST.json SECOND.json

Lines are the models of benchmarks/breadth_models.py, each in its users' dtype. They are FlexAttention with a window,
documents and ALiBi, image and video decoders, a U-Net, a GAN, and float8 training with torchao. Decoder layers of an 8B
Llama are trained in bfloat16 and in float8. Others are a long context without and with a sliding window, and a padded
batch. A loss over a large vocabulary follows, and a small language model in nanochat's style, in bfloat16 and with its
own float8 layers. The last are LoRA by PEFT at 8B shape: checkpointed with float32 adapters, and not checkpointed with
bfloat16 ones. Peers, timing, memory and options are those of gpu_models.py. Some lines need
diffusers, torchao or peft; without its library, a line is an error in its row.
"""

from __future__ import annotations

from benchmarks import gpu_models
from benchmarks.breadth_models import MODELS

if __name__ == "__main__":
    raise SystemExit(gpu_models.main(MODELS, "gpu_breadth", __doc__))
