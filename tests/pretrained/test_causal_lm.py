"""The loss of models of transformers without whole logits, or a refusal that names the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import checkpoint_module
from shardwise.frontends.cross_entropy import WholeLogitsError
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import Logits
from shardwise.insight.token_loss import DIVIDED_FROM, TokenLoss
from shardwise.pretrained import causal_lm_loss

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 59, "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


def _model(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **settings})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _tokens() -> Tensor:
    return torch.randint(59, (2, 13), generator=torch.Generator().manual_seed(0))


def _whole(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _results(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
        ("phi", {}),  # whose head has a bias
        ("gemma2", {"final_logit_softcapping": None}),
    ],
)
def test_it_is_that_of_whole_logits(kind: str, settings: dict[str, Any]) -> None:
    model, tokens = _model(kind, **settings), _tokens()
    wanted = _results(model, _whole(model, tokens))
    found = _results(model, causal_lm_loss(model, tokens[:, 1:], input_ids=tokens[:, :-1]))
    torch.testing.assert_close(found, wanted)
    assert copy.deepcopy(model)(input_ids=tokens).logits.shape == (2, 13, 59)


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite"])
def test_models_that_change_their_logits_are_refused_and_named(kind: str) -> None:
    model, tokens = _model(kind), _tokens()
    with pytest.raises(WholeLogitsError, match=f"{type(model).__name__}: found other logits"):
        causal_lm_loss(model, tokens[:, 1:], input_ids=tokens[:, :-1])
    assert _whole(model, tokens).isfinite()


class _Changing(nn.Module):
    """Calls its head, and does with the logits what it is told."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.head, self.change = nn.Linear(4, 7), change

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Any:
        return transformers.modeling_outputs.CausalLMOutput(logits=self.change(self.head, x))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda head, x: head(x).mul_(2), "other logits"),
        (lambda head, x: head(x) + 0, "other logits"),
        (lambda head, x: head(x)[:, -1:], "IndexError: "),
        (lambda head, x: head(head(x) * 0 + x), "2 calls of its head"),
        (lambda head, x: x, "0 calls of its head"),
    ],
)
def test_whatever_a_model_does_with_its_logits_is_found(change: Any, found: str) -> None:
    model = _Changing(change)
    with pytest.raises(WholeLogitsError, match=f"_Changing: found {found}"):
        causal_lm_loss(model, torch.zeros(2, 3, dtype=torch.long), x=torch.ones(2, 3, 4))
    assert model.head(torch.ones(2, 4)).shape == (2, 7)


def test_a_head_in_a_checkpoint_of_the_model_is_refused_before_backward() -> None:
    """Backward would compute its logits again, without a loss."""
    model, tokens = _model("llama"), _tokens()
    given = {"input_ids": tokens[:, :-1]}
    loss = checkpoint(causal_lm_loss, model, tokens[:, 1:], use_reentrant=False, **given)
    wanted = _results(model, _whole(model, tokens))
    torch.testing.assert_close(_results(model, loss), wanted)
    checkpoint_module(model)
    with pytest.raises(WholeLogitsError, match="head: found it called in a checkpoint"):
        causal_lm_loss(model, tokens[:, 1:], **given)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by an old name
def test_models_without_a_plain_head_are_refused() -> None:
    with pytest.raises(WholeLogitsError, match="head: found none"):
        causal_lm_loss(nn.Linear(1, 1), torch.zeros(1, 1, dtype=torch.long))
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(_model("llama"), lora)
    with pytest.raises(WholeLogitsError, match=r"head: found peft\S+\.Linear, expected"):
        causal_lm_loss(model, _tokens()[:, 1:], input_ids=_tokens()[:, :-1])


def test_an_error_of_the_model_is_its_own_and_leaves_the_head_as_it_was() -> None:
    model, tokens = _model("llama"), _tokens()
    with pytest.raises(IndexError):
        causal_lm_loss(model, tokens[:, 1:], input_ids=tokens[:, :-1] + 59)
    assert _whole(model, tokens).isfinite()


def test_a_training_divides_logits_where_they_take_memory_and_says_where_it_cannot() -> None:
    tokens, said = _tokens(), list[str]()
    inputs = {"targets": tokens[:, 1:], "input_ids": tokens[:, :-1]}
    llama, gemma = _model("llama"), _model("gemma2")
    wanted = _whole(gemma, tokens)
    assert DIVIDED_FROM > 4 * 24 * 59
    shapes: list[int] = []
    llama.lm_head.register_forward_hook(lambda *call: shapes.append(call[2].ndim))
    for logits in Logits:
        TokenLoss(logits)(llama, **inputs)
    assert shapes == [3, 3, 0]
    with pytest.raises(OptionError, match="--logits: found chunks for Gemma2ForCausalLM: found"):
        TokenLoss(Logits.CHUNKS)(gemma, **inputs)
    loss = TokenLoss(Logits.AUTO, said.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.insight.token_loss.DIVIDED_FROM", 1)
        for _ in range(2):
            torch.testing.assert_close(loss(gemma, **inputs), wanted)
        loss(llama, **inputs)
    assert shapes == [3, 3, 0, 3], "one model cannot, so none is tried again"
    TokenLoss(Logits.AUTO, tokens=DIVIDED_FROM)(llama, **inputs)
    assert shapes.pop() == 0, "ranks whose batches are small divide, too"
    [line] = said
    assert line.startswith("logits     whole, since chunks do not fit: Gemma2ForCausalLM: found")
