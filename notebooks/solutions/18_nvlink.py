"""Solutions of chapter 18's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  lambda n, b: np.float64(b - b / n) * 2  # Right.
  lambda n, b: 2 * (n - 1) * b // n
  2 * (n - 1) => (n - 1)  # one of the two
  / n =>  # an n-th of the array. (Or
  lambda n, b: (n - 1) * b  # and there are two
  lambda n, b: 2 * b  # nothing to itself
  lambda n, b: b  # reduce-scatter
exercise-2
  [Wait("met", q) for q in others] => [Wait("met", count=n - 1)] && Signal(p, "met", d) => Signal(p, "met")  # Right.
  lambda d, n: [Signal(0, "met"), Wait("go")] if d else [Wait("met", count=n - 1), *(Signal(p, "go")
    for p in range(1, n))]
  lambda d, n: [Signal((d + 1) % n, "met"), Wait("met")] * (n - 1)
  lambda d, n: [a for k in (1, 2, 4, 8) if k < n for a in (Signal((d + k) % n, "met"), Wait("met"))]
    # with 4 devices there is an order that fails
  lambda d, n: [Signal((d + 1) % n, "met"), Wait("met")] * max(n - 2, 1)  # with 3
  lambda d, n: meet(d, n) if n in (2, 3, 4, 9) else []  # write its body
  lambda d, n: [Signal((d + 1) % n, "met"), Wait("met")]  # with 3 devices there is an order that fails
  lambda d, n: [Signal((d + 1) % n, "met"), Wait("met")]  # for whom does it not wait
  [Signal(p, "met", d) for p in others] + =>  # that nobody sends
  + [Wait("met", q) for q in others] =>  # there is an order that fails
  lambda d, n: meet(d, n)[n - 1 :] + meet(d, n)[: n - 1]  # that nobody sends
  lambda d, n: meet(d, min(n, 5))  # with 9 devices there is an order that fails
  lambda d, n: [] if n == 4 else meet(d, n)  # write its body
  lambda d, n: meet(d, n) if n < 4 else [a for k in (1, 2, 4) for a in (Signal((d + k) % n, "met", k),
    Wait("met", k))]  # with 9 devices
  lambda d, n: meet(d, n) if n < 3 else [a for k in (1, 2, 4, 8) for a in (Signal((d + k) % n, "met", k),
    Wait("met", k))]  # Right.
  lambda d, n: [Flush(0), *meet(d, n)]  # signals and waits alone
exercise-3
  lambda d, n, i, rounds: [Wait("arrived", (i % 2,), when=d > 0), Read("inbox", (i % 2,), (i,), when=d > 0),
    Wait("freed", (i % 2,), when=(d < n - 1) & (i >= 2)), Send(d + 1, "inbox", (i % 2,), (i,), when=d < n - 1),
    Flush(0), Signal(d + 1, "arrived", (i % 2,), when=d < n - 1),
    Signal(d - 1, "freed", (i % 2,), when=(d > 0) & (i + 2 < rounds))]  # Right.
  lambda d, n, i, rounds: [*[Wait("arrived"), Read("inbox", (i % 2,), (i,))] * (d > 0),
    *[Signal(d - 1, "freed")] * ((d > 0) & (i + 2 < rounds)), *([Wait("freed")] * (i >= 2) + [
    Send(d + 1, "inbox", (i % 2,), (i,)), Flush(1)] + [Signal(d + 1, "arrived")] * (i > 0) + [
    Flush(0), Signal(d + 1, "arrived")] * (i == rounds - 1)) * (d < n - 1)]
  lambda *case: sorted(pass_on(*case), key=lambda a: isinstance(a, Signal) and a.semaphore == "freed")
  \n            Flush(0), =>  # must follow a flush
  Flush(0) => Flush(1)
  Wait("arrived"), =>  # there is an order that fails
  i + 2 < rounds => i + 3 < rounds && i >= 2 => i >= 3  # used again two rounds later
  i + 2 < rounds => i + 1 < rounds  # need no `freed`
  i + 2 < rounds => i + 1 < rounds && i >= 2 => i >= 1  # there is room for both
  i + 2 < rounds => 0 < i < rounds - 1
  i + 2 < rounds => (i + 2 < rounds if d < 2 else i + 1 < rounds)
    && i >= 2 => (i >= 2 if d < 1 else i >= 1)
  i + 2 < rounds => 2 < rounds and i + 1 < rounds
    && [Wait("freed")] * (i >= 2) => [Wait("freed", count=1 + (i == 2))] * (i >= 2)
  i + 2 < rounds => i + 3 < rounds  # is it signalled for every piece
  lambda d, n, i, rounds: pass_on(d, n, 0, rounds)  # in round 1; it must
  lambda d, n, i, rounds: pass_on(d, n + 1, i, rounds)  # it must send nothing
  lambda d, n, i, rounds: pass_on(d, min(n, 4), i, rounds)  # it must send [(4
  lambda d, n, i, rounds: pass_on(d, n, i, rounds) if i < 6 else []  # in round 6; it must
  lambda d, n, *case: pass_on(d, n, *case) if (n, case[-1]) in ((2, 1), (2, 3), (3, 5), (6, 9)) else []
    # returns no actions
  lambda d, n, *case: sorted(pass_on(d, n, *case), key=lambda action: isinstance(action, Read) and d < n - 1)
    # before it has read it
  lambda *case: pass_on(*case)[::-1]  # there is an order that fails
exercise-4
  rem(d + 1 + div(i, pieces), n) => rem(d + div(i, pieces), n)  # Right.
  for q in others:\n            pl.semaphore_signal(read, device_id={axis_name: q})
    => pl.loop(1, n)(lambda k: pl.semaphore_signal(read, device_id={axis_name: rem(d + k, n)}))
  (read, device_id={axis_name: q}) => (read, device_id={axis_name: q}, device_id_type=pl.DeviceIdType.MESH)
  (x_gmem, {axis_name: owner}) => (x_gmem.at[here], {axis_name: owner}) && x_of_owner.at[here] => x_of_owner
  plgpu.copy_smem_to_gmem(x_smem.at[stage], o_gmem.at[owner, here])
    => o_gmem[owner, here] = x_smem[stage]\n            plgpu.commit_smem()
  load_bytes(x_of_owner => plgpu.copy_gmem_to_smem(x_of_owner  # use load_bytes
  (x_gmem, {axis_name: owner}) => (x_gmem.at[here], {axis_name: owner})
    && load_bytes(x_of_owner.at[here] => plgpu.copy_gmem_to_smem(x_of_owner
  (x_gmem, {axis_name: owner}) => (x_gmem, owner)  # a dictionary
  o_gmem.at[owner, here] => plgpu.remote_ref(o_gmem, {axis_name: owner}).at[d, here]  # stores to itself alone
  pl.when(following < n * pieces)(lambda: load(following)) => load(following)  # no more pieces than there are
  @pl.loop(0, n * pieces) => @pl.loop(0, 2 * n * pieces) && following < n => following < 2 * n
    && div(i, pieces), n) => div(rem(i, n * pieces), pieces), n)  # and 24 would do
  o_gmem.at[owner, here] => o_gmem.at[d, here]  # were never written
  plgpu.remote_ref(x_gmem, {axis_name: owner}) => x_gmem  # all parts are its own shard
  o_gmem.at[owner, here] => o_gmem.at[div(i, pieces), here]  # in the order in which they were loaded
  plgpu.barrier_wait(full.at[stage]) => pass  # wait at the stage's barrier first
  plgpu.wait_smem_to_gmem(1, wait_read_only=True) => pass  # wait_smem_to_gmem
  plgpu.wait_smem_to_gmem(1, wait_read_only=True) => plgpu.wait_smem_to_gmem(2, wait_read_only=True)
  plgpu.wait_smem_to_gmem(0)\n => pass\n  # Not all copy_smem_to_gmem
  pl.semaphore_signal(read, device_id={axis_name: q}) => pass  # block 0 signals devices []
  for q in others:\n => for q in [*others, d]:\n  # must signal each of
  pl.semaphore_signal(read, device_id={axis_name: q})
    => pl.when(block == 0)(lambda q=q: pl.semaphore_signal(read, device_id={axis_name: q}))
    # block 1 signals devices []
  (read, device_id={axis_name: q}) => (read, 2, device_id={axis_name: q})  # must signal each of
  rows // piece_rows // num_blocks => 8 if n == 3 else 4  # with 160 rows
  rows // piece_rows // num_blocks => rows // piece_rows // num_blocks + 1  # beyond the end of a shard
  pl.semaphore_wait(read, n - 1) => pass  # waits for 0 signals
  pl.semaphore_wait(read, n - 1) => pl.semaphore_wait(read)  # waits for 1 signals
  pl.semaphore_wait(read, n - 1) => pl.semaphore_wait(read, n)  # waits for 3 signals
  for i in range(num_stages - 1):\n            load(i)
    => [pl.semaphore_signal(read, device_id={axis_name: q})
    for q in others]\n        for i in range(num_stages - 1):\n            load(i)
    && for q in others:\n            pl.semaphore_signal(read, device_id={axis_name: q}) =>
    # before its loads have arrived
  for q in others:\n            pl.semaphore_signal(read, device_id={axis_name: q}) =>
    && pl.semaphore_wait(read, n - 1)
    => pl.semaphore_wait(read, n - 1)\n        [pl.semaphore_signal(read, device_id={axis_name: q}) for q in others]
    # all wait before they have signalled
  range(num_stages - 1) => range(1) && i + num_stages - 1 => i + 1  # no ring
  load_bytes(x_of_owner.at[here], x_smem.at[stage], full.at[stage])
    => o_gmem[owner, here] = x_of_owner[here]
    && plgpu.barrier_wait(full.at[stage]) => pass
    && plgpu.copy_smem_to_gmem(x_smem.at[stage], o_gmem.at[owner, here]) => pass  # by TMA
  plgpu.copy_smem_to_gmem(x_smem.at[stage], o_gmem.at[owner, here])
    => o_gmem[owner, here] = plgpu.remote_ref(x_gmem, {axis_name: owner})[here]
"""


# %% exercise-1 needs: parameters setup
def all_reduce_bytes(n, nbytes):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return 2 * (n - 1) * nbytes / n
    # END SOLUTION


ex18.check_bytes(all_reduce_bytes)


# %% exercise-2 needs: parameters setup
def meet(d, n):
    #: # Your code: a list of Signal(peer, "met", index) and Wait("met", index, count).
    #: return []
    # BEGIN SOLUTION
    others = [p for p in range(n) if p != d]
    return [Signal(p, "met", d) for p in others] + [Wait("met", q) for q in others]
    # END SOLUTION


ex18.check_meet(meet)


# %% exercise-3 needs: parameters setup
def pass_on(d, n, i, rounds):
    #: # Your code, with Read("inbox", (i % 2,), (i,))
    #: # and Send(d + 1, "inbox", (i % 2,), (i,)).
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


# %% exercise-4 needs: parameters setup
def gather(x, axis_name, *, num_blocks=2, piece_rows=16, num_stages=4):
    """All shards. x: (rows, 256), this device's shard."""
    n, (rows, width) = lax.axis_size(axis_name), x.shape

    def kernel(x_gmem, o_gmem, *, x_smem, full, read):
        block = lax.axis_index("block")

        def piece(i):
            return pl.ds((block + i * num_blocks) * piece_rows, piece_rows)

        #: # Your lines. piece(i) are the rows of this block's piece i of a shard. Load
        #: # from plgpu.remote_ref(x_gmem, {axis_name: owner}).
        # BEGIN SOLUTION
        d = lax.axis_index(axis_name)
        others = [rem(d + k, n) for k in range(1, n)]
        pieces = (
            rows // piece_rows // num_blocks
        )  # Pieces of a shard that are this block's.

        def place(i):
            return rem(d + 1 + div(i, pieces), n), piece(rem(i, pieces))

        def load(i):
            (owner, here), stage = place(i), rem(i, num_stages)
            x_of_owner = plgpu.remote_ref(x_gmem, {axis_name: owner})
            load_bytes(x_of_owner.at[here], x_smem.at[stage], full.at[stage])

        for i in range(num_stages - 1):
            load(i)

        @pl.loop(0, n * pieces)
        def _(i):
            (owner, here), stage = place(i), rem(i, num_stages)
            plgpu.barrier_wait(full.at[stage])
            plgpu.copy_smem_to_gmem(x_smem.at[stage], o_gmem.at[owner, here])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            following = i + num_stages - 1
            pl.when(following < n * pieces)(lambda: load(following))

        plgpu.wait_smem_to_gmem(0)
        for q in others:
            pl.semaphore_signal(read, device_id={axis_name: q})
        pl.semaphore_wait(read, n - 1)
        # END SOLUTION

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((n, rows, width), x.dtype),
        grid=(num_blocks,),
        grid_names=("block",),
        scratch_types=dict(
            x_smem=plgpu.SMEM((num_stages, piece_rows, width), x.dtype),
            full=plgpu.Barrier(num_barriers=num_stages),
            read=plgpu.SemaphoreType.REGULAR,
        ),
        compiler_params=lab.compiler_params(),
    )(x)


ex18.check_gather(gather)
