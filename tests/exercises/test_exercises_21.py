"""Chapter 21's exercises: each likely mistake is turned down, with the reason."""

import pytest
import test_solutions as course

STEM = "21_lifting"
SLOPE = "2 * jnp.maximum(x_gmem[...], 0)"


@pytest.mark.parametrize(
    "cell, right, wrong, said",
    [
        ("exercise-1-cell", '        families.add("gemm")', "        pass", "leaves out gemm"),
        ("exercise-1-cell", 'f"{name}.py" if name == "elementwise" else name', "name", "leaves out elementwise.py"),
        ("exercise-1-cell", 'files | {"_host.py", "_numerics.py"}', "files", "leaves out _host.py"),
        ("exercise-1-cell", "sorted(files |", "sorted({'lab'} | files |", "copies 'lab', which is not needed"),
        ("exercise-1-cell", '"_numerics.py"})', '"_numerics.py"}, reverse=True)', "it must be sorted"),
        ("exercise-2-cell", SLOPE, "jnp.maximum(x_gmem[...], 0)", "the gradient, float32"),
        ("exercise-2-cell", SLOPE, "2 * x_gmem[...]", "the gradient, float32"),
        ("exercise-2-cell", SLOPE, "2 * jnp.where(x_gmem[...] > 0, x_gmem[...], 0)", "must be nan"),
        ("exercise-3-cell", "    return out", "    return 1.0 * out", "computed outside of the kernel"),
        ("exercise-3-cell", "return out", "return out.reshape(-1).reshape(8, 128)", "`reshape` beside the kernel"),
        ("exercise-3-cell", "2 * x_gmem[...]", "x_gmem[...]", "element"),
        ("exercise-4-cell", "max(0.03, 2 * entry", "min(0.03, 2 * entry", "less than"),
        ("exercise-4-cell", 'max(0.03, 2 * entry["spread"])', "0.03", "less than twice its spread"),
        ("exercise-4-cell", "1 + share", "1.1 + share", "add is 4% slower"),
        ("exercise-4-cell", "math.nan) <=", "0.0) <=", "was not measured"),
    ],
)  # fmt: skip
def test_a_mistake_is_turned_down(cell, right, wrong, said):
    verdict = course.mistaken(STEM, cell, right, wrong)
    assert not verdict and said in verdict.text, verdict
