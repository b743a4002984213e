"""Solutions of chapter 18's exercises; how to read the marks: tools/skeletons.py."""


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
