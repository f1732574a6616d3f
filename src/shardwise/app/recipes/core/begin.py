"""Check whether a run may begin, or go on, in its folder. No torch here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.recipe import Inputs, RecipeConfig, run_dir
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.base.errors import UserError
from shardwise.checkpoint.disk.place import Place
from shardwise.elastic.world import job_id
from shardwise.insight.schema.option import OnResume, OptionError, flatten, option_names
from shardwise.insight.schema.training import Existing, OutputConfig

if TYPE_CHECKING:
    from shardwise.app.recipes.core.checkpointing import Checkpoints


def decided(output: OutputConfig) -> OutputConfig:
    """Return the output with ``--auto-resume`` decided: resume if there are checkpoints.

    The same if this very job has begun the run and was then restarted: ``--overwrite`` has been
    done, and would now delete what the job has trained.

    This looks at the disk, so one process calls it, the launcher or rank 0, and tells the others.
    """
    files = run_dir(output.out)
    if output.existing is not Existing.AUTO and not files.was_begun_by(job_id()):
        return output
    if files.has_checkpoints():
        # Refused later if none of them is complete.
        return replace(output, existing=Existing.RESUME)
    begins_anew = files.is_run()
    return replace(output, existing=Existing.OVERWRITE if begins_anew else Existing.REFUSE)


def newest_step(checkpoints: Checkpoints, files: RunDir) -> int:
    """Return the step to resume from.

    Raises:
        OptionError: no checkpoint is complete.
        UserError: a newer checkpoint is damaged; resuming would replace what it holds.
    """
    steps = checkpoints.steps()
    if not steps:
        found = f"no complete checkpoint in {files.place_of_checkpoints}"
        raise OptionError("--resume", found, "one; or use --overwrite")
    if (damaged := checkpoints.damage()) is not None:
        path, problem = damaged
        raise UserError(f"--resume: {problem}; {how_to_go_on_without(path, steps[-1])}")
    return steps[-1]


def how_to_go_on_without(damaged: Place, step: int) -> str:
    """Return what to do to go on from an older step than that of a damaged checkpoint."""
    away = f"move {damaged} away, or delete it,"
    if not isinstance(damaged, Path):
        away = f"delete all that is below {damaged}/, manifest.json first,"
    return (
        f"{away} to go on from step {step} "
        f"(shardwise checkpoint verify {damaged} lists what is damaged)"
    )


def check_folder(inputs: Inputs) -> Position:
    """Check the folder of the run.

    Returns:
        Where to go on from; the beginning for a new run.

    Raises:
        OptionError: a run is there that would be lost, or none to resume, or another one.
        UserError: the newest checkpoint is damaged, or a file about the run.
    """
    # The command's help needs neither, and nobody likes to wait for it.
    from shardwise.app.recipes.core.checkpointing import Checkpoints

    output = decided(inputs.train.output)
    files = run_dir(output.out)
    files.check(output)
    if output.existing is not Existing.RESUME:
        return Position()
    before = files.read()
    found = before.get("recipe")
    if found != inputs.recipe:
        raise OptionError(
            "--resume", f"a run of train {found} in {files.place}", "one of this kind"
        )
    inputs.check_same(before)
    checkpoints = Checkpoints(files.place_of_checkpoints)
    position = checkpoints.position(newest_step(checkpoints, files))
    files.check_metrics(position.step)
    return position


def agreed_options(config: RecipeConfig) -> dict[str, str]:
    """Return the options that hosts agree on: not where things are, nor what is done about a run.

    Args:
        config: whose options.

    Returns:
        Their names, by the names of settings.
    """
    apart = (OnResume.DATA, OnResume.START)
    return option_names(config, *(rule for rule in OnResume if rule not in apart))


def check_alike(hosts: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> None:
    """Check that all hosts were started with the same options, model and data.

    Args:
        hosts: for each host, host 0 first: the name of the recipe and :meth:`Inputs.facts`.
        names: the options that hosts agree on, by the names of settings.

    Raises:
        OptionError: names the first difference, and the host.
    """
    expected = compared(hosts[0], names)
    goes_on = [flatten(each["config"]).get("existing") == Existing.RESUME.value for each in hosts]
    for host, facts in enumerate(hosts):
        for option, found in compared(facts, names).items():
            if found == expected.get(option):
                continue
            wanted = f"{expected.get(option)}, as on host 0"
            if goes_on[0] != goes_on[host]:
                one, other = (0, host) if goes_on[0] else (host, 0)
                wanted += (
                    f"; host {one} goes on with a run, and host {other} was not asked to, or does "
                    "not see it: --resume, and --out on storage that all hosts see"
                )
            raise OptionError(option, f"{found} on host {host}", wanted)


def compared(facts: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return what all hosts have to agree on, by the names of the options.

    Args:
        facts: the name of the recipe and :meth:`Inputs.facts`.
        names: the options that hosts agree on, by the names of settings.
    """
    settings = json.dumps(facts["model"].get("settings"), sort_keys=True)
    config = flatten(facts["config"])
    options = {option: config[name] for name, option in names.items() if name in config}
    return {
        "train": facts["recipe"],
        **options,
        "--model": f"settings with checksum {zlib.crc32(settings.encode()):08x}",
        "--data": f"data with fingerprint {facts['data'].get('fingerprint')}",
    }
