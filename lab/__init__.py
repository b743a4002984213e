"""Tools around a kernel: where it runs, whether it is right, what it compiles to, how fast it is, and why."""

from cookbook._host import compiler_params as compiler_params

from . import plot as plot
from . import results as results
from . import roofline as roofline
from .autotune import Tuning as Tuning
from .autotune import autotune as autotune
from .checking import CheckError as CheckError
from .checking import CheckReport as CheckReport
from .checking import check as check
from .compiling import Compiled as Compiled
from .compiling import compile_for as compile_for
from .explaining import Explanation as Explanation
from .explaining import explain as explain
from .explaining import raises as raises
from .interpreter import Deadlock as Deadlock
from .interpreter import interpret as interpret
from .interpreter import on_gpu as on_gpu
from .interpreter import run as run
from .launching import Launch as Launch
from .launching import launches as launches
from .showing import guess as guess
from .showing import say as say
from .showing import show_diff as show_diff
from .showing import sources as sources
from .showing import table as table
from .timeline import chrome_trace as chrome_trace
from .timeline import step_clocks as step_clocks
from .timeline import timeline as timeline
from .timing import Measurement as Measurement
from .timing import first_call_seconds as first_call_seconds
from .timing import measure as measure
from .toolchain import ToolchainMissing as ToolchainMissing
from .turns import alone as alone
