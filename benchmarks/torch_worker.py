"""PyTorch's side of a benchmark: one training step per input line, as `timing.Worker` expects.

It runs in a separate environment, so it imports nothing from leanformer. A script's only argument is JSON. It prints
JSON lines: first a description, then seconds.
"""

import json
import os
import sys
import time

import torch


def serve(make, library):
    """Run one step per input line, and print its seconds.

    Args:
        make: function of the JSON argument's entries, by keyword, that returns a step with its `model`.
        library: module of the model's library.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    step = make(**json.loads(sys.argv[1]))
    for _ in range(2):  # warm-up
        step()
    versions = f"PyTorch {torch.__version__}, {library.__name__} {library.__version__}"
    parameters = sum(p.numel() for p in step.model.parameters())
    print(json.dumps({"versions": versions, "parameters": parameters}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(json.dumps(time.perf_counter() - start), flush=True)
