"""dcompile.profile on one rank and on two: what is measured is what happened, and nothing stays behind."""

import pytest
import torch
from torch import nn

import dcompile
from dcompile.errors import NotCompiledError
from tests.distributed.harness import Ranks

CASES = "tests.explain.cases:"


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.mark.timeout(240)
def test_skew_is_apart_from_the_wire(ranks):
    early, late = ranks.run(CASES + "late", 200, seconds=0.2)
    for found in (early, late):
        assert found["steps"] == 2, "the first of three is left out"
        assert found["exchange"] == ("all_reduce", "bucket0", "ddp", 2 * (64 * 64 + 64) * 4)
        assert found["latest_rank"] == 1 and found["producer"].startswith("0")
        assert found["lanes"] == ["compute", "optimizer", "wait"] and found["kept"]
        assert "all_reduce bucket0" in found["text"] and ": 1 graph, no graph break" in found["text"]
        assert found["notes"] == ()
    assert (early["world"], late["world"]) == ((0, 2), (1, 2))
    assert 0.15 < early["skew"] < 0.6 and late["skew"] == 0
    assert early["exposed_skew"] > 0.15 and early["seconds"] < early["skew"]
    assert "rank 1 comes later" in early["advice"]


@pytest.mark.timeout(240)
def test_gathers_and_reductions_of_shards(ranks):
    nbytes = (64 * 64 + 64) * 4
    for found in ranks.run(CASES + "sharded", 200):
        assert found["same"] and found["goes_on"] and found["notes"] == ()
        assert ("all_gather", "fsdp0", nbytes, ("0.0.weight", "0.0.bias")) in found["explained"]
        assert sum(kind == "reduce_scatter" for kind, *_ in found["explained"]) == 3
        assert found["again"] == 2 and "gradients: reduced inside the compiled backward, to shards" in found["page"]
        # layers that were resharded are gathered again, but the last, which nothing needs before its gradient
        kinds = {(kind, program) for kind, program, _, _ in found["found"]}
        assert kinds == {("all_gather", "forward0"), ("all_gather", "backward0"), ("reduce_scatter", "backward0")}
        assert {size for _, _, size, _ in found["found"]} == {nbytes, 64 * 64 * 4}, "backwards need no bias"
        assert {group for _, _, _, group in found["found"]} >= {"fsdp0", "fsdp1", "fsdp2"}
        assert all(skew is not None and skew >= 0 for skew in found["skews"])
        assert all(seconds >= 0 for seconds in found["seconds"])


@pytest.mark.timeout(240)
def test_collectives_of_tensor_parallelism_are_told_of_too(ranks):
    for found in ranks.run(CASES + "parallel", 200):
        # embed's and b's results spread along the sequence, a's and head's inputs and head's result put together
        kinds = ["reduce_scatter"] * 2 + ["all_gather"] * 3
        assert sorted(kind for kind, program, _ in found["own"] if program == "forward0") == sorted(kinds)
        assert {size for _, program, size in found["own"] if program == "forward0"} == {2 * 8 * 16 * 4, 2 * 8 * 32 * 4}
        assert sorted(kind for kind, group, _, _ in found["explained"] if group.startswith(("tp", "group"))) == sorted(
            kinds
        )
        own = [entry for entry in found["explained"] if entry[1].startswith(("tp", "group"))]
        assert all(parameters == () and seconds > 0 for _, _, parameters, seconds in own)
        assert found["measured"] and all(
            exposed > 0
            and skew is not None
            and predicted > 0
            and ("model's own plan" in advice or advice.startswith(("hidden", "rank ")))
            for exposed, skew, predicted, advice in found["measured"]
        )
        assert found["same"] and found["notes"] == ()


def test_fsdp1_is_explained_as_it_will_be_compiled(ranks):
    for found in ranks.run("tests.explain.cases:explained_fsdp1", 100):
        assert (found["adapter"], found["untouched"], found["eligible"]) == ("fsdp1", True, True)
        assert found["kinds"] == {"forward": ["all_gather"] * 3, "backward": ["all_gather", *["reduce_scatter"] * 3]}
        assert found["collectives"] == 7 and found["modules"] >= {"a", "b", "c"}
        assert not any("closure" in name for name in found["modules"])


@pytest.mark.timeout(240)
def test_one_rank_explains_by_itself(ranks):
    """If it exchanged anything, it would meet the other rank's all-reduce, or nobody."""
    found, nothing = ranks.run(CASES + "explained_alone", 200)
    assert nothing == {}
    both = {"all_gather", "reduce_scatter"}
    assert found["fsdp1", "before"] == both and found["parallel", "before"] >= both
    for when in ("before", "after"):
        assert found["fsdp2", when] == both and not found["stock", when]
        assert found["logs", when] == {"all_reduce"}


def test_clocks_of_different_machines(ranks):
    for now, (latest, note) in ranks.run(CASES + "machines"):
        ((at, rank),) = latest
        assert rank == 1 and 8 < at - now < 12 and "compared to within" in note


def test_a_rank_that_measures_alone_says_so(ranks):
    (_, different), (missing, other) = ranks.run(CASES + "alone")
    assert missing[0] is None and "not all ranks had measured" in missing[1]
    assert different == other and different[0] is None and "different collectives" in different[1]


def test_a_plain_model_on_one_rank(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(4, 8)
    with pytest.raises(NotCompiledError, match="has compiled"):
        dcompile.profile(model).__enter__()
    dcompile.compile(model, options={"receipt": False})
    model(x).sum().backward()
    with pytest.raises(ValueError, match="run some inside"):
        dcompile.explain(model, x).save(tmp_path / "x.svg")
    with dcompile.profile(model) as measured:
        with pytest.raises(NotCompiledError, match="nothing is measured yet"):
            measured.save(tmp_path / "x.svg")
        assert "nothing is measured yet" in str(measured) and "nothing measured yet" in repr(measured)
        for _ in range(3):
            model(x).sum().backward()
    found = measured.timeline
    assert len(found.steps) == 2 and found.world == 1 and found.collectives == () and found.typical.compute > 0
    text = str(measured)
    assert (
        "nothing is exchanged" in text
        and "idle" in text
        and repr(measured) == "<dcompile.profile of Sequential: 2 steps>"
    )
    kernels = {kernel for step in found.steps for span in step.spans if (kernel := span.kernel)}
    assert kernels and all(kernel in text for kernel in kernels), "one process has a table of kernels"
    with torch.no_grad(), dcompile.profile(model) as too_early:
        model(x)
    with pytest.raises(NotCompiledError, match="no step ran in it that had run compiled before"):
        too_early.timeline  # noqa: B018
    assert "no step ran in it that had run compiled before" in str(too_early) and "nothing measured" in repr(too_early)
    assert "no step ran in it" in too_early._repr_html_()
    report = dcompile.explain(model, x)
    for name in ("x.json", "x.svg", "x.html", "x.txt"):
        assert measured.save(tmp_path / name).stat().st_size > 50
        assert report.save(tmp_path / f"report-{name}").exists()
    assert "<svg" in (tmp_path / "report-x.html").read_text() and "Receipt" in (tmp_path / "report-x.html").read_text()
    assert "Kernels by time, measured" in (tmp_path / "x.html").read_text()
    for thing in (measured, report):
        with pytest.raises(ValueError, match=r"no format ends in .pdf; known are .html \(a page\)"):
            thing.save(tmp_path / "x.pdf")
        assert thing._repr_html_().startswith("<iframe srcdoc=") and "<svg" not in thing._repr_html_(), "it is escaped"


def test_a_compiled_optimizer_is_named_and_steps_as_ever():
    torch.manual_seed(0)
    pair = [torch.nn.Linear(8, 8) for _ in range(2)]
    pair[1].load_state_dict(pair[0].state_dict())
    call = dcompile.compile(pair[1])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True) for model in pair]
    update = dcompile.compile(optimizers[1].step)

    def step():
        x = torch.randn(4, 8)
        for function, one, optimizer in zip((pair[0], call), (optimizers[0].step, update), optimizers, strict=True):
            function(x).square().sum().backward()
            one()
            optimizer.zero_grad()
        for mine, other in zip(*(model.parameters() for model in pair), strict=True):
            torch.testing.assert_close(mine, other)

    step()
    with dcompile.profile(call) as measured:
        for _ in range(3):
            step()
    assert [span.lane for step in measured.timeline.steps for span in step.spans if span.lane == "optimizer"]
    assert measured.timeline.notes == ("an optimizer's step is compiled: it is not in the timeline",)
    step()


def test_an_error_inside_leaves_the_model_as_it_was():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    dcompile.compile(model, options={"receipt": False})
    model(x).sum().backward()
    with pytest.raises(ZeroDivisionError), dcompile.profile(model):
        model(x).sum().backward()
        raise ZeroDivisionError
    model(x).sum().backward()
    assert dcompile.explain(model, x).timeline is None
