"""Chapter 9c's exercises: bytes of weights of 4 bits, the place of a weight, zero points, e2m1 as float16."""

import jax.extend.core
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide

# Exercise 1: bytes ----------------------------------------------------------------------------------------------------


def _bytes_of(m, n, k, group_size, has_zeros, *, padded=True, whole=True, scale=2, zero=1, rows=True, weight=1):
    units = -(-k // 64) if padded else k / 64
    groups = -(-k // group_size) if whole else k // group_size
    weights = int(32 * weight * units * n)
    return weights + (scale + zero * has_zeros) * groups * n + 2 * m * (k + n) * rows


@checker
def check_bytes(answer) -> str:
    """`answer(m, n, k, group_size, has_zeros)` is the bytes of a product with weights of 4 bits, their scales, and
    zero points if there are any."""
    cases = [(16, 8192, 8192, 128, False), (1, 4096, 1096, 32, True), (64, 1000, 2880, 128, False)]
    likely = [
        (dict(padded=False), "The last unit of 64 values is padded: it takes 32 bytes as well."),
        (dict(whole=False), "A shorter last group has a scale too."),
        (dict(scale=0), "Each group has a scale of 2 bytes."),
        (dict(zero=0), "With zero points each group has 1 byte more."),
        (dict(zero=2), "A zero point is 1 byte."),
        (dict(rows=False), "The rows and the result cross memory too, 2 bytes per value."),
        (dict(weight=2), "A weight is half a byte."),
    ]
    draw = lambda rng: (
        int(rng.integers(1, 100)), 8 * int(rng.integers(20, 900)), 8 * int(rng.integers(20, 900)),
        int(rng.choice([32, 64, 128])), bool(rng.integers(2)),
    )  # fmt: skip
    require_answers(answer, cases, _bytes_of, likely, draw=draw)
    return "With groups of 128 a weight has 4.125 bits."


# Exercise 2: the place of a weight ------------------------------------------------------------------------------------


def _place(k, *, by_part=False, swapped=False, plain=False):
    part, pair, lane, half = k // 32, k // 8 % 4, k // 2 % 4, k % 2
    if plain:
        return k // 8, 4 * (k % 8)
    word = 4 * part + lane if by_part else 2 * lane + part
    return word, (8 * pair + 4 * half if swapped else 16 * half + 4 * pair)


@checker
def check_place(answer) -> str:
    """`answer(k)` is the word of a unit that holds value k, and the lowest of its bits there."""
    likely = [
        (dict(plain=True), "This is the order of K. A thread would find another thread's weights in its word."),
        (dict(by_part=True), "The two words of a lane are neighbours, so that one read takes both."),
        (dict(swapped=True), "The two of a pair lie in the two halves of the word, 16 bits apart."),
    ]
    require_answers(answer, [(k,) for k in range(64)], _place, likely)
    return "One read of two words, and a mask makes a pair."


# Exercise 3: zero points ----------------------------------------------------------------------------------------------


@checker
def check_zeros(answer) -> str:
    """`answer(x, w, scales, zeros)` is the kernel `product` for groups of 64 that have zero points, (K / 64, N)."""
    _judge_zeros(answer, 256, 128)
    _judge_zeros(answer, 384, 64, "with K = 384 and N = 64, ")
    shape = jax.ShapeDtypeStruct
    of_groups = [shape((2048 // 64, 64), jnp.bfloat16)] * 2  # The ring's stages are loaded again.
    rows, weights = shape((16, 2048), jnp.bfloat16), shape((64, 1024), jnp.uint8)
    judge.require_order_of(answer, rows, weights, *of_groups)
    return "A step has two groups, the integer that is subtracted is exact, and a weight is rounded once."


def _judge_zeros(answer, k: int, n: int, of: str = "") -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(0, 16, (k, n))
    both = q.T.astype(np.uint8).reshape(n, -1, 2, 64)
    w = jnp.asarray((both[:, :, 0] | both[:, :, 1] << 4).reshape(n, -1))
    scales = jnp.asarray(np.exp2(rng.uniform(-6, 0, (k // 64, n))), jnp.bfloat16)
    zeros = jnp.asarray(rng.integers(0, 17, (k // 64, n)), jnp.bfloat16)
    s, z = (np.repeat(wide(groups), 64, axis=0) for groups in (scales, zeros))
    first = lambda groups: np.repeat(groups[::128], 128, axis=0)  # A step's first group for both.
    swapped = lambda groups: groups.reshape(-1, 2, 64, n)[:, ::-1].reshape(k, n)
    rounded = lambda exact: wide(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16))
    weights = rounded((q - z) * s)
    # Each row picks a row of weights, so that the results are weights.
    picked = [0, 1, 63, 64, 65, 127, 128, 190, 191, 192, 200, 201, 202, 203, 254, 255]
    rows = jnp.zeros((16, k), jnp.bfloat16).at[jnp.arange(16), jnp.asarray(picked)].set(1)
    for x, tolerance, where in ((normal(4, (16, k), jnp.bfloat16), 2e-2, "random rows"), (rows, 0, "single weights")):
        out = run_kernel(answer, x, w, scales, zeros)
        product = lambda weights, x=x: wide(x) @ weights
        likely = [
            (product((q - 8) * first(s)), "every zero point was taken to be 8, and both groups of a step have the "
             "scales of its first"),
            (product((q - first(z)) * first(s)), "both groups of a step have the numbers of its first"),
            (product((q - z) * first(s)), "both groups of a step have the scales of its first"),
            (product((q - first(z)) * s), "both groups of a step have the zero points of its first"),
            (product((q - swapped(z)) * swapped(s)), "the two groups of a step are exchanged: which 64 values of K lie "
             "in the lower half of a byte?"),
            (product((q - 8) * s), "every zero point was taken to be 8"),
            (product(q * s), "nothing was subtracted from q"),
            (product((q + z) * s), "the zero points were added"),
            (product((q + 120 - z) * s), "the weights are 120 scales too large: 0x4300 is 128, and the 8 is what a "
             "zero point replaces"),
            (product((q - 8 - z) * s), "both 8 and the zero point were subtracted"),
            (product(q * s - z), "a zero point is an integer: subtract it before the scale multiplies"),
        ]  # fmt: skip
        if tolerance == 0 and out.shape == (16, n) and np.abs(wide(out) - product(weights)).max() < 1:
            if (twice := wide(out) != product(weights)).any():
                raise NotYet(
                    f"{twice.mean():.0%} of the weights were rounded twice: subtract integers first, which is exact, "
                    "and then multiply"
                )
        require_close(out, product(weights), tolerance, of + where, likely)


# Exercise 4: e2m1 as float16 ------------------------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


@checker
def check_half(answer) -> str:
    """`answer(codes)` is a kernel: e2m1 codes (N, K) in uint16 as float16, by operations on bits and one product."""
    for n, k in ((2, 1024), (3, 2048), _size()):
        rng = np.random.default_rng(k)
        codes = jnp.asarray(rng.permutation(np.resize(np.arange(16), n * k)).reshape(n, k), jnp.uint16)
        out = run_kernel(answer, codes)
        if out.shape != codes.shape or out.dtype != jnp.float16:
            raise NotYet(f"the result is {out.dtype} {out.shape}; it must be float16 {codes.shape}")
        jaxpr = judge.jaxpr_of(answer, codes)
        kinds = list(_kinds(jaxpr))
        names, factors = [kind for kind, _ in kinds], [factor for kind, factor in kinds if kind == "arithmetic"]
        if "conversion" in names:
            raise NotYet("integers are converted to floats by astype: place the bits, and multiply")
        if "choice" in names:
            raise NotYet("values are chosen by where, by comparing or from a table: place bits, right for all 16")
        if (num := names.count("arithmetic") + names.count("sum")) > 1:
            raise NotYet(f"{num} operations of floats are computed: one multiplication is enough")
        if "sum" in names:
            raise NotYet("floats are added or subtracted: place the bits so that one multiplication is enough")
        exact, bits = E2M1[np.asarray(codes)], np.asarray(codes)
        as_half = lambda bits: wide(bits.astype(np.uint16).view(np.float16))
        placed = (bits & 7) << 9
        likely = [
            (exact * 2.0**-14, "every value is 2^-14 of what it should be: multiply by the difference of the biases"),
            (as_half(bits), "these are the bits of the codes, read as floats"),
            (np.abs(exact), "the signs are missing"),
            (np.abs(exact) * 2.0**-14, "the signs are missing, and every value is 2^-14 of what it should be"),
            (as_half(bits << 9) * 2.0**14, "the sign lies in the exponent: give it a shift of its own"),
            (exact / 2, "every value is half of what it should be: the biases are 15 and 1"),
            (exact * 2, "every value is twice what it should be: the biases are 15 and 1"),
            (as_half(placed << 1 | (bits & 8) << 12) * 2.0**14, "the magnitude lies one bit too high: a float16 has 10 "
             "bits of mantissa, the first of them bit 9"),
        ]  # fmt: skip
        require_close(out, exact, 0, "the 16 codes", likely)
        if (np.signbit(wide(out)) != (bits >= 8)).any():
            raise NotYet("code 8 is -0.0, and the result has another sign there")
        if not num:
            raise NotYet("no floats are multiplied, so each value is built for itself: place bits, and multiply once")
        if factors == [2.0**-14]:
            raise NotYet("it divides by 2^-14: multiply by 2^14, which is one instruction, and a division is many")
        if not _stores_the_product(jaxpr):
            raise NotYet("what it stores is not the product: place the bits, multiply, and store that")
        if factors != [2.0**14]:  # Then the bits, of values 2^-14 of the results, are only placed: none are computed.
            raise NotYet(
                "each value is built before the multiplication: place the code's bits, which make 2^-14 of it, and "
                "multiply by that constant, 2^14"
            )
    return "All 16 values, the subnormal one among them, by shifts, masks and one multiplication."


def _kinds(jaxpr):
    """(kind, factor) of each operation: the constant by which it multiplies floats, or None. A shift by a number that
    is not the same for all codes looks a value up."""
    constants = {}
    for equation in judge.equations(jaxpr):
        values = [_constant(variable, constants) for variable in equation.invars]
        known = [value is not None for value in values]
        if all(known):  # A constant that is repeated or converted is the same constant.
            constants.update(dict.fromkeys(equation.outvars, values[0] if len(values) == 1 else np.nan))
        is_shift = equation.primitive.name.startswith("shift_")
        factor = next((value for value in values if value is not None), None) if len(values) == 2 else None
        yield "choice" if is_shift and not known[1] else _kind(equation), factor


def _size() -> tuple[int, int]:
    """A size that nobody knows beforehand."""
    return judge.drawn(lambda rng: (int(rng.integers(4, 9)), 3072), 1)[0]


def _stores_the_product(jaxpr) -> bool:
    """Whether all floats that are stored come from the multiplication, and nothing changes them after it."""
    products = set()
    for equation in judge.equations(jaxpr):
        name, inner = equation.primitive.name, jax.extend.core.jaxprs_in_params(equation.params)
        if _kind(equation) == "arithmetic" or any(_kind(x) == "arithmetic" for body in inner for x in body.eqns):
            products.update(equation.outvars)
        elif name in judge.MOVES | {"layout_cast"} and not isinstance(equation.invars[0], jax.extend.core.Literal):
            products.update(equation.outvars if equation.invars[0] in products else ())
        elif name == "swap" and "float" in str(equation.invars[1].aval) and equation.invars[1] not in products:
            return False
    return True


def _constant(variable, constants):
    """Its value, NaN where it is computed from constants; None where it is no constant."""
    if isinstance(variable, jax.extend.core.Literal):
        return float(variable.val) if np.ndim(variable.val) == 0 else np.nan
    return constants.get(variable)


def _kind(equation) -> str:
    """The kind of an operation: a conversion of integers to floats, a sum or other arithmetic of floats, a choice, or
    another."""
    name = equation.primitive.name
    is_float = lambda variable: jnp.issubdtype(getattr(variable.aval, "dtype", jnp.int32), jnp.floating)
    if name == "convert_element_type":
        to_float = jnp.issubdtype(equation.params["new_dtype"], jnp.floating)
        return "conversion" if to_float and not is_float(equation.invars[0]) else ""
    if name in ("select_n", "gather", "dynamic_slice", "eq", "ne", "lt", "le", "gt", "ge", "min", "max", "clamp"):
        return "choice"
    if name in ("add", "sub") and is_float(equation.outvars[0]):
        return "sum"
    is_arithmetic = name in ("mul", "div", "exp2", "pow", "integer_pow", "neg")
    return "arithmetic" if is_arithmetic and equation.outvars and is_float(equation.outvars[0]) else ""
