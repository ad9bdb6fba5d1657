"""vLLM by itself, as its users call it: one process, `LLM.generate`, nothing of exactrl. The other side of `throughput.py`.

    python -P benchmarks/stock_vllm.py requests.json

Loads the engine, then serves all the requests for each line on standard input and prints `ROUND <tokens> <seconds>`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Serve rounds until the input ends."""
    from vllm import LLM, SamplingParams

    given = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**given["engine"])
    prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
    params = [SamplingParams(**given["sampling"], seed=seed) for seed in given["seeds"]]
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        print("ROUND", sum(len(output.outputs[0].token_ids) for output in outputs), seconds, flush=True)


if __name__ == "__main__":
    main()
