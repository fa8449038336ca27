"""The scripts: how each is started, the smallest edit that runs it here, and small data in place of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

Edit = tuple[str, str, str]
"""A file of the checkout, a text in it, and what replaces each of its occurrences."""


def nothing(work: Path, gpu: bool) -> None:
    """No data is needed."""


@dataclass(frozen=True)
class Subject:
    """One public script. `{backend}` is the compiler's name; eager mode goes without what is `compiled`."""

    name: str
    code: str
    marker: str
    """A file that tells a checkout of this code."""
    script: tuple[str, ...]
    """The script, or -m and a module, and arguments."""
    cpu: tuple[str, ...] | None = ()
    gpu: tuple[str, ...] | None = None
    """Arguments for sizes on a CPU and on a GPU; None: not run there."""
    compiled: tuple[str, ...] = ()
    compiled_environment: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    cpu_edits: tuple[Edit, ...] = ()
    prepare: Callable[[Path, bool], None] = nothing
    environment: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    """Folders of the checkout that packages are imported from."""
    imports: tuple[str, ...] = ()
    """Modules of dcompile's that a user of this code imports."""
    distributed: bool = False
    """Whether torchrun may start it; `alone` it is started without, though for one rank only."""
    alone: bool = False
    precision: str = "float32"
    known: str = ""
    """What explains its figures, with evidence; the page says it."""

    def edits_for(self, gpu: bool) -> tuple[Edit, ...]:
        return self.edits + (() if gpu else self.cpu_edits)

    def sizes(self, gpu: bool) -> tuple[str, ...] | None:
        return self.gpu if gpu else self.cpu

    def variables(self, side: str) -> dict[str, str]:
        """Environment variables of one side."""
        compiled = {} if side == "eager" else self.compiled_environment
        return {**self.environment, **{name: value.replace("{backend}", side) for name, value in compiled.items()}}

    def command(self, side: str, gpu: bool) -> list[str]:
        """The script and its arguments for one side."""
        compiled = [] if side == "eager" else [part.replace("{backend}", side) for part in self.compiled]
        return [*self.script, *(self.sizes(gpu) or ()), *compiled]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts of common and rare words: a model can learn something from them."""
    draw = random.Random(seed)
    words = [f"w{n}" for n in range(400)]
    weights = [1 / (n + 1) for n in range(400)]
    return [" ".join(draw.choices(words, weights, k=draw.randint(20, 60))) for _ in range(count)]


TORCHTITAN = ("-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel", "--training.steps=6")
CPU_AS_DEVICE = """
import collections
import types
from torch.cpu import *

current_device = lambda: 0
get_device_name = lambda device=None: "cpu"
get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 34)
memory_stats = lambda device=None: collections.defaultdict(int)
empty_cache = reset_peak_memory_stats = lambda device=None: None
"""
"""torch.cpu with what torchtitan asks of a GPU's memory."""


def torchtitan_data(work: Path, gpu: bool) -> None:
    """Its test data, where the checkout lacks them, and a device module for CPUs."""
    data = work / "tests/assets/c4_test/data.json"
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text("\n".join(json.dumps({"text": text}) for text in sentences(400)))
    (work / "cpu_as_device.py").write_text(CPU_AS_DEVICE)


STANDINS = {
    "wandb.py": "",
    "rustbpe.py": "",
    "tiktoken.py": "",
    "words.py": '''
import zlib


class Words:
    """A tokenizer in tiktoken's way: each word has a number of its own, as far as there are any."""

    def __init__(self, n_vocab, special):
        self.n_vocab, self.special = n_vocab, {name: n_vocab - len(special) + n for n, name in enumerate(special)}
        self.special_tokens_set = set(special)

    def encode_ordinary(self, text):
        return [zlib.crc32(word.encode()) % (self.n_vocab - len(self.special)) for word in text.split()]

    def encode_ordinary_batch(self, texts, num_threads=1):
        return [self.encode_ordinary(text) for text in texts]

    def encode_single_token(self, text):
        return self.special[text]

    def decode(self, ids):
        return " ".join(map(str, ids))
''',
    "pyarrow/__init__.py": "",
    "pyarrow/parquet.py": '''
import json


class ParquetFile:
    """Row groups of texts, from JSON."""

    def __init__(self, path):
        self.groups = json.load(open(path))
        self.num_row_groups = len(self.groups)

    def read_row_group(self, number):
        return Group(self.groups[number])


class Group:
    def __init__(self, texts):
        self.texts = texts

    def column(self, name):
        return self

    def to_pylist(self):
        return self.texts
''',
}
"""Modules in the place of packages that nanochat reads its data with, so that a machine needs none of them."""
UNUSED = ("filelock", "psutil", "requests", "yaml")
"""Packages that nanochat imports, and that nothing calls here: empty modules where they are missing."""

SPECIAL = "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end"


def nanochat_data(work: Path, gpu: bool) -> None:
    """Two shards of texts and a tokenizer, where nanochat looks for them."""
    import torch

    missing = {f"{name}.py": "FileLock = None" for name in UNUSED if importlib.util.find_spec(name) is None}
    for name, text in {**STANDINS, **missing}.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(text)
    base, vocab = work / "base", 32768 if gpu else 1024
    (base / "base_data_climbmix").mkdir(parents=True)
    (base / "tokenizer").mkdir()
    for shard in range(2):
        groups = [sentences(4000 if gpu else 200, seed=10 * shard + n) for n in range(4)]
        (base / f"base_data_climbmix/shard_{shard:05d}.parquet").write_text(json.dumps(groups))
    torch.save(torch.full((vocab,), 4, dtype=torch.int32), base / "tokenizer/token_bytes.pt")
    special = [f"<|{name}|>" for name in SPECIAL.split()]
    code = f"import pickle, sys, words; pickle.dump(words.Words({vocab}, {special}), sys.stdout.buffer)"
    with (base / "tokenizer/tokenizer.pkl").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], cwd=work, check=True, stdout=file)


def nanochat_sft_data(work: Path, gpu: bool) -> None:
    """What `nanochat_data` writes, and a model that is not trained at all."""
    nanochat_data(work, gpu)
    code = "import runpy, sys; sys.argv[0] = 'base_train'; runpy.run_module('scripts.base_train', run_name='__main__')"
    size = NANOCHAT_GPU if gpu else NANOCHAT_CPU
    environment = {**os.environ, **NANOCHAT, "TORCHDYNAMO_DISABLE": "1"}
    arguments = [*size, "--num-iterations=1", *NO_EVALUATION]
    subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=work, env=environment, check=True, stdout=subprocess.DEVNULL
    )


DRAWS_AS_EAGER = {"DCOMPILE_FALLBACK_RANDOM": "1"}
"""For scripts that draw numbers inside of what they compile: both compilers then draw those of eager mode."""

NANOCHAT = {"NANOCHAT_BASE_DIR": "base", "NANOCHAT_DTYPE": "bfloat16", "WANDB_MODE": "disabled"}
NANOCHAT_CPU = (
    "--depth=2",
    "--max-seq-len=128",
    "--device-batch-size=2",
    "--total-batch-size=256",
    "--window-pattern=SL",
)
NANOCHAT_GPU = ("--depth=12", "--max-seq-len=2048", "--device-batch-size=16", "--total-batch-size=32768")
NO_EVALUATION = ("--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1")

SFT_TASKS = """from tasks.common import Task
class Told(Task):
    def __init__(self, **kwargs): super().__init__()
    def num_examples(self): return 400
    def get_example(self, n):
        asked = " ".join(f"w{(n * k) % 97}" for k in range(1, 12))
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": asked[::-1]}]}
SmolTalk = MMLU = GSM8K = Told"""
"""Conversations in the place of those of the hub."""

VAE = "torch.nn.functional.adaptive_avg_pool2d(x, latent_size).repeat(1, 2, 1, 1)[:, :4].contiguous()"
"""DiT's images in four channels, without a pretrained encoder."""

NANOCHAT_BASE = Subject(
    name="nanochat base_train, bfloat16",
    code="nanochat",
    marker="scripts/base_train.py",
    script=("-m", "scripts.base_train", *NO_EVALUATION),
    cpu=(*NANOCHAT_CPU, "--num-iterations=6"),
    gpu=(*NANOCHAT_GPU, "--num-iterations=12"),
    prepare=nanochat_data,
    environment=NANOCHAT,
    precision="bfloat16",
)


def texts(work: Path, gpu: bool) -> None:
    """Two text files and a tokenizer of words."""
    (work / "data").mkdir(exist_ok=True)
    for name in ("a", "b"):
        (work / f"data/{name}.txt").write_text("\n".join(sentences(300, seed=ord(name))))
    word_tokenizer(work / "data/tokenizer")


CHAT = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"


def word_tokenizer(folder: Path) -> int:
    """Save a tokenizer of `sentences`, one number for each word; return how many there are."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", *(f"w{n}" for n in range(400))]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocab)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    return len(vocab)


def tiny_llama(folder: Path) -> None:
    """A Llama of two layers with that tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=word_tokenizer(folder), **sizes)).save_pretrained(folder)


def chats(work: Path, gpu: bool) -> None:
    """A model, conversations and preferences."""
    tiny_llama(work / "data/model")

    def told(prompt: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    good, bad = sentences(64), sentences(64, seed=1)
    rows = {
        "sft": [{"messages": told(a, b)} for a, b in zip(good, bad, strict=True)],
        "dpo": [{"chosen": told(a, a), "rejected": told(a, b)} for a, b in zip(good, bad, strict=True)],
    }
    for name, lines in rows.items():
        (work / f"data/{name}").mkdir()
        (work / f"data/{name}/train.jsonl").write_text("\n".join(map(json.dumps, lines)))


def fineweb(work: Path, gpu: bool) -> None:
    """Two shards of tokens with the header of dion's loader."""
    import numpy

    (work / "data/tokens").mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for split in ("train", "val"):
        tokens = (draw.zipf(1.5, 200_000) % 50_000).astype(numpy.uint16)
        header = numpy.zeros(256, numpy.int32)
        header[:3] = 20240520, 1, len(tokens)
        (work / f"data/tokens/fineweb_{split}_000001.bin").write_bytes(header.tobytes() + tokens.tobytes())


def c4(work: Path, gpu: bool) -> None:
    """Tokens as OLMo-core's example names them."""
    import numpy

    (work / "data").mkdir(exist_ok=True)
    draw = numpy.random.default_rng(0)
    for name in ("c4-train.00000-00099", "c4-validation.00000-00008"):
        (draw.zipf(1.5, 400_000) % 50_000).astype(numpy.uint16).tofile(work / f"data/{name}.npy")


def images(work: Path, gpu: bool) -> None:
    """Folders of small pictures, one for each class."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for split, label, number in ((s, c, n) for s in ("train", "validation") for c in range(4) for n in range(16)):
        folder = work / f"data/{split}/{label}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 255, (64, 64, 3), dtype=numpy.uint8) // 2 + 32 * label
        Image.fromarray(pixels.astype(numpy.uint8)).save(folder / f"{number}.png")


def mrpc(work: Path, gpu: bool) -> None:
    """Pairs of sentences, and a BERT of two layers under the name that the example asks for."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = work / "bert-base-cased"
    config = BertConfig(vocab_size=word_tokenizer(folder), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.update(sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    glue = work / "nyu-mll/glue"
    glue.mkdir(parents=True)
    files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "validation")]
    glue.joinpath("README.md").write_text(
        f"---\nconfigs: {json.dumps([{'config_name': 'mrpc', 'data_files': files}])}\n---\n"
    )
    for split in ("train", "validation"):
        rows = [
            {"sentence1": a, "sentence2": b, "label": n % 2, "idx": n}
            for n, (a, b) in enumerate(zip(sentences(160), sentences(160, seed=1), strict=True))
        ]
        (glue / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


TRL = Subject(
    name="TRL DPO with LoRA",
    code="trl",
    marker="trl/scripts/dpo.py",
    script=(
        *("trl/scripts/dpo.py", "--dataset_name", "data/dpo", "--model_name_or_path", "data/model"),
        *("--use_peft", "--lora_r", "8", "--lora_alpha", "16", "--no_remove_unused_columns"),
        *("--max_steps", "20", "--logging_steps", "1", "--report_to", "none", "--save_strategy", "no"),
        *("--gradient_checkpointing", "false", "--learning_rate", "1e-3"),
    ),
    cpu=("--use_cpu", "--bf16", "false", "--per_device_train_batch_size", "2"),
    compiled=("--torch_compile", "--torch_compile_backend", "{backend}"),
    prepare=chats,
    paths=(".",),
    imports=("dcompile.integrations.transformers",),
    environment={"TRL_EXPERIMENTAL_SILENCE": "1"},
    distributed=True,
    alone=True,
    known="TorchInductor's wrapper hides from TRL that the model has adapters: its trainer calls a reference model "
    "that it does not have",
)

DION_ON_CPU: tuple[Edit, ...] = (
    ("train.py", 'assert torch.cuda.is_available(), "CUDA must be available"', "pass"),
    ("train.py", 'backend="nccl"', 'backend="gloo"'),
    ("train.py", 'device = f"cuda:{local_rank}"', "pass"),
    ("train.py", "torch.cuda.set_device(device)", "pass"),
    ("train.py", '"cuda"', '"cpu"'),
    ("train.py", ", device_ids=[local_rank], output_device=local_rank", ""),
    ("train.py", "torch.cuda.synchronize()", "pass"),
    ("train.py", "torch.cuda.max_memory_allocated()", "0"),
    ("train.py", "op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM"),
    ("models/gpt_utils.py", ".cuda()", ""),
    ("configs/muon_160m.yaml", "val_tokens: 32768", "val_tokens: 512"),
)

SUBJECTS: tuple[Subject, ...] = (
    NANOCHAT_BASE,
    replace(
        NANOCHAT_BASE,
        name="nanochat base_train, float8",
        gpu=(*NANOCHAT_GPU, "--num-iterations=12", "--fp8"),
        cpu=None,
        precision="float8",
    ),
    replace(
        NANOCHAT_BASE,
        name="nanochat chat_sft, bfloat16",
        script=("-m", "scripts.chat_sft", "--eval-every=-1", "--chatcore-every=-1", "--num-iterations=6"),
        cpu=("--eval-tokens=1024",),
        gpu=("--eval-tokens=65536",),
        edits=(("scripts/chat_sft.py", "from tasks.smoltalk import SmolTalk", SFT_TASKS),),
        prepare=nanochat_sft_data,
    ),
    TRL,
    replace(
        TRL,
        name="TRL SFT",
        script=(
            *("trl/scripts/sft.py", "--dataset_name", "data/sft", "--model_name_or_path", "data/model"),
            *("--max_steps", "20", "--logging_steps", "1", "--report_to", "none", "--save_strategy", "no"),
            *("--gradient_checkpointing", "false", "--learning_rate", "1e-3"),
        ),
        known="steps of 20 ms vary by a third in a run, 16 to 26 ms with dcompile, 17 to 29 with TorchInductor; the "
        "additional breaks are the same ones, counted for the module's call and for the function in it",
    ),
    Subject(
        name="Accelerate nlp_example",
        code="accelerate",
        marker="examples/nlp_example.py",
        script=("examples/nlp_example.py",),
        cpu=("--cpu",),
        gpu=(),
        edits=(("examples/nlp_example.py", 'evaluate.load("glue", "mrpc")', "evaluate.combine([])"),),
        compiled_environment={"ACCELERATE_DYNAMO_BACKEND": "{backend}"},
        paths=("src",),
        prepare=mrpc,
        imports=("dcompile.integrations.accelerate",),
        distributed=True,
        alone=True,
        known="in turn in one process, 25 rounds of ever other lengths: 1.00 to 1.02 of TorchInductor's step. One more "
        "graph is compiled: the first call sets config.problem_type, which the guards of its graph refuse afterwards",
    ),
    Subject(
        name="dion train.py with Muon",
        code="dion",
        marker="models/gpt_model.py",
        script=(
            *("train.py", "--config", "configs/muon_160m.yaml", "--data_dir", "data/tokens", "--no_wandb"),
            *("--num_iterations", "6", "--no_triton"),
        ),
        cpu=(
            *("--model_dim", "64", "--n_layer", "2", "--n_head", "2", "--sequence_length", "64"),
            *("--batch_size", "4", "--device_batch_size", "2"),
        ),
        gpu=("--batch_size", "32", "--device_batch_size", "32"),
        edits=(
            ("configs/muon_160m.yaml", "val_loss_every: 125", "val_loss_every: 0"),
            ("configs/muon_160m.yaml", "val_tokens: 10485760", "val_tokens: 32768"),
        ),
        cpu_edits=DION_ON_CPU,
        prepare=fineweb,
        distributed=True,
        precision="bfloat16",
    ),
    Subject(
        name="DiT train.py",
        code="dit",
        marker="diffusion/gaussian_diffusion.py",
        script=("train.py", "--data-path", "data/train", "--num-classes", "4", "--epochs", "1", "--log-every", "1"),
        cpu=("--model", "DiT-S/8", "--global-batch-size", "12", "--num-workers", "0"),
        gpu=("--model", "DiT-S/2", "--global-batch-size", "8"),
        edits=(
            ("train.py", "from diffusers.models import AutoencoderKL", ""),
            ("train.py", 'AutoencoderKL.from_pretrained(f"stabilityai/sd-vae-ft-{args.vae}").to(device)', "None"),
            ("train.py", "vae.encode(x).latent_dist.sample().mul_(0.18215)", VAE),
            ("train.py", "DDP(model.to(device), device_ids=[rank])", "torch.compile(DDP(model.to(device)))"),
        ),
        cpu_edits=(
            ("train.py", 'assert torch.cuda.is_available(), "Training currently requires at least one GPU."', "pass"),
            ("train.py", '"nccl"', '"gloo"'),
            ("train.py", "device = rank % torch.cuda.device_count()", 'device = "cpu"'),
            ("train.py", "torch.cuda.set_device(device)", "pass"),
            ("train.py", "torch.cuda.synchronize()", "pass"),
        ),
        environment=DRAWS_AS_EAGER,
        prepare=images,
        distributed=True,
    ),
    Subject(
        name="timm train.py",
        code="timm",
        marker="timm/models/_factory.py",
        script=(
            *("train.py", "--data-dir", "data", "--num-classes", "4", "--epochs", "1", "--workers", "1"),
            *("--log-interval", "1", "--no-prefetcher"),
        ),
        cpu=("--model", "resnet10t", "--img-size", "64", "-b", "8", "--device", "cpu"),
        gpu=("--model", "resnet50", "-b", "16"),
        compiled=("--torchcompile", "{backend}"),
        prepare=images,
    ),
    Subject(
        name="LeanRL PPO",
        code="leanrl",
        marker="leanrl/ppo_continuous_action_torchcompile.py",
        script=(
            *("leanrl/ppo_continuous_action_torchcompile.py", "--env-id", "Pendulum-v1", "--num-steps", "32"),
            *("--num-minibatches", "2", "--update-epochs", "2", "--total-timesteps", "160"),
        ),
        gpu=(),
        compiled=("--compile",),
        edits=(
            (
                "leanrl/ppo_continuous_action_torchcompile.py",
                "np.clip(obs, -10, 10))",
                "np.clip(obs, -10, 10), env.observation_space)",
            ),
            ("leanrl/ppo_continuous_action_torchcompile.py", "envs.reset()", "envs.reset(seed=1)"),
            (
                "leanrl/ppo_continuous_action_torchcompile.py",
                "agent_inference_p.to_module(agent_inference)",
                "agent_inference_p.to_module(agent_inference); agent_inference.requires_grad_(False)",
            ),
        ),
        environment={"WANDB_MODE": "disabled", **DRAWS_AS_EAGER},
        known="the additional breaks are the same ones, counted for the module's call and for the function in it",
    ),
    Subject(
        name="litgpt pretrain",
        code="litgpt",
        marker="litgpt/pretrain.py",
        script=(
            *("-m", "litgpt", "pretrain", "pythia-14m", "--data", "TextFiles", "--data.train_data_path", "data"),
            *("--data.num_workers", "0", "--tokenizer_dir", "data/tokenizer", "--out_dir", "out", "--devices", "1"),
            *("--train.log_interval", "1", "--train.save_interval", "1000000", "--logger_name", "csv"),
            *("--eval.final_validation", "false", "--train.lr_warmup_steps", "2"),
        ),
        cpu=(
            *("--train.max_seq_length", "64", "--train.global_batch_size", "4", "--train.micro_batch_size", "2"),
            *("--train.max_tokens", "4096", "--precision", "32-true"),
        ),
        gpu=(
            *("--train.max_seq_length", "512", "--train.global_batch_size", "16", "--train.micro_batch_size", "8"),
            *("--train.max_tokens", "98304", "--precision", "bf16-true"),
        ),
        prepare=texts,
        known="in turn in one process: 0.99 of TorchInductor's step and 0.90 of its peak. The script's own memory "
        "grows: in eager mode 1666 MiB after 48 steps, TorchInductor 1340, dcompile 1801",
    ),
    Subject(
        name="OLMo-core llm example",
        code="olmo-core",
        marker="src/olmo_core/nn/transformer/model.py",
        script=(
            *("src/examples/llm/train.py", "tiny", "--save-folder=out", "--work-dir=cache"),
            *("--trainer.max_duration={value: 6, unit: steps}", "--trainer.callbacks.lm_evaluator.enabled=false"),
            *("--trainer.callbacks.downstream_evaluator.enabled=false", "--trainer.no_checkpoints=true"),
        ),
        cpu=(
            *("--model-factory=olmo2_1M", "--sequence-length=64", "--data_loader.global_batch_size=512"),
            *("--train_module.rank_microbatch_size=128", "--data_loader.num_workers=0"),
        ),
        gpu=("--sequence-length=1024",),
        cpu_edits=(
            (
                "src/examples/llm/train.py",
                "prepare_training_environment()",
                'prepare_training_environment(backend="gloo")',
            ),
            ("src/olmo_core/train/train_module/transformer/common.py", "if torch.cuda.is_available():", "if True:"),
            ("src/examples/llm/train.py", '.with_callback("gpu_monitor", GPUMemoryMonitorCallback())', ""),
        ),
        environment={"OLMO_DATA_ROOT": "data"},
        paths=("src",),
        prepare=c4,
        distributed=True,
        precision="bfloat16",
    ),
    Subject(
        name="torchtitan llama3 debugmodel",
        code="torchtitan",
        marker="torchtitan/components/data/loader.py",
        script=TORCHTITAN,
        cpu=None,  # its attention is FlexAttention, which has no backward on CPUs
        gpu=(),
        compiled=("--compile.enable", "--compile.backend={backend}"),
        distributed=True,
        precision="bfloat16",
    ),
    Subject(
        name="torchtitan llama3 debugmodel with SDPA",  # its default until 2026-06-09
        code="torchtitan",
        marker="torchtitan/hf_datasets/text_datasets.py",
        script=TORCHTITAN,
        cpu=("--training.local_batch_size=2", "--training.seq_len=128"),
        gpu=(),
        compiled=("--compile.enable", "--compile.backend={backend}"),
        cpu_edits=(
            ("torchtitan/tools/utils.py", '_get_available_device_type() or "cuda"', '"cpu"'),
            ("torchtitan/tools/utils.py", "_get_device_module(device_type)", '__import__("cpu_as_device")'),
            # Gloo has no sum with a factor, which the division needs
            (
                "torchtitan/distributed/fsdp.py",
                "divide_factor(1.0)",
                "divide_factor(1.0), module.set_force_sum_reduction_for_comms(True)",
            ),
        ),
        prepare=torchtitan_data,
        distributed=True,
        precision="bfloat16",
    ),
)
"""In the order of the page."""
