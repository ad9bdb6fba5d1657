"""Entry of a training run: `python -m trainer.main_ppo`, `torchrun ... -m trainer.main_ppo`, `accelerate launch`; as `exactrl train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: the same arguments as `exactrl train`."""
    from trainer.tools.cli import main as cli

    return cli(["train", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
