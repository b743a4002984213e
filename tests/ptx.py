"""Carries out PTX without branches, of one block of 128 threads, in NumPy: for what the interpreter does not see, such as
what a thread's registers hold and how instructions round."""

import math
import re

import numpy as np

THREADS = 128


def rounded(x, bits: int, least: int):
    """Float64 numbers with mantissas of so many `bits`, and no bit below 2^least, rounded to even."""
    unit = np.exp2(np.maximum(np.frexp(x)[1] - bits, least))
    return np.rint(x / unit) * unit


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(x):
    return (rounded(x, 8, -133).astype(np.float32).view(np.uint32) >> 16).astype(np.uint64)


def from_f16(bits):
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def to_f16(x):
    return x.astype(np.float16).view(np.uint16).astype(np.uint64)


def from_f32(bits):
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def to_f32(x):
    return x.astype(np.float32).view(np.uint32).astype(np.uint64)


FLOATS = {"bf16": (from_bf16, to_bf16), "f16": (from_f16, to_f16), "f32": (from_f32, to_f32)}
ARITHMETIC = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c,
    "neg": lambda a: -a,
}  # fmt: skip


def run(ptx: str, *arrays: np.ndarray) -> None:
    """Runs the one kernel of `ptx`, whose parameters are `arrays`; it may change them. All arithmetic rounds to the
    nearest, and subnormal numbers stay what they are, as PTX has it without `.ftz`."""
    memory, starts = [x.view(np.uint8).reshape(-1) for x in arrays], [i << 40 for i in range(len(arrays))]
    registers: dict[str, np.ndarray] = {}
    body = ptx[ptx.index("{\n") + 1 : ptx.rindex("ret;")]
    body = re.sub(r"// begin inline asm.*?// end inline asm", "", body, flags=re.DOTALL)

    def value(name: str):
        name = name.strip()
        if name in registers:
            return registers[name]
        if name == "%tid.x":
            return np.arange(THREADS, dtype=np.uint64)
        number = int(name, 0) if not name.startswith("-") else int(name, 0) % 2**64
        return np.full(THREADS, number, np.uint64)

    def access(address: str, size: int):
        """Where `size` bytes at each thread's address are: (which array, offsets)."""
        base, _, offset = address.strip("[] ").partition("+")
        at = value(base) + np.uint64(int(offset or 0))
        return memory[int(at[0] >> np.uint64(40))], at.astype(np.int64) % 2**40 + np.arange(size)[:, None]

    def as_number(parts):
        return sum(part.astype(np.uint64) << np.uint64(8 * i) for i, part in enumerate(parts))

    for line in body.split(";"):
        line = re.sub(r"//.*|^\s*\$.*:$|\.loc.*$", "", line, flags=re.MULTILINE).strip()
        if not line or re.match(r"\.reg|elect|shfl|bar\.|fence|@|\.pragma", line):
            if line.startswith("shfl"):  # The warp's first thread's.
                target, source = re.findall(r"%\w+", line)[:2]
                registers[target] = value(source).reshape(-1, 32)[:, :1].repeat(32, 1).reshape(-1)
            continue
        opcode, _, rest = line.partition("\t")
        name, *kinds = opcode.strip().split(".")
        operands = [x.strip() for x in re.split(r",\s*(?![^{]*\})", rest)]
        bits = max((int(m.group(1)) for kind in kinds if (m := re.fullmatch(r"[bus](\d+)", kind))), default=32)
        target, mask = operands[0], np.uint64(2**bits - 1)
        floating = next((kind for kind in kinds if kind.removesuffix("x2") in FLOATS), None)
        if name == "ld" and "param" in kinds[0]:
            registers[target] = np.full(THREADS, starts[int(re.search(r"param_(\d+)", rest).group(1))], np.uint64)
        elif name in ("ld", "st"):
            where, values = (operands[1], target) if name == "ld" else (target, operands[1])
            array, at = access(where, bits // 8 * len(values := re.findall(r"%\w+", values)))
            for i, register in enumerate(values):
                part = at[i * bits // 8 : (i + 1) * bits // 8]
                if name == "ld":
                    registers[register] = as_number(array[part])
                else:
                    array[part] = value(register) >> np.arange(0, bits, 8, dtype=np.uint64)[:, None] & np.uint64(255)
        elif name in ARITHMETIC and floating:
            of, to = FLOATS[floating.removesuffix("x2")]
            sources = [value(x) if not x.startswith("0f") else np.full(THREADS, int(x[2:], 16), np.uint64) for x in operands[1:]]
            half = lambda shift: to(ARITHMETIC[name](*(of(x >> np.uint64(shift) & np.uint64(0xFFFF)) for x in sources)))
            if floating.endswith("x2"):
                registers[target] = half(0) | half(16) << np.uint64(16)
            else:
                registers[target] = to(ARITHMETIC[name](*map(of, sources)))
        elif name == "cvt" and floating:
            source = next(kind for kind in reversed(kinds) if kind != "rn")
            result = next(kind for kind in kinds if kind != "rn")
            numbers = FLOATS[source][0](value(operands[1])) if source in FLOATS else value(operands[1]).astype(np.float64)
            registers[target] = FLOATS[result][1](numbers)
        elif name in ("cvta", "cvt"):
            registers[target] = value(operands[1])
        elif name == "mov" and "{" in target:
            halves = re.findall(r"%\w+|_", target)
            for i, register in enumerate(halves):
                registers[register] = value(operands[1]) >> np.uint64(i * bits // 2) & np.uint64(2 ** (bits // 2) - 1)
        elif name == "mov" and "{" in operands[1]:
            low, high = map(value, operands[1].strip("{} ").split(","))
            registers[target] = low | high << np.uint64(bits // 2)
        else:
            a, b, c = [*map(value, operands[1:]), None, None][:3]
            registers[target] = {
                "mov": lambda: a, "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b, "add": lambda: a + b,
                "shl": lambda: a << b, "shr": lambda: a >> b, "sub": lambda: a - b, "mul": lambda: a * b,
                "mad": lambda: a * b + c, "bfe": lambda: a >> b & (np.uint64(1) << c) - np.uint64(1),
            }[name]() & (mask if "wide" not in kinds else np.uint64(2**64 - 1))  # fmt: skip
