"""Agreement between ranks over the store. It works where a collective would hang, since ranks already disagree.

Each rank compares itself with rank 0 only. All wait for one verdict, which the first differing rank sets, or else the
last one to come. That takes a constant number of look-ups per rank at any scale.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from dcompile.errors import PlanMismatchError
from dcompile.runtime.coordination.heartbeat import PeerCoordinator, peers_of
from dcompile.runtime.coordination.wait_policy import PeerWait

TIMEOUT_S = 60.0
"""Least time limit in seconds between the first and the last rank at a meeting, not counting time in which they
compile.

A group whose own time limit is longer uses that one.
"""

Line: TypeAlias = "tuple[str, str]"
"""(compared text, its source location). The location is for people, as paths differ between machines.

A text of several lines is one entry, of which errors show the lines that differ.
"""


def agree(group: Any, subject: str, lines: Sequence[str | Line], way_out: str = "", causes: str = "") -> None:
    """Compare `lines` over the ranks of `group`: all ranks call this, and all raise if some lines differ.

    `subject` names the lines in messages. Call it before this rank does something with others for the first time, such
    as starting a plan of collectives. Raises PlanMismatchError with the first difference, and with `causes` that are
    easily missed. It adds `way_out` if that difference comes from a line of the model, which may be intended. Also
    raises if a rank does not come in time, or goes on without calling.
    """
    peers = peers_of(group)
    if peers is not None:
        every = [(line, "") if isinstance(line, str) else line for line in lines]
        _compare_lines(peers, [(subject, ""), *every], _limit_s(peers), way_out, causes)


def _limit_s(peers: PeerCoordinator) -> float:
    """Seconds to wait for other ranks, at least as long as eager ranks wait: one may be busy with its own work."""
    return max(TIMEOUT_S, peers.limit_s())


def _next_meeting(peers: PeerCoordinator) -> tuple[int, str]:
    """Number of the next meeting, which all ranks count alike, and its prefix in the store."""
    number = peers.meetings
    peers.meetings += 1
    return number, f"meeting/{number}"


def _compare_lines(
    peers: PeerCoordinator, lines: Sequence[Line], timeout_s: float, way_out: str = "", causes: str = ""
) -> None:
    number, place = _next_meeting(peers)
    if peers.rank == 0:
        _say(peers, place, lines)
    elif _wait(peers, f"{place}/digest", number, lines, timeout_s, causes):
        difference = _difference(peers, place, lines, way_out, causes)
        if difference:
            peers.store.set(f"{place}/verdict", difference)
            peers.call_off(difference)
    if peers.store.add(f"{place}/count", 1) == peers.world:
        peers.store.set(f"{place}/verdict", "")
    _wait(peers, f"{place}/verdict", number, lines, timeout_s, causes)
    verdict = peers.store.get(f"{place}/verdict").decode()
    if verdict:
        raise PlanMismatchError(verdict)


def exchange_texts(group: Any, subject: str, text: str) -> list[str]:
    """Exchange one text per rank of a small group. Return all texts in the order of ranks.

    All ranks call this at the same point. Raises PlanMismatchError if a rank does not come in time, or goes on without
    calling.
    """
    peers = peers_of(group)
    if peers is None:
        return [text]
    number, place = _next_meeting(peers)
    peers.store.set(f"{place}/said/{peers.rank}", text)
    if peers.store.add(f"{place}/count", 1) == peers.world:
        peers.store.set(f"{place}/verdict", "")
    _wait(peers, f"{place}/verdict", number, [(subject, "")], _limit_s(peers))
    return [peers.store.get(f"{place}/said/{rank}").decode() for rank in range(peers.world)]


def any_rank_objection(group: Any, subject: str, mine: str) -> str:
    """Return the first non-empty `mine` of the ranks of `group`, or "". All ranks call this and get the same answer.

    Raises PlanMismatchError if a rank does not come in time, or goes on without calling.
    """
    peers = peers_of(group)
    if peers is None:
        return mine
    said = f"rank {peers.rank}: {mine}" if mine else ""
    return _hear(peers, subject, said, _limit_s(peers), lambda texts: next(filter(None, texts), ""))


def least(group: Any, subject: str, mine: int) -> int:
    """Return the least number that the ranks of `group` give. All ranks call this and get the same answer.

    Raises PlanMismatchError if a rank does not come in time, or goes on without calling.
    """
    peers = peers_of(group)
    if peers is None:
        return mine
    return int(_hear(peers, subject, str(mine), _limit_s(peers), lambda texts: min(texts, key=int)))


def _hear(
    peers: PeerCoordinator, subject: str, mine: str, timeout_s: float, choose: Callable[[Sequence[str]], str]
) -> str:
    """Return what the last rank to come has chosen from the texts of all ranks, in their order."""
    number, place = _next_meeting(peers)
    peers.store.set(f"{place}/said/{peers.rank}", mine)
    if peers.store.add(f"{place}/count", 1) == peers.world:
        said = [peers.store.get(f"{place}/said/{rank}").decode() for rank in range(peers.world)]
        peers.store.set(f"{place}/verdict", choose(said))
    _wait(peers, f"{place}/verdict", number, [(subject, "")], timeout_s)
    verdict: str = peers.store.get(f"{place}/verdict").decode()
    return verdict


def _say(peers: PeerCoordinator, place: str, lines: Sequence[Line]) -> None:
    peers.store.set(f"{place}/lines", zlib.compress(json.dumps(list(lines)).encode()))
    peers.store.set(f"{place}/digest", _digest(lines))


def _digest(lines: Sequence[Line]) -> str:
    return hashlib.sha256("\n".join(text for text, _ in lines).encode()).hexdigest()


def _wait(
    peers: PeerCoordinator, key: str, number: int, lines: Sequence[Line], timeout_s: float, causes: str = ""
) -> bool:
    """Wait for a key of a meeting. Raises on every rank if one of them will not come."""
    others = PeerWait(peers, timeout_s)
    pause = 0.001
    while not peers.store.check([key]):
        peers.check()
        statuses = others.poll()
        missing = {rank for rank, last in statuses.items() if last is None or last.meetings <= number}
        for rank in sorted(missing):
            last = statuses[rank]
            if last is not None and last.started > peers.started:
                peers.call_off(_without(peers, rank, last.label, lines, causes))
            if last is not None and last.ended:
                peers.call_off(
                    f"dcompile: rank {peers.rank} waited for the other ranks to say their {lines[0][0]}; "
                    f"rank {rank} has ended without"
                )
        if others.out_of_patience(missing):
            peers.call_off(
                f"dcompile: rank {peers.rank} waited {others.total_s():.1f} s for the other ranks to say their "
                f"{lines[0][0]} (at most {timeout_s:g} s beyond what they compile); "
                f"{others.describe(missing)}"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _without(peers: PeerCoordinator, rank: int, label: str, lines: Sequence[Line], causes: str) -> str:
    """Message for a rank that went on to a collective beyond the point at which this rank wants to agree."""
    mine = lines[1][0] if len(lines) > 1 else "(nothing)"
    return (
        f"dcompile: ranks disagree on their {lines[0][0]}, first at collective {peers.started + 1}:\n"
        f"  rank {rank}: {label} (as before)\n  rank {peers.rank}: {mine}\n"
        f"Every rank must run the same model code with the same settings.{f' {causes}' if causes else ''}"
    )


def _difference(peers: PeerCoordinator, place: str, lines: Sequence[Line], way_out: str, causes: str) -> str:
    """Message with the first difference from rank 0's lines, or an empty string."""
    if peers.store.get(f"{place}/digest").decode() == _digest(lines):
        return ""
    first: list[Line] = [
        (text, where) for text, where in json.loads(zlib.decompress(peers.store.get(f"{place}/lines")))
    ]
    about = lines[0][0]
    for number, (mine, theirs) in enumerate(zip_longest(lines, first, fillvalue=("(nothing)", ""))):
        if mine[0] != theirs[0]:
            in_the_model = mine[1] or theirs[1]
            return (
                f"dcompile: ranks disagree on their {about}, first at entry {number}:\n"
                f"  rank 0: {_shown(theirs, mine)}\n  rank {peers.rank}: {_shown(mine, theirs)}\n"
                "Every rank must run the same model code with the same settings."
                f"{f' {way_out}' if way_out and in_the_model else ''}{f' {causes}' if causes else ''}"
            )
    raise AssertionError("digests differ, but no entry does")


def _shown(line: Line, other: Line) -> str:
    """Text of an entry for people. Of one with several lines, such as all options, those that `other` lacks."""
    text, where = line
    known = other[0].splitlines()
    text = ", ".join(piece for piece in text.splitlines() if piece not in known)
    return f"{text}, at {where}" if where else text
