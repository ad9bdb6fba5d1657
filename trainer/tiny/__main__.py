"""`python -m trainer.tiny NAME...`: builds recipes (`tiny`) or single models (`tiny:policy`) and prints their directories."""

from __future__ import annotations

import argparse

from trainer.tiny import ROLES, describe, names, resolve


def main() -> None:
    """Builds each name and prints one directory a line on stdout; progress goes to stderr."""
    listing = "\n".join(f"  {name:15} {describe(name)}" for name in names())
    parser = argparse.ArgumentParser(
        prog="python -m trainer.tiny", epilog=listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", help="recipe or recipe:role")
    parser.add_argument("--cache", default=None, help="cache directory (default: $EXACTRL_CACHE or ~/.cache/exactrl)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args()
    for name in arguments.names:
        wanted = [name] if ":" in name else [f"{name}:{role}" for role in ROLES if f"{name}:{role}" in names()]
        for each in wanted or [name]:
            print(resolve(each, cache_dir=arguments.cache, quiet=arguments.quiet))


if __name__ == "__main__":
    main()
