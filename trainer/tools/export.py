"""`exactrl export RUN --to DIR`: the trained actor as a Hugging Face folder that transformers and vLLM load, verified.

    RUN/checkpoints/step_000040 --verify--> tensors --write--> DIR.tmp --load again, compare digests--> DIR

LoRA adapters are merged into the model, or written as a PEFT adapter with `--adapter`. README.md is a card of the run.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.problems import UserError
from determinism.files import write_atomically
from trainer.tools.trust import add_option, check_trust

if TYPE_CHECKING:
    from torch import Tensor

    from configs.schema import Config
    from trainer.checkpoint import Checkpoint

logger = logging.getLogger("exactrl.export")

EPILOG = """\
The folder has float32 weights (exactly those that were trained), the model's configuration, its tokenizer with the chat template
of the run, and README.md with the run's settings and its reward curve. It is complete or not there: what was written is
loaded again and its digest compared with that of the run's ledger before the folder gets its name.

examples:
  exactrl export runs/a --to models/a                     the newest checkpoint
  exactrl export runs/a --step 40 --to models/a_40
  exactrl export runs/lora --adapter --to adapters/lora   a PEFT adapter for the model that was trained on
"""


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `exactrl export`."""
    parser = argparse.ArgumentParser(
        prog="exactrl export",
        description="Write the trained actor of a run as a Hugging Face folder that transformers and vLLM load.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, or a checkpoint's directory in it")
    parser.add_argument("--step", type=int, metavar="K", help="the checkpoint of this step (default: the newest)")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="the folder to make; must be new or empty"
    )
    parser.add_argument("--adapter", action="store_true", help="write LoRA adapters as a PEFT adapter, unmerged")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="the model that was trained on, when it is no longer where the run had it",
    )
    add_option(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `exactrl export`; returns the exit code."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    export(args.run, args.to, step=args.step, adapter=args.adapter, base=args.base, trust_run=args.trust_run)
    return 0


def export(
    run: Path,
    to: Path,
    *,
    step: int | None = None,
    adapter: bool = False,
    base: Path | None = None,
    trust_run: bool = False,
) -> None:
    """Write the actor of a checkpoint into the folder `to`.

    Args:
        step: step of the checkpoint; None takes the newest.
        adapter: write a PEFT adapter instead of a whole model.
        base: directory of the model that was trained on; None takes the run's `model.path`.
        trust_run: whether code that the run's configuration names may run.

    Raises:
        UserError: `to` is not empty, `run` is no run, or its configuration names code and is not trusted.
        CheckpointError: the checkpoint is damaged, or does not fit the model.
    """
    from configs.compose import from_yaml
    from trainer.tools.saved_actor import find_checkpoint, run_of, verify

    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UserError(f"--to {to}: is not empty; choose a new folder")
    checkpoint = find_checkpoint(run, step, option="")
    root = run_of(checkpoint)
    if root is None:
        raise UserError(f"{run}: there is no config.yaml of the run two folders above {checkpoint.path}")
    config = from_yaml(root / "config.yaml")
    check_trust(config, root, trust_run)
    verify(checkpoint)
    model = base or Path(config.model.path)
    if not model.is_dir():
        raise UserError(f"the model that was trained on is not in {model}; name its folder with --base DIR")
    scratch = to.with_name(to.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        digest = (_write_adapter if adapter else _write_model)(scratch, checkpoint, root, config, model)
        from trainer.tools.model_card import model_card

        write_atomically(scratch / "README.md", model_card(root, checkpoint, config, digest, adapter))
        scratch.replace(to)  # an empty folder is replaced
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    print(f"step {checkpoint.step} of {root} is in {to}: loaded again, every weight agrees", flush=True)


def _write_model(folder: Path, checkpoint: Checkpoint, run: Path, config: Config, model: Path) -> str:
    """Write a whole model; returns the digest of what was trained."""
    from trainer.data.prompts import load_tokenizer
    from trainer.tools.saved_actor import actor_weights
    from workers.models.trainer_worker import write_hf

    actor = actor_weights(checkpoint, model, config.actor.lora)
    _check_ledger(run, checkpoint, actor.digest)
    write_hf(folder, model, _hf_config(model, config), actor.tensors, config, classifier=False)
    for source in model.glob("*.py"):  # a model's own code, which its configuration names
        shutil.copy(source, folder)
    settings = config.model
    tokenizer = load_tokenizer(settings.tokenizer or str(model), settings.chat_template, settings.trust_remote_code)
    tokenizer.save_pretrained(folder)
    _compare(dict(_load_model(folder, config).named_parameters()), actor.tensors, folder)
    return actor.digest


def _write_adapter(folder: Path, checkpoint: Checkpoint, run: Path, config: Config, model: Path) -> str:
    """Write a PEFT adapter; returns the digest of what was trained."""
    from peft import LoraConfig as PeftConfig
    from peft import PeftModel
    from safetensors.torch import save_file

    from determinism.digest import module_digest
    from trainer.tools.saved_actor import trained_tensors

    stored = trained_tensors(checkpoint, model)
    lora = config.actor.lora
    if not all(".lora_" in name for name in stored):
        raise UserError(f"--adapter: {checkpoint.path} holds whole weights, not adapters; export it without --adapter")
    digest = module_digest(stored.items())
    _check_ledger(run, checkpoint, digest)
    named = {
        f"base_model.model.{name.replace('.default.weight', '.weight')}": t.contiguous() for name, t in stored.items()
    }
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.target_modules),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model),
        inference_mode=True,
    )
    settings.save_pretrained(str(folder))
    again = PeftModel.from_pretrained(_load_model(model, config), str(folder))
    loaded = {name.removeprefix("base_model.model."): p for name, p in again.named_parameters() if ".lora_" in name}
    _compare(loaded, stored, folder)
    return digest


def _check_ledger(run: Path, checkpoint: Checkpoint, digest: str) -> None:
    """Check that the weights are those that the run recorded at that step."""
    from trainer.claim import check_restored
    from trainer.run_dir import RunDirectory

    check_restored(RunDirectory(run), checkpoint, {"actor_weights": digest})


def _hf_config(model: Path, config: Config) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model, trust_remote_code=config.model.trust_remote_code)


def _load_model(folder: Path, config: Config) -> Any:
    """Load the folder as a user would, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
    )


def _compare(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse a folder that gives back other weights than were written.

    Raises:
        RuntimeError: names the first parameter that differs or is missing.
    """
    from determinism.digest import module_digest

    missing = sorted(expected.keys() - loaded.keys())
    if missing:
        raise RuntimeError(f"{folder} was written, but the library loads no {missing[0]} from it; it is removed")
    for name, tensor in expected.items():
        if module_digest([(name, loaded[name])]) != module_digest([(name, tensor)]):
            raise RuntimeError(f"{folder} was written, but {name} comes back with other values; it is removed")


if __name__ == "__main__":
    from trainer.tools.cli import main as cli

    sys.exit(cli(["export", *sys.argv[1:]]))
