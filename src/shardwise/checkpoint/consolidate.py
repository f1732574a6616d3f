"""``python -m shardwise.checkpoint.consolidate``: full state dicts from the files of all ranks.

It takes the options of PyTorch/XLA's command of that name, and its files too; see
:mod:`.ranks.xla`. ``shardwise checkpoint consolidate`` does the same for all formats.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.ranks.xla import SUFFIX, consolidate_sharded_model_checkpoints


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwise.checkpoint.consolidate",
        description="Make one file from the files of all ranks, without a process group.",
        epilog="Example: python -m shardwise.checkpoint.consolidate --ckpt_prefix runs/vit "
        '--ckpt_suffix "_rank-*-of-*.pth"',
    )
    parser.add_argument("--ckpt_prefix", required=True, help="beginning of the files' paths")
    parser.add_argument(
        "--ckpt_suffix",
        default=SUFFIX,
        help="end of the files' paths, as a pattern (default: %(default)s)",
    )
    parser.add_argument(
        "--save_path", default="", help="file to make (default: <prefix>_consolidated.pth)"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    options = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings(record=True, action="always") as notes:
            model, path = consolidate_sharded_model_checkpoints(
                options.ckpt_prefix, options.ckpt_suffix, options.save_path, force=options.force
            )
    except (CheckpointError, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    assert path is not None
    for note in notes:
        print(f"note: {note.message}", file=sys.stderr)
    print(f"saved {len(model)} tensors, {os.stat(path).st_size:,} bytes, to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
