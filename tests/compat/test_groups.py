"""What is called before process groups end."""

from __future__ import annotations

from dcompile.compat import groups


class Holder:
    def __init__(self, name: str, called: list[str]) -> None:
        self.name, self.called = name, called

    def release(self) -> None:
        self.called.append(self.name)


def test_waiting_kernels_end_before_graphs_that_contain_them_are_dropped(monkeypatch):
    monkeypatch.setattr(groups, "_HOLDERS", [])
    called: list[str] = []
    graphs, inboxes, gone = (Holder(name, called) for name in ("graphs", "inboxes", "gone"))
    groups.before_groups_end(graphs.release)
    groups.before_groups_end(gone.release)
    groups.before_groups_end(inboxes.release, first=True)
    del gone
    groups.let_go()
    assert called == ["inboxes", "graphs"]
