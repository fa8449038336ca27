"""Is dcompile at least as fast as torch.compile on what people compile besides language models under AMP?

    python -m benchmarks.gpu_breadth [--only vae,unet] [--jobs 3] [--longest] [--json] [--save]
    python -m benchmarks.gpu_breadth --merge FIRST.json SECOND.json

Lines are the models of benchmarks/breadth_models.py, each in its users' dtype: FlexAttention with a window, documents
and ALiBi, image and video decoders, a U-Net, a GAN, float8 training with torchao, a long context, a loss over a large
vocabulary, and LoRA by PEFT at 8B shape. Peers, timing and memory are those of gpu_models.py, whose options these are.
diffusers, torchao and peft are needed for their lines; a line whose library is missing is an error in its row.
"""

from __future__ import annotations

from benchmarks import gpu_models
from benchmarks.breadth_models import MODELS

if __name__ == "__main__":
    raise SystemExit(gpu_models.main(MODELS, "gpu_breadth", __doc__))
