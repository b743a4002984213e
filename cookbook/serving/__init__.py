"""A small serving engine with continuous batching over a paged cache, built from this package's kernels: the index."""

from cookbook.serving.engine import Engine as Engine
from cookbook.serving.engine import StepStats as StepStats
from cookbook.serving.model import LlamaConfig as LlamaConfig
from cookbook.serving.model import init as init
from cookbook.serving.model import load as load
from cookbook.serving.model import save as save
from cookbook.serving.pages import PageAllocator as PageAllocator
from cookbook.serving.scheduler import Request as Request
from cookbook.serving.scheduler import Scheduler as Scheduler
