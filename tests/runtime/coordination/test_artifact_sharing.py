"""What one rank compiled, sent through the store: whole, or not at all. Ranks are threads here."""

import hashlib
import json
import time
import zlib

import pytest

from dcompile.collectives.contract import ProgramReport
from dcompile.runtime.cache.disk import KernelCache
from dcompile.runtime.coordination import artifact_sharing, wait_policy
from dcompile.runtime.coordination.artifact_sharing import ArtifactSharing
from dcompile.runtime.program.artifact import CompiledGraph
from tests.runtime.ranks import Ranks

KEY = hashlib.sha256(b"graph").hexdigest()
KERNEL = hashlib.sha256(b"kernel").hexdigest()


@pytest.fixture
def ranks(monkeypatch):
    made = Ranks(monkeypatch)
    yield made
    made.stop()


@pytest.fixture
def caches(tmp_path):
    """Rank 0's cache with one graph of one kernel, and an empty one."""
    folders = tmp_path / "rank0", tmp_path / "rank1"
    for folder in folders:
        folder.mkdir(mode=0o700)
    full, empty = map(KernelCache, folders)
    library = folders[0] / "tmp-kernels.so"
    library.write_bytes(b"not really a library " * 100)
    full.put([KERNEL], library)
    full.put_graph(KEY, CompiledGraph("def make(): ...", (), (), 64, {"k0": KERNEL}, ProgramReport()))
    return full, empty


def sharings(ranks):
    """The first has come to the graph before the second."""
    both = [ArtifactSharing(line, 5.0) for line in ranks.start(2)]
    assert [sharing.claim(KEY) for sharing in both] == [True, False]
    return both


def test_what_is_sent_arrives_whole(ranks, caches, monkeypatch):
    monkeypatch.setattr(artifact_sharing, "CHUNK_BYTES", 16)
    full, empty = caches
    giver, taker = sharings(ranks)
    giver.give(KEY, full)
    assert taker.receive(KEY, empty) == (1, "")
    (graph, libraries), (sent, sent_libraries) = empty.find_graph(KEY), full.find_graph(KEY)
    assert graph == sent
    assert libraries["k0"].read_bytes() == sent_libraries["k0"].read_bytes()
    assert libraries["k0"].parent == empty.directory
    assert not list(empty.directory.glob("tmp-*"))


def test_kernels_that_are_there_already_are_not_sent_for(ranks, caches):
    full, other = caches
    giver, taker = sharings(ranks)
    giver.give(KEY, full)
    taker.receive(KEY, other)
    (other.directory / f"{KEY}.graph").unlink()
    assert taker.receive(KEY, other) == (0, "")


def damage(ranks, place, change):
    store = ranks.lines[0].store
    store.set(place, change(store.get(place)))


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (f"program/{KEY}/0", lambda data: data[:40], "damaged"),
        (f"program/{KEY}/0", lambda data: zlib.compress(b"{}"), "does not match its checksum"),
        (f"program/{KEY}", lambda data: b"1 none", "in a form that is not understood"),
        (f"program/{KEY}", lambda data: data[:-1] + b"x", "in a form that is not understood"),
        ("library", lambda data: zlib.compress(b"another library"), "does not match its checksum"),
        ("library", lambda data: data[:10], "damaged"),
    ],
)
def test_damage_is_noticed_and_nothing_of_it_kept(ranks, caches, place, change, said):
    full, empty = caches
    giver, taker = sharings(ranks)
    giver.give(KEY, full)
    if place == "library":
        (file,) = full.directory.glob("*.so")
        place = f"library/{file.name}/0"
    damage(ranks, place, change)
    count, reason = taker.receive(KEY, empty)
    assert count is None and said in reason
    assert empty.find_graph(KEY) is None and not list(empty.directory.iterdir())


@pytest.mark.parametrize("announced", ["2000", "1"])
def test_no_more_is_fetched_or_unpacked_than_the_limit(ranks, caches, monkeypatch, announced):
    monkeypatch.setattr(artifact_sharing, "MAX_BYTES", 1 << 20)
    full, empty = caches
    giver, taker = sharings(ranks)
    giver.give(KEY, full)
    bomb = b" " * ((1 << 20) + 1)
    damage(ranks, f"program/{KEY}/0", lambda data: zlib.compress(bomb))
    damage(ranks, f"program/{KEY}", lambda data: f"{announced} {hashlib.sha256(bomb).hexdigest()}".encode())
    count, reason = taker.receive(KEY, empty)
    assert count is None and "larger than 1 MiB" in reason


def test_a_library_above_the_limit_is_not_sent(ranks, caches, monkeypatch):
    monkeypatch.setattr(artifact_sharing, "MAX_BYTES", 100)
    full, empty = caches
    giver, taker = sharings(ranks)
    giver.give(KEY, full)
    assert taker.receive(KEY, empty)[0] is None


def test_no_name_from_the_store_becomes_a_path(ranks, caches):
    """A library is written under the name of its own content, whatever it was called."""
    full, empty = caches
    giver, taker = sharings(ranks)
    giver.give(KEY, full)
    store = ranks.lines[0].store
    entry = json.loads(zlib.decompress(store.get(f"program/{KEY}/0")))
    (file,) = entry["chunks"]
    entry["chunks"] = {"../escaped.so": entry["chunks"][file]}
    entry["libraries"] = {KERNEL: "../escaped.so"}
    data = json.dumps(entry).encode()
    store.set(f"program/{KEY}/0", zlib.compress(data))
    store.set(f"program/{KEY}", f"1 {hashlib.sha256(data).hexdigest()}")
    count, reason = taker.receive(KEY, empty)
    assert count is None and "unknown kind" in reason
    assert not list(empty.directory.iterdir())


def test_whoever_comes_first_gives_whatever_its_rank(ranks, caches):
    first, second = (ArtifactSharing(line, 5.0) for line in ranks.start(2))
    assert second.claim(KEY) and second.claim(KEY) and not first.claim(KEY)
    first.give(KEY, caches[0])
    first.fail(KEY)
    assert not ranks.lines[0].store.check([f"program/{KEY}"]), "what it has not claimed"
    second.give(KEY, caches[0])
    assert first.receive(KEY, caches[1]) == (1, "")


def test_a_graph_is_news_once_and_only_where_another_rank_compiled_it(ranks):
    lines = ranks.start(2)
    first, second = (ArtifactSharing(line, 5.0) for line in lines)
    assert first.claim("cold", "/joint") and not second.claim("cold"), "in a directory of both, meanwhile"
    assert second.is_news("cold", "/joint") and not second.is_news("cold", "/joint")
    assert not first.is_news("cold", "/joint") and not second.is_news("cold", "/its own")
    another = ArtifactSharing(lines[1], 5.0)
    assert not another.claim("cold") and not another.is_news("cold", "/joint"), "another model's, later"

    assert first.claim("warm") and not second.claim("warm")
    assert not second.is_news("warm", "/joint"), "an earlier run has left it"


def test_of_many_that_come_at_once_one_compiles(ranks):
    claimed = ranks.each(lambda line: ArtifactSharing(line, 5.0).claim(KEY), ranks.start(8))
    assert sorted(claimed) == [False] * 7 + [True]


def test_a_rank_that_has_begun_products_is_let_pass_while_it_is_at_work(ranks):
    lines = ranks.start(2)
    first, second = (ArtifactSharing(line, 5.0) for line in lines)
    assert first.claim("products") and not second.claim("products")
    second.let_pass("products", KEY)  # it does nothing now: nobody waits

    def come(line):
        if line.rank == 0:
            with line.busy("compiling"):
                time.sleep(0.5)
                assert first.claim(KEY)
                time.sleep(0.5)
            return True
        time.sleep(0.2)
        second.let_pass("products", KEY)
        return not second.claim(KEY)

    assert ranks.each(come, lines) == [True, True]


def test_a_giver_that_dies_is_not_waited_for(ranks, caches, monkeypatch):
    monkeypatch.setattr(wait_policy, "STALE_S", 0.4)
    monkeypatch.setattr(wait_policy, "BEAT_S", 0.05)
    _, taker = sharings(ranks)
    with ranks.lines[0].busy("compiling"):
        time.sleep(0.2)
        ranks.lines[0]._ended = True
        count, reason = taker.receive(KEY, caches[1])
    assert count is None and "rank 0 has been silent for" in reason


def test_a_failure_of_the_giver_is_told(ranks, caches):
    giver, taker = sharings(ranks)
    giver.fail(KEY)
    assert taker.receive(KEY, caches[1]) == (None, "rank 0 could not send it")
