r"""A small serving engine with continuous batching over a paged cache, built from this package's kernels: the index.

Text goes in and out with the package tokenizers (the extra `serving`)::

    import tokenizers
    from cookbook.serving import Engine, load

    folder = "Llama-3.2-1B-Instruct"
    config, params = load(folder)
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    engine = Engine(config, params, num_pages=4096, max_seq_len=8192)
    engine.warmup()
    request = engine.submit(tokenizer.encode("Why is the sky blue?").ids, 200, temperature=0.7, top_p=0.9)
    shown = ""
    for output in engine.stream():
        text = tokenizer.decode(request.generated)
        if not text.endswith("\ufffd"):  # The rest of a character is still to come.
            print(text[len(shown) :], end="", flush=True)
            shown = text
"""

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
