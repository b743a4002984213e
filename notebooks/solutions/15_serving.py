"""Solutions of chapter 15's exercises; how to read the marks: tools/skeletons.py."""


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
