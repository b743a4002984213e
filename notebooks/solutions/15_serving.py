"""Solutions of chapter 15's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-2
  which == len(pages): => True:  # If the last page has room, nothing is taken
  if which == len(pages): => if False:  # IndexError
  pages.append(free.pop()) => free.pop()
  pages.append(free.pop()) => pages.append(free.pop(0))  # the last of free
  free.pop() => free[-1]  # in use and free at the same time
  return pages[which] * page_size + place => return pages[which]  # That is the page
  return pages[which] * page_size + place => return num_computed  # its pages are anywhere
  page_size + place => page_size + place + 1  # counted from 0
  pages[which] * page_size => pages[which]  # The slot, pages and free
  return -1 => pages.append(-1)\n            return -1  # and nothing changes
  return -1 => return 0
exercise-5
  loser = self.running.pop() => loser = max(self.running, key=lambda other: other.number)
    \n            self.running.remove(loser)  # Right.
  loser.pages, loser.computed = [], 0 => loser.pages = []  # what becomes of the tokens
  self.waiting.insert(0, loser) => self.waiting.append(loser)  # who comes back first
  self.running.pop() => self.running.pop(0)  # Who gives its pages up
  return chunks => return []  # computes (request, first token, tokens) []
  return chunks => return [(one, one.tokens - one.computed) for one in self.running + self.waiting]  # computes
  chunks, left = [], self.budget => chunks, left = [], 10 * self.budget
  return chunks => return [chunk for chunk in chunks for _ in range(1 + (chunk[1] == 1))]
  return chunks => return [(one, 0) for one in self.waiting]
  return chunks => return None  # raised TypeError
  self.running.remove(request)\n        self.free += request.pages => self.running.remove(request)  # they are lost
  self.free += request.pages\n        request.pages = [] => self.free += request.pages  # in two hands
  (request.computed + count) // self.page_size => (request.computed + max(count - 1, 0)) // self.page_size  # computes
exercise-4
  for page in reversed(pages): => for page in pages:\n        references[page] -= 1
    \n    for page in reversed(list(dict.fromkeys(pages))):\n        if not references[page]: free.append(page)
    \n    for page in ():  # Right.
  if any(pages.count(page) > references[page] for page in pages): => if False:  # it must raise ValueError
  pages.count(page) > references[page] => references[page] == 0
    # page 0 is let go 2 time(s) and held 1: it must raise ValueError
  pages.count(page) > references[page] => pages.count(page) > min(references[page], 1)
    # each page is held as often as it is let go
  for page in reversed(pages) => for page in reversed(list(dict.fromkeys(pages)))
    # references are [1, 0] afterwards; they must be [0, 0]
  for page in reversed(pages):\n        references[page] -= 1\n        if not references[page]:\n
    => for page in pages: references[page] -= 1\n    for page in reversed(pages):\n        if not references[page]:\n
    # each page that nobody holds any more, once
  raise ValueError => references[pages[0]] -= 1\n        raise ValueError  # something was changed
  if any(pages.count(page) > references[page] for page in pages): => if False:
    && references[page] -= 1 => references[page] -= 1\n        if references[page] < 0: raise ValueError(page)
  raise ValueError => raise AssertionError  # not AssertionError
  reversed(pages) => pages  # the sequence's end first
  if not references[page]: => if True:  # each page that nobody holds
  if not references[page]: => if False:
  references[page] -= 1 => pass  # references are
  for page in reversed(pages): => pages.reverse()\n    for page in pages:  # own list
  lambda pages, references, free: [count - 1 for count in references]  # references are
exercise-3
  left -= take if count > 1 else 0 => left = left - take if count > 1 else left  # Right.
  left = budget - uncomputed.count(1) => left = budget && take = 1 if count == 1 else min(count, left)
    => take = min(count, left) && if count > 1 else 0 =>  # Somebody who decodes
  lambda u, b: share_out(u[::-1], b)[::-1]  # as they arrived
  left -= take if count > 1 else 0 => left = left - take if count == 1 else 0  # A number for each request
  budget - uncomputed.count(1) => budget - 2 * uncomputed.count(1)  # budget for more
  lambda u, b: list(u)  # more than the budget
  lambda u, b: [b] * len(u)  # A number for each request
  lambda u, b: [1 if x == 1 else -1 for x in u]
  lambda u, b: [x for x in share_out(u, b) if x]
  lambda u, b: [min(x, max(1, (b - u.count(1)) // max(1, len(u) - u.count(1)))) for x in u]
  lambda u, b: sum(u)  # a list
"""


# %% exercise-2 needs: parameters setup
def next_slot(pages, num_computed, free, page_size):
    #: return None  # Your code.
    # BEGIN SOLUTION
    which, place = divmod(num_computed, page_size)
    if which == len(pages):
        if not free:
            return -1
        pages.append(free.pop())
    return pages[which] * page_size + place
    # END SOLUTION


ex15.check_next_slot(next_slot)


# %% exercise-5 needs: parameters setup
class Repaired:
    """Each step: whoever runs goes on, in the order of arrival; then those that wait
    start. Three lines are wrong."""

    def __init__(self, num_pages, page_size, budget):
        self.free, self.page_size, self.budget = (
            list(range(num_pages)),
            page_size,
            budget,
        )
        self.running, self.waiting = [], []

    def submit(self, request):
        self.waiting.append(request)

    def schedule(self):
        chunks, left = [], self.budget
        for request in list(self.running):
            count = min(request.tokens - request.computed, left)
            if request in self.running and count and self.grow(request, count):
                chunks.append((request, count))
                left -= count
        while self.waiting and left:
            request = self.waiting[0]
            count = min(request.tokens - request.computed, left)
            if not self.take_pages(request, count):
                break
            self.running.append(self.waiting.pop(0))
            chunks.append((request, count))
            left -= count
        return chunks

    def grow(self, request, count):
        while not self.take_pages(request, count):
            #: loser = self.running.pop(0)
            # BEGIN SOLUTION
            loser = self.running.pop()  # The youngest.
            # END SOLUTION
            self.free += loser.pages
            #: loser.pages = []
            #: self.waiting.append(loser)
            # BEGIN SOLUTION
            loser.pages, loser.computed = [], 0
            self.waiting.insert(0, loser)  # It arrived before all that wait.
            # END SOLUTION
            if loser is request:
                return False
        return True

    def take_pages(self, request, count):
        need = -(-(request.computed + count) // self.page_size) - len(request.pages)
        if need > len(self.free):
            return False
        request.pages = request.pages + [self.free.pop() for _ in range(need)]
        return True

    def finish(self, request):
        self.running.remove(request)
        self.free += request.pages
        request.pages = []


ex15.check_scheduler(Repaired)


# %% exercise-4 needs: parameters setup
def let_go(pages, references, free):
    #: return None  # Your code.
    # BEGIN SOLUTION
    if any(pages.count(page) > references[page] for page in pages):
        raise ValueError("a page is let go of that nobody holds")
    for page in reversed(pages):
        references[page] -= 1
        if not references[page]:
            free.append(page)
    # END SOLUTION


ex15.check_let_go(let_go)


# %% exercise-3 needs: parameters setup
def share_out(uncomputed, budget):
    #: return None  # Your code.
    # BEGIN SOLUTION
    left = budget - uncomputed.count(1)
    counts = []
    for count in uncomputed:
        take = 1 if count == 1 else min(count, left)
        left -= take if count > 1 else 0
        counts.append(take)
    return counts
    # END SOLUTION


ex15.check_share_out(share_out)
