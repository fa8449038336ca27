"""Benchmark of many other people's architectures on a GPU against torch.compile and eager: where are we slower?

    python -m benchmarks.gpu_sweep [--only densenet121,bart] [--jobs 7] [--longest] [--json] [--save]
    python -m benchmarks.gpu_sweep --merge FIRST.json SECOND.json

Lines are the models of benchmarks/sweep_models.py and benchmarks/sweep_second_models.py. They were chosen for their
variety, and no rule of the compiler was written for them. There are image models of timm and networks of diffusers.
There are models of sound, text, video and tables, too, and small networks in plain torch. Peers, timing, memory and
options are those of gpu_models.py. Lines need timm, diffusers or transformers; without its library, a line is an error
in its row.
"""

from __future__ import annotations

from benchmarks import gpu_models
from benchmarks.sweep_models import MODELS
from benchmarks.sweep_second_models import MODELS as SECOND

if __name__ == "__main__":
    raise SystemExit(gpu_models.main({**MODELS, **SECOND}, "gpu_sweep", __doc__))
