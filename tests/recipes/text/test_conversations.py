"""Rows of chats: nothing attends across, nothing is lost in silence, and who is refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.app.recipes.core.batches import Shuffled
from shardwise.app.recipes.text.chat import IGNORED, ChatEncoder, ChatError, ChatLines, load_chats
from shardwise.app.recipes.text.config import Packing
from shardwise.app.recipes.text.conversations import (
    ChatRows,
    Survey,
    check_apart,
    survey,
    target_loss,
)
from shardwise.app.recipes.text.data import Tokenizer
from shardwise.base.errors import UserError
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import Logits
from shardwise.insight.token_loss import TokenLoss
from tests.recipes.text.published import FORGETTING, chats, make_model, make_tokenizer, write_lines
from tests.worlds import Ranks

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1)


def opened(folder: Path, values: list[Any], **template: Any) -> tuple[ChatLines, ChatEncoder]:
    make_tokenizer(**template).save_pretrained(folder / "tokenizer")
    held = write_lines(folder / "held.jsonl", chats(2))
    data = load_chats([str(write_lines(folder / "chats.jsonl", values))], [str(held)])
    return data.train, ChatEncoder(Tokenizer(str(folder / "tokenizer")))


def rows_of(folder: Path, packing: Packing, length: int = 128) -> tuple[ChatRows, Survey]:
    lines, encoder = opened(folder, chats(24))
    found = survey(lines, encoder, length, ALONE)
    return ChatRows(lines, encoder, found, length, packing), found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_document_has_the_logits_that_it_has_alone(
    tmp_path: Path, group: None, attention: str
) -> None:
    lines, encoder = opened(tmp_path, chats(24))
    found = survey(lines, encoder, 128, ALONE)
    rows = ChatRows(lines, encoder, found, 128, Packing.PACKED)
    model = make_model(320, attn_implementation=attention, use_cache=False).eval()
    documents = 0
    for row in range(2):
        batch = rows.batch([row])
        assert batch.positions is not None
        with torch.no_grad():
            packed = model(input_ids=batch.tokens, position_ids=batch.positions).logits[0]
        starts = (batch.positions[0] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], 128], strict=True):
            with torch.no_grad():
                alone = model(input_ids=batch.tokens[:, start:end]).logits[0]
            torch.testing.assert_close(packed[start:end], alone, rtol=1e-4, atol=1e-5)
            documents += 1
    assert documents > 3


@pytest.mark.parametrize("packing", list(Packing))
def test_rows_hold_each_document_once_with_its_targets(
    tmp_path: Path, group: None, packing: Packing
) -> None:
    rows, found = rows_of(tmp_path, packing)
    lengths, targets = list[int](), 0
    for row in range(len(rows)):
        batch = rows.batch([row])
        targets += batch.target_count
        if batch.positions is None:
            lengths.append(int((batch.tokens[0] != 2).sum()))
            continue
        starts = (batch.positions[0] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], 128], strict=True):
            if batch.tokens[0, start] != 2:
                lengths.append(end - start)
                taken = batch.tokens[0, start + 1 : end]
                wanted = batch.targets[0, start : end - 1]
                assert ((wanted == taken) | (wanted == IGNORED)).all()
                assert batch.targets[0, end - 1] == IGNORED, "no document predicts the next one"
    assert sorted(lengths) == sorted(found.lengths)
    assert targets > 0
    assert packing is Packing.PADDED or len(rows) < len(found.lengths)


def test_padded_rows_are_as_long_as_the_longest_of_their_batch(tmp_path: Path, group: None) -> None:
    rows, found = rows_of(tmp_path, Packing.PADDED)
    short = [i for i, length in enumerate(found.lengths) if length <= 64]
    long = [i for i, length in enumerate(found.lengths) if length > 64]
    assert rows.batch(short[:2]).tokens.shape == (2, 64)
    assert rows.batch([short[0], long[0]]).tokens.shape == (2, 128)
    assert rows.batch([None]).target_count == 0


def test_an_epoch_takes_each_row_once_and_the_seed_decides_the_order(
    tmp_path: Path, group: None
) -> None:
    rows, _ = rows_of(tmp_path, Packing.PADDED)
    count = len(rows)
    whole = rows.batch(range(count)).targets
    one, other = (Shuffled(count, seed, rows.drawn).batch(0, count).targets for seed in (0, 1))
    assert sorted(one.tolist()) == sorted(whole.tolist())
    assert one.tolist() != other.tolist()
    part = Shuffled(count, 0, rows.drawn).batch(3, 2).targets
    assert part.tolist() == one[3:5, : part.shape[1]].tolist(), "from the position alone"


def test_what_is_cut_and_left_out_is_counted(tmp_path: Path, group: None) -> None:
    values = [
        {"prompt": "1 2", "completion": " 3 4"},
        {"prompt": "1", "completion": " 2" * 20},
        {"prompt": "1 " * 20, "completion": " 2"},
    ]
    lines, encoder = opened(tmp_path, values)
    long = [len(encoder.documents(lines.read(i), "")[0].tokens) for i in (1, 2)]
    found = survey(lines, encoder, 16, ALONE)
    assert (found.truncated, found.dropped) == (2, 1)
    assert found.lost == sum(long) - 2 * 16
    assert list(found.lines) == [0, 1]
    assert found.notes(16) == (
        f"2 were cut to --seq-length 16 and lost {found.lost} tokens; "
        "1 had nothing to train on within it and were left out"
    )
    assert survey(lines, encoder, 100, ALONE).notes(100) == ""
    with pytest.raises(OptionError, match="nothing of the assistant within --seq-length 16"):
        survey(lines.of([2]), encoder, 16, ALONE)


def test_chats_that_become_several_documents_are_counted(tmp_path: Path, group: None) -> None:
    turns = [{"role": role, "content": "1"} for role in ("user", "assistant") * 3]
    lines, encoder = opened(tmp_path, [{"messages": turns}], template=FORGETTING)
    found = survey(lines, encoder, 128, ALONE)
    assert (list(found.lines), list(found.parts)) == ([0, 0, 0], [0, 1, 2])
    assert found.notes(128) == "1 became a document per turn, as the chat template asks for"
    rows = ChatRows(lines, encoder, found, 128, Packing.PADDED)
    assert len({tuple(rows.batch([row]).tokens[0].tolist()) for row in range(3)}) == 3


def refused(rank: int, world_size: int, folder: Path) -> str:
    """A chat whose template fails is on rank 1 alone."""
    lines, encoder = opened(
        folder / str(rank), [*chats(9)[:-1], {"prompt": "a", "completion": "b"}]
    )
    documents = encoder.documents

    def failing(chat: Any, where: str) -> Any:
        if where.endswith("line 9"):
            raise ChatError(f"{where}: found something odd")
        return documents(chat, where)

    encoder.documents = failing  # type: ignore[method-assign]
    try:
        survey(lines, encoder, 128, World(rank, world_size, rank, world_size))
    except UserError as error:
        return str(error).rpartition("/")[2]
    return "nothing"


def test_a_bad_line_on_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    expected = "chats.jsonl, line 9: found something odd"
    assert ranks(refused, 2, tmp_path) == [expected, expected]


def surveyed(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    (folder / str(rank)).mkdir(exist_ok=True)
    lines, encoder = opened(folder / str(rank), chats(11))
    found = survey(lines, encoder, 32, World(rank, world_size, rank, world_size))
    counts = [found.split, found.truncated, found.lost, found.dropped]
    return [list(found.lines), list(found.parts), list(found.lengths), counts]


def test_ranks_divide_the_lines_and_find_the_same(ranks: Ranks, tmp_path: Path) -> None:
    [alone] = ranks(surveyed, 1, tmp_path)
    assert ranks(surveyed, 3, tmp_path) == [alone] * 3


def test_documents_that_change_under_a_training_are_noticed(tmp_path: Path, group: None) -> None:
    lines, encoder = opened(tmp_path, chats(24))
    rows = ChatRows(lines, encoder, survey(lines, encoder, 128, ALONE), 128, Packing.PADDED)
    path = lines.paths[0]
    text = path.read_text()
    path.write_text(text.replace("scatter", "1 1 1 1"))
    with pytest.raises(UserError, match="found other tokens than when the training began"):
        rows.batch(range(len(rows)))


# -- which models may be packed --------------------------------------------------------------------


def small(model_type: str, **settings: Any) -> nn.Module:
    config = AutoConfig.for_model(model_type, vocab_size=64, use_cache=False, **settings)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def test_models_that_keep_documents_apart_may_be_packed() -> None:
    for model in (
        make_model(64, use_cache=False),
        make_model(64, use_cache=False).bfloat16(),
        small("gpt2", n_embd=16, n_layer=2, n_head=2),
    ):
        check_apart(model, 64, "ours", CPU)
        assert model.training


class _Odd(nn.Module):
    """Has some logits that are no finite number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner, self.value = make_model(64, use_cache=False), value

    def forward(self, **inputs: torch.Tensor) -> Any:
        found = self.inner(**inputs)
        found.logits[..., -1] = self.value
        return found


def test_logits_of_nan_are_not_the_same_and_those_that_are_masked_are() -> None:
    check_apart(_Odd(-math.inf), 64, "ours", CPU)
    with pytest.raises(OptionError, match="packed with ours, whose logits are NaN"):
        check_apart(_Odd(math.nan), 64, "ours", CPU)


def test_models_that_do_not_are_refused() -> None:
    mamba = small("mamba", hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(OptionError, match=r"packed with ours, .*expected --packing padded"):
        check_apart(mamba, 64, "ours", CPU)

    class Global(nn.Module):
        """Each token sees the mean of all tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 64)

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
            found = self.embedding(input_ids)
            return SimpleNamespace(logits=found + found.mean(1, keepdim=True))

    with pytest.raises(OptionError, match="in which a document of a row changes another one"):
        check_apart(Global(), 64, "ours", CPU)


def test_a_cache_is_no_way_across(tmp_path: Path, group: None) -> None:
    """With a cache, transformers would make no mask between documents."""
    model = make_model(320, use_cache=True)
    with pytest.raises(OptionError, match="in which a document of a row changes another one"):
        check_apart(model, 320, "ours", CPU)


def test_the_loss_is_the_sum_over_targets(tmp_path: Path, group: None) -> None:
    rows, _ = rows_of(tmp_path, Packing.PACKED)
    batch, model = rows.batch([0, 1]), make_model(320, use_cache=False)
    logits = model(input_ids=batch.tokens, position_ids=batch.positions).logits
    chosen = batch.targets != IGNORED
    odds = logits.log_softmax(-1)[chosen].gather(1, batch.targets[chosen][:, None])
    assert int(chosen.sum()) == batch.target_count
    for how in (Logits.WHOLE, Logits.CHUNKS):
        found = target_loss(model, batch, TokenLoss(how))
        torch.testing.assert_close(found, -odds.sum(), rtol=1e-5, atol=1e-4)
