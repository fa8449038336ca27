"""What other threads see while one compiles."""

import threading

import torch
from torch._dynamo.callback import callback_handler

import dcompile


def test_an_optimizer_steps_while_another_thread_compiles():
    """With one flag for all threads, Adam stacked its step sizes as for a graph, and failed."""
    parameter, seen = torch.nn.Parameter(torch.ones(2)), []

    def elsewhere():
        parameter.grad = torch.ones(2)
        torch.optim.Adam([parameter], lr=0.5, foreach=True).step()
        seen.append(torch.compiler.is_compiling() == True)  # noqa: E712

    def compiling(_arguments):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        seen.append(bool(torch.compiler.is_compiling()))

    callback_handler.register_start_callback(compiling)
    try:
        assert torch.equal(dcompile.compile(lambda x: x + 1)(torch.ones(3)), torch.full((3,), 2.0))
    finally:
        callback_handler.remove_start_callback(compiling)
    assert torch.allclose(parameter, torch.full((2,), 0.5))
    assert seen == [False, hasattr(torch.compiler, "_compile_session_context")]
    assert torch.compiler.is_compiling() is False
