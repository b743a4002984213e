"""The exercises of chapter 15: solutions are accepted; wrong answers and untouched skeletons are not."""

import sys

import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected, skeletons

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex15  # noqa: E402

skeleton = skeletons("15_serving")


# The slot of a new token


def next_slot(
    pages, num_computed, free, page_size, *, always=False, never=False, first=False, keep=False, forget=False, slot=None
):
    if always or (num_computed == len(pages) * page_size and not never):
        if not free:
            return -1
        page = free[0] if first else free[-1]
        if not keep:
            free.remove(page)
        if not forget:
            pages.append(page)
    page = ([*pages, 0] if never or forget else pages)[num_computed // page_size]
    return page * page_size + num_computed % page_size if slot is None else slot(page, num_computed, page_size)


def next_slot_by_divmod(pages, num_computed, free, page_size):
    which, place = divmod(num_computed, page_size)
    if which == len(pages):
        if not free:
            return -1
        pages.append(free.pop())
    return pages[which] * page_size + place


@pytest.mark.parametrize("right", [next_slot, next_slot_by_divmod])
def test_slot_solutions(right):
    accepted(ex15.check_next_slot(right))


def slot_with(**wrong):
    return lambda *args: next_slot(*args, **wrong)


def slot_for_nothing(pages, num_computed, free, page_size):
    """Says -1 where there is no page, and leaves a mark all the same."""
    slot = next_slot(pages, num_computed, free, page_size)
    if slot == -1:
        pages.append(-1)
    return slot


def slot_without_a_page(pages, num_computed, free, page_size):
    """Slot 0 where there is no page."""
    return max(next_slot(pages, num_computed, free, page_size), 0)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (slot_with(always=True), "the last one still has room"),
        (slot_with(never=True), "none is taken"),
        (slot_with(forget=True), "none is taken"),
        (slot_with(first=True), "the last of free"),
        (slot_with(keep=True), "in use and free at the same time"),
        (slot_with(slot=lambda page, n, size: page), "that is the page"),
        (slot_with(slot=lambda page, n, size: n), "its pages are anywhere"),
        (slot_with(slot=lambda page, n, size: page * size + n % size + 1), "counted from 0"),
        (slot_with(slot=lambda page, n, size: page + n % size), "which place in it"),
        (slot_for_nothing, "nothing must change"),
        (lambda pages, n, free, size: pages.append(free.pop()) or 0, "the last one still has room"),
        (slot_without_a_page, "must be -1"),
        (lambda *args: None, "write its body"),
    ],
)
def test_slot_wrong(wrong, said):
    rejected(ex15.check_next_slot(wrong), said)


# A step under a budget


def share_out(uncomputed, budget):
    left = budget - sum(count == 1 for count in uncomputed)
    counts = []
    for count in uncomputed:
        take = 1 if count == 1 else min(count, left)
        left -= take if count > 1 else 0
        counts.append(take)
    return counts


def share_out_as_the_package(uncomputed, budget):
    """With the tokens of requests that decode after it set aside for each."""
    counts = []
    for i, count in enumerate(uncomputed):
        counts.append(min(count, budget - sum(other == 1 for other in uncomputed[i + 1 :])))
        budget -= counts[-1]
    return counts


@pytest.mark.parametrize("right", [share_out, share_out_as_the_package])
def test_budget_solutions(right):
    accepted(ex15.check_share_out(right))


def in_order(uncomputed, budget):
    """Nothing is reserved."""
    counts = []
    for count in uncomputed:
        counts.append(min(count, budget))
        budget -= counts[-1]
    return counts


def fair(uncomputed, budget):
    """The prompts share alike, a token at a time."""
    counts = [int(count == 1) for count in uncomputed]
    while sum(counts) < min(budget, sum(uncomputed)):
        for i, count in enumerate(uncomputed):
            if counts[i] < count and sum(counts) < budget:
                counts[i] += 1
    return counts


def negative(uncomputed, budget):
    """The prompt's share is not cut at 0."""
    left = budget - 2 * sum(count == 1 for count in uncomputed)
    return [1 if count == 1 else min(count, left) for count in uncomputed]


def one_prompt(uncomputed, budget):
    """Only the first prompt gets something."""
    counts, first = share_out(uncomputed, budget), True
    for i, count in enumerate(uncomputed):
        if count > 1:
            counts[i], first = (counts[i] if first else 0), False
    return counts


def last_first(uncomputed, budget):
    return share_out(uncomputed[::-1], budget)[::-1]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (in_order, "somebody who decodes is left out"),
        (fair, "in the order of arrival"),
        (last_first, "in the order of arrival"),
        (one_prompt, "there is budget for more"),
        (negative, "there is budget for more"),
        (lambda u, b: list(u), "more than the budget"),
        (lambda u, b: [b] * len(u), "more tokens than it has"),
        (lambda u, b: [1 if x == 1 else -1 for x in u], "fewer than 0"),
        (lambda u, b: [x for x in share_out(u, b) if x], "one number for each request"),
        (lambda u, b: sum(u), "a list of numbers"),
        (lambda u, b: None, "write its body"),
    ],
)
def test_budget_wrong(wrong, said):
    rejected(ex15.check_share_out(wrong), said)


# Letting go of shared pages


def let_go(pages, references, free, *, check=True, early=False, count=True, tail=True, always=False, never=False):
    if check and any(pages.count(page) > references[page] for page in pages):
        if early:
            references[pages[0]] -= 1
        raise ValueError("nobody holds this page")
    for page in reversed(pages) if tail else pages:
        if count:
            references[page] -= 1
        if not never and (always or references[page] == 0):
            free.append(page)


def let_go_by_copy(pages, references, free):
    after = list(references)
    for page in pages:
        after[page] -= 1
        if after[page] < 0:
            raise ValueError(f"page {page} is held by nobody")
    references[:] = after
    free.extend(page for page in reversed(dict.fromkeys(pages)) if after[page] == 0)


def let_go_midway(pages, references, free):
    """Refuses when it gets there."""
    for page in reversed(pages):
        if references[page] == 0:
            raise ValueError("nobody holds this page")
        references[page] -= 1
        if references[page] == 0:
            free.append(page)


@pytest.mark.parametrize("right", [let_go, let_go_by_copy])
def test_let_go_solutions(right):
    accepted(ex15.check_let_go(right))


def let_go_with(**wrong):
    return lambda *args: let_go(*args, **wrong)


def let_go_if_held(pages, references, free):
    """Asks each page whether anybody holds it, and not how often."""
    if any(references[page] == 0 for page in pages):
        raise ValueError("nobody holds this page")
    let_go(pages, references, free, check=False)


def let_go_of_different(pages, references, free):
    """Refuses a page that occurs twice, however often it is held."""
    if len(set(pages)) < len(pages):
        raise ValueError("a page occurs twice")
    let_go(pages, references, free)


def let_go_once(pages, references, free):
    """Takes one reference off a page that occurs twice."""
    if any(pages.count(page) > references[page] for page in pages):
        raise ValueError("nobody holds this page")
    let_go(list(dict.fromkeys(pages)), references, free)


def let_go_by_extending(pages, references, free):
    """Counts first, and frees a page for each of its places in `pages`."""
    let_go(pages, references, free, never=True)
    free.extend(page for page in reversed(pages) if references[page] == 0)


def let_go_with_assert(pages, references, free):
    assert all(pages.count(page) <= references[page] for page in pages)
    let_go(pages, references, free)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (let_go_with(check=False), "it must raise ValueError"),
        (let_go_if_held, "page 0 is let go 2 time(s) and held 1: it must raise ValueError"),
        (let_go_of_different, "each page is held as often as it is let go"),
        (let_go_once, "references are [1, 0] afterwards; they must be [0, 0]"),
        (let_go_by_extending, "page 0 is in free twice"),
        (let_go_with(early=True), "something was changed"),
        (let_go_midway, "something was changed"),
        (let_go_with_assert, "not AssertionError"),
        (let_go_with(tail=False), "the sequence's end goes first"),
        (let_go_with(always=True), "somebody holds it"),
        (let_go_with(never=True), "is lost"),
        (let_go_with(count=False, always=True), "references are"),
        (lambda pages, references, free: pages.reverse() or let_go(pages, references, free, tail=False), "own list"),
        (lambda pages, references, free: [count - 1 for count in references], "returns something"),
        (lambda *args: None, "write its body"),
    ],
)
def test_let_go_wrong(wrong, said):
    rejected(ex15.check_let_go(wrong), said)


# A scheduler to repair

Broken = skeleton("exercise-5")["Repaired"]


class Repaired(Broken):
    loses, forgets, comes_back = -1, True, 0

    def grow(self, request, count):
        while not self.take_pages(request, count):
            loser = self.running.pop(self.loses)
            self.free += loser.pages
            loser.pages = []
            if self.forgets:
                loser.computed = 0
            self.waiting.insert(self.comes_back if self.comes_back is not None else len(self.waiting), loser)
            if loser is request:
                return False
        return True


class RepairedByFilter(Broken):
    """Another right one: it asks who is last by the order of arrival, and keeps the waiting sorted."""

    def grow(self, request, count):
        while not self.take_pages(request, count):
            loser = max(self.running, key=lambda other: other.number)
            self.running.remove(loser)
            self.free, loser.pages, loser.computed = self.free + loser.pages, [], 0
            self.waiting = sorted([*self.waiting, loser], key=lambda other: other.number)
            if loser is request:
                return False
        return True


@pytest.mark.parametrize("right", [Repaired, RepairedByFilter])
def test_scheduler_solutions(right):
    accepted(ex15.check_scheduler(right))


def repaired(**changes):
    """The right scheduler with some members changed."""
    return type("Repaired", (Repaired,), changes)


def schedule_nothing(self):
    return []


def schedule_all(self):
    return [(request, request.tokens - request.computed) for request in self.running + self.waiting]


def forget_pages(self, request):
    self.running.remove(request)
    request.pages = []


def keep_pages(self, request):
    self.running.remove(request)
    self.free += request.pages


def take_one_page_less(self, request, count):
    return Repaired.take_pages(self, request, max(count - 1, 0))


def over_budget(self):
    self.budget, budget = 10 * self.budget, self.budget
    chunks = Repaired.schedule(self)
    self.budget = budget
    return chunks


def twice(self):
    chunks = Repaired.schedule(self)
    return [(request, count) for request, count in chunks for _ in range(1 + (count == 1))]


def for_ever(self):
    while True:
        pass


@pytest.mark.parametrize(
    "wrong, said",
    [
        (repaired(forgets=False), "it gave its pages up"),
        (repaired(comes_back=None), "comes back first"),
        (repaired(loses=0), "takes part twice"),
        (repaired(schedule=schedule_nothing), "nothing is computed"),
        (repaired(schedule=schedule_all), "and has 0"),
        (repaired(schedule=over_budget), "more than the budget"),
        (repaired(schedule=twice), "takes part twice"),
        (repaired(schedule=lambda self: [(request, 0) for request in self.waiting]), "computes 0 tokens"),
        (repaired(schedule=lambda self: None), "raised TypeError"),
        (repaired(finish=forget_pages), "they are lost"),
        (repaired(finish=keep_pages), "in two hands"),
        (repaired(take_pages=take_one_page_less), "which takes"),
        (lambda *sizes: None, "raised AttributeError"),
    ],
)
def test_scheduler_wrong(wrong, said):
    rejected(ex15.check_scheduler(wrong), said)


def test_a_scheduler_that_never_ends(monkeypatch):
    monkeypatch.setattr(sys.modules["exercises.judge"], "SECONDS", 0.5)
    rejected(ex15.check_scheduler(repaired(schedule=for_ever)), "is there a loop that never ends")
