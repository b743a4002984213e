"""Chapter 15's exercises: slots, a scheduler to repair, shared pages, a step under a budget."""

import copy
import functools

from exercises.judge import NotYet, checker, drawn, require_answers

SLOTS = (  # pages, num_computed, free, page_size.
    ([7, 2], 20, [5, 9], 16), ([7, 2], 32, [5, 9], 16), ([7, 2], 31, [5, 9], 16), ([], 0, [3], 16),
    ([4], 16, [], 16), ([4], 15, [], 16), ([], 0, [], 16), ([8, 1, 6], 11, [2], 4), ([8, 1, 6], 12, [2, 0], 4),
)  # fmt: skip
HELD = (  # pages, references, free.
    ([0, 1, 2], [1, 1, 1, 0], [3]),
    ([0, 1, 2], [2, 2, 1, 0], [3]),
    ([2, 0], [3, 1, 3, 0], [3]),
    ([3, 1], [0, 1, 0, 1], [0, 2]),
    ([], [1, 0], [1]),
)
TWICE = (  # As HELD, and a page occurs in `pages` as often as the sequence holds it.
    ([0, 0, 1], [2, 1], []),
    ([2, 2, 1], [1, 1, 3], []),
)
STEPS = [  # uncomputed, budget.
    ([1, 1, 1], 3), ([1, 1, 1], 8), ([10], 4), ([10, 1], 4), ([1, 10, 1], 8), ([10, 10, 1], 8), ([3, 10, 1, 1], 8),
    ([3, 2, 1, 4], 32), ([50, 1, 1, 1], 3), ([5, 5, 5], 10), ([2, 2, 2, 1], 4), ([7, 1, 6, 1, 5], 12), ([], 4),
]  # fmt: skip


@checker
def check_next_slot(answer) -> str:
    """Exercise 1: `answer(pages, num_computed, free, page_size)` is the next token's slot; it may take a page."""

    def books(pages, num_computed, free, page_size, *, slot=None, take=-1, keeps=False):
        pages, free = list(pages), list(free)
        if num_computed == len(pages) * page_size:
            if not free:
                return -1, pages, free
            pages.append(free[take] if keeps else free.pop(take))
        page = pages[num_computed // page_size]
        place = num_computed % page_size
        return slot(page, num_computed, page_size) if slot else page * page_size + place, pages, free

    @functools.wraps(answer)
    def with_books(pages, num_computed, free, page_size):
        pages, free = list(pages), list(free)
        slot = answer(pages, num_computed, free, page_size)
        return slot if slot is None else (slot, pages, free)

    likely = (
        (dict(slot=lambda page, n, size: page), "That is the page; the slot counts tokens."),
        (dict(slot=lambda page, n, size: n), "That is the position in the sequence; its pages are anywhere."),
        (dict(slot=lambda page, n, size: page * size + n % size + 1), "Places in a page are counted from 0."),
        (dict(take=0), "It must be the last of free."),
        (dict(keeps=True), "A page is in use and free at the same time."),
    )
    said = (
        "(The slot, pages and free.) If the last page has room, nothing is taken; if all are full, the last of free is "
        "added; if there is none, the slot is -1, and nothing changes."
    )
    require_answers(with_books, SLOTS, books, likely, said, draw=_slot)
    return "Page times page size plus place: what write_kv stores by."


@checker
def check_share_out(answer) -> str:
    """Exercise 4: `answer(uncomputed, budget)` is how many tokens of each request the next step computes."""

    def shared_out(uncomputed, budget, *, reserved=1):
        left, counts = budget - reserved * uncomputed.count(1), []
        for most in uncomputed:
            counts.append(1 if most == 1 else min(most, left))
            left -= 0 if most == 1 else counts[-1]
        return counts

    def in_order(uncomputed, budget):
        counts = []
        for most in uncomputed:
            counts.append(min(most, budget - sum(counts)))
        return counts

    likely = (
        (in_order, "Somebody who decodes is left out, behind a prompt."),
        (dict(reserved=2), "There is budget for more."),
        (lambda uncomputed, budget: list(uncomputed), "Together that is more than the budget."),
        (lambda uncomputed, budget: shared_out(uncomputed[::-1], budget)[::-1], "Prompts come as they arrived."),
    )
    said = "A number for each request: 1 for those who decode; then each prompt, as it arrived, has all that is left."
    require_answers(answer, STEPS, shared_out, likely, said, draw=_asked)
    return "First what is reserved for those who decode, then the prompts, each as much as is left."


@checker
def check_let_go(answer) -> str:
    """Exercise 3: `answer(pages, references, free)` takes a reference off each page, or changes nothing."""
    for pages, references, free in (*HELD, *drawn(_held), *TWICE):
        where = f"for pages = {pages}, references = {references}, free = {free}"
        held, after, books = list(pages), list(references), list(free)
        try:
            answer(held, after, books)
        except ValueError as error:
            raise NotYet(f"{where}, it raises ValueError, and each page is held as often as it is let go.") from error
        want = [count - pages.count(page) for page, count in enumerate(references)]
        want_free = free + [page for page in reversed(dict.fromkeys(pages)) if want[page] == 0]
        if held != pages:
            raise NotYet(f"{where}, it changes the sequence's own list, to {held}.")
        if after != want:
            raise NotYet(f"{where}, references are {after} afterwards; they must be {want}.")
        if books != want_free:
            raise NotYet(
                f"{where}, free is {books} afterwards; it must be {want_free}: each page that nobody holds any more, "
                "once, the sequence's end first."
            )
    _refuses(answer, [0, 1], [1, 0, 1], [1])
    _refuses(answer, [2, 1, 0], [1, 0, 1], [1])
    _refuses(answer, [0, 0], [1, 1], [])
    return "A page that is let go twice is handed to two sequences; refusing it finds the bug where it is."


def _slot(rng):
    pages, page_size = rng.permutation(20).tolist(), int(rng.integers(1, 9))
    held = int(rng.integers(1, 9))
    return (
        pages[:held],
        held * page_size - int(rng.integers(0, page_size)),
        pages[12 : 12 + rng.integers(0, 3)],
        page_size,
    )


def _asked(rng):
    uncomputed = (rng.integers(1, 9, 6) * rng.integers(0, 2, 6) + 1).tolist()
    return uncomputed, int(rng.integers(uncomputed.count(1), 30))


def _held(rng):
    references, pages = rng.integers(0, 4, 8), rng.permutation(8)
    free = pages[references[pages] == 0].tolist()
    return pages[references[pages] > 0][: rng.integers(1, 5)].tolist(), references.tolist(), free


def _refuses(answer, pages, references, free):
    """Raises NotYet unless `answer` raises ValueError for this and leaves everything as it was."""
    where = f"for pages = {pages}, references = {references}"
    books = copy.deepcopy((pages, references, free))
    unheld = next(page for page in pages if references[page] < pages.count(page))
    times = f"page {unheld} is let go {pages.count(unheld)} time(s) and held {references[unheld]}"
    try:
        answer(*books)
    except ValueError:
        if books != (pages, references, free):
            raise NotYet(f"{where}, {times}: ValueError is right, but something was changed before it.") from None
        return
    except Exception as error:
        raise NotYet(f"{where}, {times}: raise ValueError, not {type(error).__name__}.") from error
    raise NotYet(f"{where}, {times}: it must raise ValueError.")


# Exercise 2: a scheduler to repair ------------------------------------------------------------------------------------

TRACES = (  # Pages, tokens a page, budget, (prompt, new tokens) of the requests in the order of arrival.
    (4, 4, 8, ((5, 3), (3, 4))),
    (4, 4, 6, ((6, 9), (5, 4), (3, 3))),
    (6, 2, 5, ((3, 8), (4, 7), (2, 9), (5, 2))),
    (8, 4, 12, ((10, 12), (9, 14), (3, 20), (12, 3), (1, 18), (6, 6))),
    (5, 3, 7, ((4, 10), (4, 10), (4, 10), (4, 10))),
)


class Asked:
    """A request of an exercise: how many tokens it has, how many of them are computed, and its pages."""

    def __init__(self, number: int, prompt: int, wanted: int):
        self.number, self.tokens, self.left = number, prompt, wanted
        self.computed, self.pages, self.num_pages = 0, [], 0

    def compute(self, count: int) -> bool:
        """Whether it ends with these tokens: the logits of the last token give the next one."""
        self.computed += count
        is_next = self.computed == self.tokens
        self.tokens, self.left = self.tokens + is_next, self.left - is_next
        return not self.left

    def __repr__(self):
        return f"request {self.number}"


@checker
def check_scheduler(answer) -> str:
    """Exercise 2: `answer(num_pages, page_size, budget)` is a scheduler, which serves whole traces here."""
    for num_pages, page_size, budget, lengths in TRACES:
        where = f"With {num_pages} pages of {page_size} tokens, a budget of {budget} and {len(lengths)} requests"
        scheduler, requests = answer(num_pages, page_size, budget), [Asked(i, *pair) for i, pair in enumerate(lengths)]
        for request in requests:
            scheduler.submit(request)
        for step, want in enumerate(_steps(num_pages, page_size, budget, lengths)):
            chunks = [(request, int(count)) for request, count in scheduler.schedule()]
            got = [(request.number, request.computed, count) for request, count in chunks]
            _require_books(scheduler, requests, chunks, num_pages, page_size, f"{where}, in step {step}")
            if got != want:
                raise NotYet(
                    f"{where}, step {step} computes (request, first token, tokens) {got}, and {want} is right. Who "
                    "gives its pages up, what becomes of the tokens that they held, and who comes back first?"
                )
            for request in [request for request, count in chunks if request.compute(count)]:
                scheduler.finish(request)
    return "The last to arrive gives way, forgets what it lost, and is the first to come back: so all of them end."


def _require_books(scheduler, requests, chunks, num_pages: int, page_size: int, where: str) -> None:
    """Raises NotYet unless each page is free or held once, and each chunk has its pages."""
    pages = [*scheduler.free, *(page for request in requests for page in request.pages)]
    if len(set(pages)) < len(pages):
        raise NotYet(f"{where}, page {max(pages, key=pages.count)} is in two hands, or held and free.")
    if len(pages) < num_pages:
        raise NotYet(f"{where}, {num_pages - len(pages)} page(s) are neither held nor free: they are lost.")
    for request, count in chunks:
        if (need := -(-(request.computed + count) // page_size)) > len(request.pages):
            raise NotYet(f"{where}, {request} computes tokens for {need} pages, and has {len(request.pages)}.")


def _steps(num_pages: int, page_size: int, budget: int, lengths):
    """(request, first token, tokens) of all chunks of each step of a right scheduler, which here counts pages alone."""
    running, waiting = [], [Asked(i, *pair) for i, pair in enumerate(lengths)]
    while running or waiting:
        chunks, left, goes_on = [], budget, list(running)
        while (goes_on or waiting) and left:
            request = (goes_on or waiting)[0]
            count = min(request.tokens - request.computed, left)
            need = -(-(request.computed + count) // page_size)
            others = sum(other.num_pages for other in running if other is not request)
            if need + others <= num_pages:
                (goes_on or waiting).pop(0)
                running += [] if request in running else [request]
                chunks.append((request, count))
                request.num_pages, left = need, left - count
            elif goes_on:
                loser = running.pop()
                loser.num_pages = loser.computed = 0
                waiting.insert(0, loser)
                goes_on = [other for other in goes_on if other is not loser]
            else:
                break
        yield [(request.number, request.computed, count) for request, count in chunks]
        ended = [request for request, count in chunks if request.compute(count)]
        running = [request for request in running if request not in ended]
