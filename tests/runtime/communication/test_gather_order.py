"""Which gathers are foreseen, from the order of earlier forwards and backwards."""

from dataclasses import dataclass, field

from dcompile.runtime.communication.gather_order import MAX_ORDERS, GatherOrder


@dataclass(eq=False)
class Run:
    """Programs that each gather a letter and then may start the next one's; what happens is logged."""

    log: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    number: int | None = None

    def __post_init__(self):
        def compare(order):
            self.compared.append("".join(gather.name for gather in order))

        self.order = GatherOrder(lambda: self.number, compare)

    def __call__(self, names, number="next"):
        """Gathers of one forward; upper case was started before, brackets are in vain."""
        self.number = (self.number or 0) + 1 if number == "next" else number
        self.log.clear()
        for name in names:
            found = self.order.started(Gather(name, self.log))
            self.log.append(name if found is None else name.upper())
            self.order.start_next()
        return "".join(self.log)


@dataclass
class Gather:
    name: str
    log: list[str] = field(compare=False)

    def start(self):
        return self

    def wait(self):
        self.log.append(f"({self.name})")


def test_a_second_forward_starts_each_next_gather_and_ranks_compare_the_order_once():
    run = Run()
    assert [run("abcd"), run("abcd"), run("abcd")] == ["abcd", "aBCD", "aBCD"]
    assert run.compared == ["abcd"]
    assert run.order.note() == "programs of one FSDP2 root started the next one's gather 6 times, 0 of them in vain"


def test_a_gather_in_vain_is_waited_for_and_the_last_of_its_forward():
    run = Run()
    run("abcd")
    assert run("acd") == "a(b)cd"
    assert (run.order.used, run.order.dropped) == (0, 1)


def test_where_earlier_forwards_went_apart_nothing_is_foreseen_and_what_follows_is():
    run = Run()
    run("abcd"), run("acd")
    assert [run("abcd"), run("acd")] == ["abCD", "acD"]
    assert run.compared == ["abcd", "acd"]


def test_a_forward_that_may_end_starts_nothing_in_vain():
    run = Run()
    run("abcd"), run("ab")
    assert run("abcd") == "(c)aBcD", "the first time was in vain"
    assert run("ab") == "aB" and run("abcd") == "aBcD"
    assert run.order.dropped == 1


def test_what_is_left_over_is_dropped_when_the_next_forward_begins():
    run = Run()
    run("abc")
    assert run("ab") == "aB"  # c has been started
    assert run("cab") == "(c)cab", "parameters may have changed"


def test_forwards_and_backwards_have_orders_of_their_own():
    run = Run()
    for _ in range(2):
        found = [run("abc"), run("zyx")]
    assert found == ["aBC", "zYX"]


def test_outside_of_a_forward_nothing_is_foreseen():
    run = Run()
    run("abc"), run("abc")
    assert run("abc", number=None) == "abc"
    assert run.order.note() == "programs of one FSDP2 root started the next one's gather 2 times, 0 of them in vain"


def test_orders_are_forgotten_when_a_module_gets_other_gathers():
    run = Run()
    run("abc"), run("x", number=None)
    run.order.forget()
    assert run("abd") == "abd" and run.order.note() == ""


def test_the_newest_orders_are_kept():
    run = Run()
    for number in range(MAX_ORDERS + 1):
        run(f"{number}ab")
    assert run("0ab") == "0ab" and run("8ab") == "8AB"
