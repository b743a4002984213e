"""Solutions of chapter 18's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-3
  [Wait("met", q) for q in others] => [Wait("met", count=n - 1)] && Signal(p, "met", d) => Signal(p, "met")  # Right.
  lambda d, n: [Signal(0, "met"), Wait("go")] if d else [Wait("met", count=n - 1), *(Signal(p, "go")
    for p in range(1, n))]
  lambda d, n: [Signal((d + 1) % n, "met"), Wait("met")]  # with 3 devices there is an order that fails
  lambda d, n: [Signal((d + 1) % n, "met"), Wait("met")]  # for whom does it not wait
  [Signal(p, "met", d) for p in others] + =>  # that nobody sends
  + [Wait("met", q) for q in others] =>  # there is an order that fails
  lambda d, n: meet(d, n)[n - 1 :] + meet(d, n)[: n - 1]  # that nobody sends
  lambda d, n: [Flush(0), *meet(d, n)]  # signals and waits alone
exercise-4
  lambda d, n, i, rounds: [Wait("arrived", (i % 2,), when=d > 0), Read("inbox", (i % 2,), (i,), when=d > 0),
    Wait("freed", (i % 2,), when=(d < n - 1) & (i >= 2)), Send(d + 1, "inbox", (i % 2,), (i,), when=d < n - 1),
    Flush(0), Signal(d + 1, "arrived", (i % 2,), when=d < n - 1),
    Signal(d - 1, "freed", (i % 2,), when=(d > 0) & (i + 2 < rounds))]  # Right.
  \n            Flush(0), =>  # must follow a flush
  Wait("arrived"), =>  # there is an order that fails
  i + 2 < rounds => i + 3 < rounds && i >= 2 => i >= 3  # used again two rounds later
  i + 2 < rounds => i + 1 < rounds  # need no `freed`
  i + 2 < rounds => i + 3 < rounds  # is it signalled for every piece
  lambda d, n, i, rounds: pass_on(d, n, 0, rounds)  # in round 1; it must
  lambda d, n, i, rounds: pass_on(d, n + 1, i, rounds)  # it must send nothing
  lambda d, n, *case: sorted(pass_on(d, n, *case), key=lambda action: isinstance(action, Read) and d < n - 1)
    # before it has read it
  lambda *case: pass_on(*case)[::-1]  # there is an order that fails
exercise-1
  lambda n, b: np.float64(b - b / n) * 2  # Right.
  2 * (n - 1) => (n - 1)  # one of the two
  / n =>  # an n-th of the array. (Or
  lambda n, b: (n - 1) * b  # and there are two
  lambda n, b: 2 * b  # nothing to itself
  lambda n, b: b  # reduce-scatter
exercise-2
  lambda sizes, d: np.stack([np.cumsum(sizes, 1) - sizes, np.cumsum(sizes, 0) - sizes], axis=-1)[d]  # Right.
  lambda *case: [(row, first) for first, row in places(*case)]  # after those for lower devices
  lambda *case: [(first, first) for first, _ in places(*case)]  # not of lower receivers
  for line in sizes[:d] => for line in sizes[: d + 1]  # not before itself
  sum(line[p] for line in sizes[:d]) => 0  # to the same device
  lambda *case: places(*case)[:1]
"""


# %% exercise-3 needs: parameters setup
def meet(d, n):
    #: # Your code: a list of Signal(peer, "met", index) and Wait("met", index, count).
    #: return []
    # BEGIN SOLUTION
    others = [p for p in range(n) if p != d]
    return [Signal(p, "met", d) for p in others] + [Wait("met", q) for q in others]
    # END SOLUTION


ex18.check_meet(meet)


# %% exercise-4 needs: parameters setup
def pass_on(d, n, i, rounds):
    #: # Your code. For a start: Read("inbox", (i % 2,), (i,)), Send(d + 1, "inbox", (i %
    #: # 2,), (i,)).
    #: return []
    # BEGIN SOLUTION
    slot, actions = (i % 2,), []
    if d > 0:
        actions += [Wait("arrived"), Read("inbox", slot, (i,))]
    if d > 0 and i + 2 < rounds:
        actions.append(Signal(d - 1, "freed"))
    if d < n - 1:
        actions += [Wait("freed")] * (i >= 2)  # The slot was used two rounds ago.
        actions += [
            Send(d + 1, "inbox", slot, (i,)),
            Flush(0),
            Signal(d + 1, "arrived"),
        ]
    return actions
    # END SOLUTION


ex18.check_chain(pass_on)


# %% exercise-1 needs: parameters setup
def all_reduce_bytes(n, nbytes):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return 2 * (n - 1) * nbytes / n
    # END SOLUTION


ex18.check_bytes(all_reduce_bytes)


# %% exercise-2 needs: parameters setup
def places(sizes, d):
    #: return None  # Your code: a pair for each device.
    # BEGIN SOLUTION
    return [
        (sum(sizes[d][:p]), sum(line[p] for line in sizes[:d]))
        for p in range(len(sizes))
    ]
    # END SOLUTION


ex18.check_places(places)
