r"""A small serving engine with continuous batching over a paged cache, built from this package's kernels: the index.

Text goes in and out with the package tokenizers (the extra `serving`)::

    import tokenizers
    from serving import Engine, load

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

from serving.checkpoint import load as load
from serving.checkpoint import save as save
from serving.config import LlamaConfig as LlamaConfig
from serving.config import RopeScaling as RopeScaling
from serving.config import YarnScaling as YarnScaling
from serving.config import init as init
from serving.engine import Engine as Engine
from serving.memory import Memory as Memory
from serving.memory import memory as memory
from serving.pages import PageAllocator as PageAllocator
from serving.request import Logprobs as Logprobs
from serving.request import Output as Output
from serving.request import Request as Request
from serving.scheduler import Scheduler as Scheduler
from serving.stats import Stats as Stats
from serving.stats import StepStats as StepStats
