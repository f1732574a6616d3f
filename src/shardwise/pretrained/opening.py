"""The one place where transformers and peft open what other people made. No code of theirs runs.

A folder of a model, a tokenizer or adapters may come from anyone. Left alone, transformers asks on
the terminal whether it may run the code beside a model, peft loads whatever an adapter names, and
both open a pipe and wait for ever. So what a folder says is read and bounded here first, and what
names code is left out or refused. Nothing here asks. ``tests/pretrained/test_opening.py`` finds
calls of their loaders elsewhere.

Patterns, chat templates and tokenizers are programs, too: :func:`limited` gives them a time.

At import time neither torch nor transformers is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.files import Links, read_small
from shardwise.base.strict import parse, refuse
from shardwise.base.units import one_line
from shardwise.checkpoint.disk.place import Place, StrPath, place_of
from shardwise.elastic.rank import report_end
from shardwise.elastic.world import World, find_world

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

MOST_LAYERS = 10_000  # each is built, and rehearsed
REACHED_WITHIN = 5.0  # seconds, by a Hub that is there
LIMIT = 120.0  # seconds that a stranger's pattern, template or tokenizer may take at a time

GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
_MOST_BYTES = 1 << 24  # of a configuration
_MOST_FILE = 1 << 28  # of any file of a tokenizer
_AGAIN = 1.0  # and once more, if what was interrupted has kept the error to itself
_GRACE = 5.0  # after which a library that does not come back is ended with its process
_MOST_ID = 2**31 - 1

_LAYERS = re.compile(r"num_(hidden_)?layers|n_layers?")
_COUNTS = re.compile(r".*layers?|depths?|.*_experts")
_POSITIONS = ("max_position_embeddings", "n_positions")
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # what else is in its place is a path
# What names code: that of a folder or a repository, or kernels of the Hub.
_NAMES_CODE = ("auto_map", "attn_implementation", "experts_implementation")
# Kinds of adapters that only change layers; others load models, tokenizers and further adapters.
_ADAPTERS = frozenset(
    {
        *("ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HRA", "IA3", "LN_TUNING"),
        *("LOHA", "LOKR", "LORA", "MISS", "OFT", "RANDLORA", "ROAD", "SHIRA", "VBLORA", "VERA"),
    }
)


class ModelSettingsError(CheckpointError):
    """Settings of a model that cannot be.

    Attributes:
        found: what a setting is.
        expected: what it can be.
    """

    def __init__(self, where: object, found: str, expected: str) -> None:
        super().__init__(f"{where}: found {found}, expected {expected}")
        self.found = found
        self.expected = expected


@contextlib.contextmanager
def limited(what: str) -> Iterator[None]:
    """Let what a stranger wrote take :data:`LIMIT` seconds, in the main thread.

    An alarm interrupts Python, regular expressions included. A library that does not come back to
    Python is ended with its process, which reports the same line.

    Args:
        what: what is running, and whose it is.

    Raises:
        CheckpointError: it takes longer; or a library of Rust has panicked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    slow = f"{what} takes more than {LIMIT:g} s, expected moments; it may never end"

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise CheckpointError(slow)

    def end() -> None:
        os._exit(report_end(find_world() or World(0, 1, 0, 1), UserError(slow)))

    last = threading.Timer(LIMIT + _GRACE, end)
    last.daemon = True
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, LIMIT, _AGAIN)
        last.start()
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, and no Exception
            raise
        raise CheckpointError(f"{what} fails: {error}") from None
    finally:
        last.cancel()
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


# -- the Hub ---------------------------------------------------------------------------------------


def from_hub(name: str, files: Sequence[str]) -> Path:
    """Download files of a repository on the Hugging Face Hub, once for each host.

    Args:
        name: of the repository.
        files: patterns of their names.

    Returns:
        The folder that they are in.

    Raises:
        CheckpointError: there is no such repository, or the Hub cannot be reached and the files
            were not downloaded before.
    """
    if not _REPOSITORY.fullmatch(name):
        raise CheckpointError(f"{name}: found nothing there, expected a folder of a model")
    from huggingface_hub import snapshot_download

    away = hub_is_away()
    try:  # processes of one host wait for each other
        found = snapshot_download(name, allow_patterns=[*files], local_files_only=away)
    except Exception as error:  # of the network, of permissions, of names
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(
            f"{name}: found no such folder, and could not get it from the Hugging Face Hub "
            f"({'which cannot be reached' if away else reason}); expected a folder of a model, or "
            "the name of a repository"
        ) from error
    return Path(found)


def hub_is_away() -> bool:
    """Whether the Hub cannot be reached, which takes seconds.

    Its client finds out by trying again for half a minute, with every file that is asked for.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return True
    try:
        get_session().head(constants.ENDPOINT, timeout=REACHED_WITHIN)
    except Exception:  # of whichever library its client is built upon
        return True
    return False


def small_files(model: StrPath) -> Path:
    """The folder of a model; of one in a store, a folder of this host with all but its weights.

    Raises:
        CheckpointError: a file cannot be fetched; see :func:`~.fetched.cached`.
        ValueError: it is a URL of no store, or has a user name, a password or a query.
    """
    place = place_of(model)
    if isinstance(place, Path):
        return place
    from shardwise.checkpoint.disk.fetched import cached_companions  # of no use to folders

    return cached_companions(place, _MOST_FILE)


# -- models ----------------------------------------------------------------------------------------


def read_settings(file: Path) -> dict[str, Any]:
    """Read a ``config.json``, and check what takes time or memory to build.

    Raises:
        CheckpointError: it is no regular file of at most 16 MiB, or no configuration of a model.
    """
    settings = _read_json(file)
    if not isinstance(settings.get("model_type"), str):
        raise ModelSettingsError(file, 'no "model_type"', "a config.json")
    check_settings(settings, file)
    return settings


def check_settings(settings: Mapping[str, Any], where: object) -> None:
    """Check the numbers of a configuration that are not checked elsewhere.

    Raises:
        ModelSettingsError: there are fewer than 1 or more than 10,000 layers, or no positions.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            check_settings(value, where)
        if name in _POSITIONS and isinstance(value, int) and value < 1:
            raise ModelSettingsError(where, f"{value} positions", "1 or more")
        if _COUNTS.fullmatch(name):
            least = 1 if _LAYERS.fullmatch(name) else -MOST_LAYERS
            for count in value if isinstance(value, list) else [value]:
                if isinstance(count, int) and not least <= count <= MOST_LAYERS:
                    what = "layers" if _LAYERS.fullmatch(name) else name
                    raise ModelSettingsError(where, f"{count:,} {what}", f"1 to {MOST_LAYERS:,}")


def without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that name code."""
    return {
        name: without_code(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name.removeprefix("_") not in _NAMES_CODE or value in ("eager", "sdpa")
    }


def model_config(
    made: type[PreTrainedConfig], settings: Mapping[str, Any], where: Place, **overrides: Any
) -> PreTrainedConfig:
    """Return the configuration of a model.

    Args:
        made: its class.
        settings: what its ``config.json`` says.
        where: the folder, for errors.
        overrides: settings of the user, which may name what they want.

    Raises:
        ModelSettingsError: see :func:`check_settings`.
        Exception: ``transformers`` cannot use them.
    """
    check_settings(settings, where)
    return made.from_dict(without_code(settings), **overrides)


def model_of(family: Any, settings: Mapping[str, Any]) -> PreTrainedModel:
    """Build a model of an ``AutoModel...`` class in float32, on torch's default device.

    Raises:
        Exception: ``transformers`` cannot.
    """
    import torch
    from transformers import AutoConfig, PreTrainedModel

    left_out = ("model_type", "torch_dtype", "dtype")
    rest = {k: v for k, v in without_code(settings).items() if k not in left_out}
    config = AutoConfig.for_model(settings["model_type"], **rest, dtype="float32")
    model = family.from_config(config, dtype=torch.float32, trust_remote_code=False)
    assert isinstance(model, PreTrainedModel)
    return model


def generation_config(folder: Path) -> GenerationConfig | None:
    """Return how the model of a folder generates; ``None`` if the folder does not say.

    Raises:
        CheckpointError: it is no regular file, is damaged, or its tokens cannot be.
    """
    from transformers import GenerationConfig

    file = folder / GENERATION_CONFIG
    if not os.path.lexists(file):
        return None
    settings = _read_json(file)
    ends = settings.get("eos_token_id")
    for token in ends if isinstance(ends, list) else [0 if ends is None else ends]:
        if type(token) is not int or not 0 <= token <= _MOST_ID:
            refuse(f"{file}, 'eos_token_id'", token, f"numbers of tokens, from 0 to {_MOST_ID}")
    try:
        return GenerationConfig.from_dict(settings)
    except Exception as error:  # it checks in many ways
        reason = one_line(error) or type(error).__name__
        raise CheckpointError(f"{file}: transformers cannot use it: {reason}") from error


# -- tokenizers ------------------------------------------------------------------------------------


def tokenizer(name: str | Path) -> Any:
    """Load a tokenizer of ``transformers``: a folder, or a name on the Hugging Face Hub.

    Raises:
        CheckpointError: it cannot be loaded, or not without code of its own.
    """
    from transformers import AutoTokenizer

    if here := Path(name).is_dir():
        _check_files(Path(name))
    here = here or hub_is_away()
    try:
        with limited(f"the tokenizer in {name}"):
            return AutoTokenizer.from_pretrained(
                name, trust_remote_code=False, local_files_only=here
            )
    except Exception as error:  # each loader fails in its own way
        reason = one_line(error) or type(error).__name__
        raise CheckpointError(f"the tokenizer in {name} cannot be loaded ({reason})") from error


def _check_files(folder: Path) -> None:
    """Check that a library can open every file of a folder, and which others it would open."""
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        with contextlib.suppress(FileNotFoundError):  # a link to nothing
            status = file.stat()
            if stat.S_ISDIR(status.st_mode) or file.suffix == ".safetensors":
                continue
            if not stat.S_ISREG(status.st_mode):
                refuse(str(file), stat.filemode(status.st_mode), "a regular file")
            if status.st_size > _MOST_FILE and file.suffix in (".json", ".jinja", ".model", ".txt"):
                refuse(str(file), f"{status.st_size:,} bytes", f"at most {_MOST_FILE:,}")
    file = folder / "tokenizer_config.json"
    if file.exists() and _read_json(file).get("init_inputs"):
        refuse(f"{file}, 'init_inputs'", "files to open", "none: they may be anywhere")


# -- adapters --------------------------------------------------------------------------------------


def adapter_config(folder: Path) -> PeftConfig:
    """Read the configuration of adapters that only change layers.

    Raises:
        CheckpointError: there is none, or peft would read more than the folder for it.
    """
    from peft import PeftConfig

    file = folder / ADAPTER_CONFIG
    settings = read_adapter_settings(folder)
    kind = settings.get("peft_type")
    if not isinstance(kind, str) or kind not in _ADAPTERS:
        refuse(f"{file}, 'peft_type'", kind, "adapters in layers, such as LORA")
    if settings.get("megatron_config"):
        refuse(f"{file}, 'megatron_config'", "some", "none: peft would import what it names")
    copies = settings.get("layer_replication") or ()
    if sum(last - first for first, last in copies) > MOST_LAYERS:
        refuse(f"{file}, 'layer_replication'", copies, f"at most {MOST_LAYERS:,} layers")
    plain = {name: value for name, value in settings.items() if name != "auto_mapping"}
    config: PeftConfig = PeftConfig.from_peft_type(**plain)  # type: ignore[no-untyped-call]
    return config


def read_adapter_settings(folder: Path) -> dict[str, Any]:
    """Read what a folder of adapters says about them.

    Raises:
        CheckpointError: it does not.
    """
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder}: found no {ADAPTER_CONFIG}, expected adapters of peft")
    return _read_json(file)


def with_adapters(
    model: Any, config: PeftConfig, where: object, adapter_name: str = "default"
) -> Any:
    """Put adapters without memory on a model.

    Args:
        model: the model. Its layers are replaced by those of peft.
        config: which layers get adapters.
        where: whose patterns of names these are, for errors.
        adapter_name: what peft calls them.

    Raises:
        CheckpointError: its patterns take for ever.
        Exception: peft cannot put them on this model.
    """
    from peft import get_peft_model

    with limited(f"{where}: a pattern for names of layers"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a former name
        return get_peft_model(model, config, adapter_name, low_cpu_mem_usage=True)


def _read_json(file: Path) -> dict[str, Any]:
    settings = parse(read_small(file, _MOST_BYTES, Links.FOLLOW), str(file), decoder=_LENIENT)
    if not isinstance(settings, dict):
        refuse(str(file), settings, "a JSON object")
    return settings


_LENIENT = json.JSONDecoder()  # Mamba's settings have the number Infinity
