"""A small serving engine with continuous batching over a paged cache, built from this package's kernels: the index."""

from cookbook.serving.checkpoint import load as load
from cookbook.serving.checkpoint import save as save
from cookbook.serving.config import LlamaConfig as LlamaConfig
from cookbook.serving.config import RopeScaling as RopeScaling
from cookbook.serving.config import init as init
from cookbook.serving.engine import Engine as Engine
from cookbook.serving.pages import PageAllocator as PageAllocator
from cookbook.serving.request import Logprobs as Logprobs
from cookbook.serving.request import Output as Output
from cookbook.serving.request import Request as Request
from cookbook.serving.scheduler import Scheduler as Scheduler
from cookbook.serving.stats import Stats as Stats
from cookbook.serving.stats import StepStats as StepStats
