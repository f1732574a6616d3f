"""Which tokens of a chat are trained on, for templates of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.text.chat import (
    IGNORED,
    Chat,
    ChatEncoder,
    ChatError,
    Completion,
    MaskedTokens,
)
from shardwise.app.recipes.text.data import Tokenizer
from shardwise.base.errors import UserError
from shardwise.insight.schema.option import OptionError
from tests.recipes.text.published import FORGETTING, MARKED, PLAIN, make_tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TWO_TURNS = (user("rank 1?"), answer("mesh\n\n2"), user("add 3"), answer("is é 4"))


def encoder(template: str | None, **changes: Any) -> tuple[ChatEncoder, Any]:
    made = make_tokenizer(template)
    for name, value in changes.items():
        setattr(made, name, value)
    held = Tokenizer.__new__(Tokenizer)  # without loading it from a folder
    held.name, held.option, held.tokenizer, held.separator = "ours", "--from", made, 0
    held.used = len(made)
    return ChatEncoder(held), made


def trained_text(document: MaskedTokens, tokenizer: Any) -> list[str]:
    """The texts that are trained on, one for each uninterrupted part."""
    parts, before = list[list[int]](), False
    for token, trained in zip(document.tokens, document.trained, strict=True):
        if trained and not before:
            parts.append([])
        if trained:
            parts[-1].append(token)
        before = trained
    return [tokenizer.decode(part) for part in parts]


def test_a_template_without_marks_trains_on_what_follows_its_generation_prompt() -> None:
    encode, tokenizer = encoder(PLAIN)
    [document] = encode.documents(Chat(TWO_TURNS, (1, 3)), "here")
    assert trained_text(document, tokenizer) == ["mesh\n\n2<|end|>\n", "is é 4<|end|>\n"]
    whole = tokenizer.apply_chat_template(list(TWO_TURNS), tokenize=True, return_dict=False)
    assert document.tokens == whole, "tokenized as for inference"


def test_a_template_with_marks_trains_on_what_it_marks() -> None:
    encode, tokenizer = encoder(MARKED)
    [document] = encode.documents(Chat(TWO_TURNS, (1, 3)), "here")
    assert trained_text(document, tokenizer) == ["mesh\n\n2<|end|>", "is é 4<|end|>"]
    [last] = encode.documents(Chat(TWO_TURNS, (3,)), "here")
    assert trained_text(last, tokenizer) == ["is é 4<|end|>"]
    theirs = tokenizer.apply_chat_template(
        list(TWO_TURNS), return_dict=True, return_assistant_tokens_mask=True
    )
    assert document.tokens == theirs["input_ids"]
    assert [int(each) for each in document.trained] == theirs["assistant_masks"]


def test_a_template_that_writes_history_in_another_way_gives_a_document_for_each_turn() -> None:
    encode, tokenizer = encoder(FORGETTING)
    first, second = encode.documents(Chat(TWO_TURNS, (1, 3)), "here")
    assert trained_text(first, tokenizer) == ["<think></think>mesh\n\n2<|end|>\n"]
    assert trained_text(second, tokenizer) == ["<think></think>is é 4<|end|>\n"]
    assert "<think></think>mesh" not in tokenizer.decode(second.tokens)
    [only] = encode.documents(Chat(TWO_TURNS[:2], (1,)), "here")
    assert only == first


def test_a_template_whose_answers_cannot_be_told_apart_is_refused() -> None:
    encode, _ = encoder(
        "{% for m in messages %}<|start|>{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>model:{% endif %}"
    )
    with pytest.raises(ChatError) as refused:
        encode.documents(Chat(TWO_TURNS, (1, 3)), "chats.jsonl, line 3")
    assert str(refused.value).startswith("chats.jsonl, line 3: found no beginning of message 2")
    assert "'model:'" in str(refused.value) and "'assistant:mesh" in str(refused.value)


def test_a_chat_that_begins_with_the_assistant_needs_marks() -> None:
    chat = Chat((answer("mesh"), user("1")), (0,))
    encode, _ = encoder(PLAIN)
    with pytest.raises(ChatError, match="line 3: found a chat that begins with the assistant"):
        encode.documents(chat, "line 3")
    encode, tokenizer = encoder(MARKED)
    [document] = encode.documents(chat, "line 3")
    assert trained_text(document, tokenizer) == ["mesh<|end|>"]


def test_what_a_template_raises_is_an_error_of_the_line() -> None:
    encode, _ = encoder("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatError, match=r"line 3: ours cannot encode it \(.*roles must alternate"):
        encode.documents(Chat(TWO_TURNS, (1,)), "line 3")


def test_no_chat_template_is_an_error_for_messages_only() -> None:
    encode, _ = encoder(None)
    with pytest.raises(OptionError, match="--from: found ours without a chat template"):
        encode.documents(Chat(TWO_TURNS, (1,)), "line 3")
    assert encode.documents(Completion("1", " 2"), "line 3")


def test_a_completion_is_trained_on_to_its_end_token() -> None:
    encode, tokenizer = encoder(PLAIN)
    [document] = encode.documents(Completion("rank 1", " mesh 2"), "here")
    assert trained_text(document, tokenizer) == [" mesh 2<|end|>"]
    assert document.tokens == [*tokenizer("rank 1 mesh 2")["input_ids"], 0]
    [alone] = encode.documents(Completion("", "mesh"), "here")
    assert trained_text(alone, tokenizer) == ["mesh<|end|>"]


def test_special_tokens_that_a_tokenizer_adds_are_not_trained_on() -> None:
    from tokenizers import processors

    encode, tokenizer = encoder(PLAIN)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 1), ("<|end|>", 0)]
    )
    [document] = encode.documents(Completion("1", " 2"), "here")
    assert document.tokens[0] == 1
    assert (document.tokens[-1], document.tokens.count(0)) == (0, 1), "once, though both add it"
    assert trained_text(document, tokenizer) == [" 2<|end|>"]


def test_special_tokens_that_the_model_has_no_rows_for_are_told_and_refused_in_texts(
    tmp_path: Path,
) -> None:
    made = make_tokenizer()
    rows = len(made)
    made.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    made.save_pretrained(tmp_path)
    held = Tokenizer(str(tmp_path), "--from")
    assert held.fit(rows + 8) == ""
    assert held.fit(rows) == (
        f"a tokenizer of {rows + 1} tokens ({tmp_path}) for a model of {rows}: texts with "
        "<|image|> are refused"
    )
    assert held.encode("rank 1")
    with pytest.raises(UserError, match=rf"--from: found token {rows} \(<\|image\|>\) in a text"):
        held.encode("rank <|image|>")
    with pytest.raises(ChatError, match=rf"line 3: --from: found token {rows}"):
        ChatEncoder(held).documents(Completion("<|image|>", "1"), "line 3")
    with pytest.raises(OptionError, match=f"a tokenizer of .* for a model of {rows - 1}, expected"):
        Tokenizer(str(tmp_path), "--from").fit(rows - 1)


def test_targets_are_the_next_tokens_where_these_are_trained_on() -> None:
    document = MaskedTokens([5, 6, 7, 8], [True, False, True, True])
    assert document.targets() == [IGNORED, 7, 8, IGNORED]
    assert document.target_count == 2
    assert document.cut(3).targets() == [IGNORED, 7, IGNORED]


def test_a_tokenizer_that_knows_no_characters_is_refused() -> None:
    held = Tokenizer.__new__(Tokenizer)
    held.name, held.option, held.tokenizer, held.separator = "slow", "--tokenizer", _Slow(), 0
    with pytest.raises(OptionError, match=r"--tokenizer: found slow, which does not report"):
        ChatEncoder(held)


class _Slow:
    is_fast = False


def test_a_content_in_parts_needs_a_template_that_takes_them_apart() -> None:
    parts = Chat((user("rank?"), {"role": "assistant", "content": [{"text": "mesh"}]}), (1,))
    encode, _ = encoder(PLAIN)
    with pytest.raises(
        ChatError, match=r"^here, message 2: found \"content\" a list, expected a t"
    ):
        encode.documents(parts, "here")
    apart = PLAIN.replace("m['content']", "m.content if m.content is string else m.content[0].text")
    encode, tokenizer = encoder(apart)
    [document] = encode.documents(parts, "here")
    assert trained_text(document, tokenizer) == ["mesh<|end|>\n"]
