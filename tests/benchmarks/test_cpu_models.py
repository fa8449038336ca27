"""The models' benchmark compares what it times, and its table names every model there is."""

import pytest
import torch

from benchmarks import cpu_models
from benchmarks.models import MODELS


def test_names_are_the_models():
    assert tuple(MODELS) == cpu_models.NAMES


def test_difference_sees_a_wrong_gradient_and_a_wrong_loss():
    loss, gradient = torch.tensor(2.0), torch.ones(4)
    assert cpu_models.difference([loss, gradient], [loss, gradient]) == 0
    assert cpu_models.difference([loss, gradient * 2], [loss, gradient]) == 1
    assert cpu_models.difference([loss * 1.5, gradient], [loss, gradient]) == 0.5


def test_a_step_gives_loss_and_all_gradients():
    torch.manual_seed(0)
    found = cpu_models.case("resnet").make(lambda module: module)()
    module = MODELS["resnet"].make()
    assert len(found) == 1 + len(list(module.parameters()))


def test_memory_counts_what_lives_at_once_and_what_one_step_allocates():
    def make(compiled):
        kept = torch.empty(1 << 20)

        def step():
            first = torch.empty(1 << 20)
            del first
            second = torch.empty(2 << 20)
            return [kept, second[:1].clone()]

        return step

    found = cpu_models.tensor_memory(cpu_models.Case("three", make), "eager")
    assert 12 <= found["tensors_mib"] < 13 and found["allocations"] == 3


def test_lines_are_kept_as_soon_as_they_are_there(tmp_path, monkeypatch):
    """What stops in the middle goes on there."""
    ran = []

    def line(name, arguments):
        ran.append(name)
        if name == "vit" and ran.count("vit") == 1:
            raise KeyboardInterrupt
        return {"name": name, "steps": {}, "cold": {}, "errors": {}, "memory": {}}

    monkeypatch.setattr(cpu_models, "line_of", line)
    monkeypatch.setattr("sys.argv", ["cpu_models", "--only", "mlp,vit", "--keep", str(tmp_path / "kept")])
    with pytest.raises(KeyboardInterrupt):
        cpu_models.main()
    cpu_models.main()
    assert ran == ["mlp", "vit", "vit"]


def test_a_few_bytes_more_than_inductor_are_named_where_decimals_hide_them():
    def line(name, ours):
        needs = {"inductor": 13.227, "dcompile": ours}
        return {"name": name, "memory": {peer: {"tensors_mib": mib, "allocations": 2.0} for peer, mib in needs.items()}}

    assert cpu_models.memory_page([line("lstm", 13.228), line("mlp", 13.227)]).endswith("if by bytes: lstm")
    assert cpu_models.memory_page([line("mlp", 13.227)]).endswith("if by bytes: none")
