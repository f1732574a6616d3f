"""Which lines of chat files are used, which are refused with what reason, and what is held out."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.text.chat import Chat, ChatError, Completion, load_chats, parse_chat
from shardwise.insight.schema.option import OptionError
from tests.recipes.text.published import chats, write_lines

USER = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


def parsed(value: Any) -> Chat | Completion:
    return parse_chat(json.dumps(value).encode(), "here")


def test_messages_of_the_assistant_are_trained_on_unless_their_weight_is_zero() -> None:
    system = {"role": "system", "content": "Be short."}
    assert parsed({"messages": [system, USER, ANSWER, USER, ANSWER], "id": 7}) == Chat(
        (system, USER, ANSWER, USER, ANSWER), (2, 4)
    )
    weighted = {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]}
    assert parsed(weighted) == Chat((USER, ANSWER, USER, ANSWER), (3,))
    tools = [{"type": "function", "function": {"name": "add"}}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}
    assert parsed({"messages": [USER, called], "tools": tools}) == Chat((USER, called), (1,), tools)


def test_a_completion_is_text_or_messages_of_which_only_the_second_part_is_trained_on() -> None:
    assert parsed({"prompt": "2 + 2 =", "completion": " 4"}) == Completion("2 + 2 =", " 4")
    assert parsed({"prompt": "", "completion": "4"}) == Completion("", "4")
    both = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    assert parsed(both) == Chat((USER, ANSWER, USER, ANSWER), (3,))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "found a number, expected an object"),
        ({"text": "a", "id": 1}, "found 'id', 'text', expected \"messages\", "),
        ({"messages": []}, 'found "messages" an empty list, expected a list of messages'),
        ({"messages": "hello"}, 'found "messages" a text, expected a list'),
        ({"messages": [USER, 3]}, 'here, message 2 of "messages": found a number, expected an obj'),
        ({"messages": [{"content": "x"}]}, 'message 1 of "messages": found "role" nothing'),
        ({"messages": [{"role": "user"}]}, 'found "content" nothing, expected a text'),
        ({"messages": [USER]}, "found no message of the assistant to train on"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no message of the assistant to train on"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, 'found "weight" 0.5, expected 0 or 1'),
        ({"messages": [USER, ANSWER], "tools": "add"}, 'found "tools" a text, expected a list'),
        ({"prompt": "a", "completion": ""}, 'found an empty "completion"'),
        ({"prompt": "a", "completion": [ANSWER]}, 'found "prompt" a text, "completion" a list'),
        ({"prompt": "a"}, "found 'prompt', expected \"messages\", "),
        ({"conversations": [{"from": "narrator"}]}, "found 'narrator' as who speaks, expected one"),
        ({"conversations": [USER, 3]}, 'message 2 of "conversations": found a number as who'),
    ],
)
def test_a_line_in_no_known_form_is_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(ChatError) as refused:
        parsed(value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        (
            {"conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "4"}]},
            [("user", "2?"), ("assistant", "4")],
        ),
        (
            {"conversations": [USER, ANSWER], "system": "Count."},
            [("system", "Count."), *((m["role"], m["content"]) for m in (USER, ANSWER))],
        ),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            [("user", "Add.\n1, 2"), ("assistant", "3")],
        ),
        ({"instruction": "Go.", "input": "", "output": ""}, [("user", "Go."), ("assistant", "")]),
    ],
)
def test_chats_of_sharegpt_and_alpaca_are_messages(value: Any, messages: Any) -> None:
    chat = parsed(value)
    assert isinstance(chat, Chat)
    assert [(m["role"], m["content"]) for m in chat.messages] == messages
    assert chat.trained == (len(messages) - 1,)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_may_be_one_list(tmp_path: Path, indent: int | None) -> None:
    """As files of Alpaca and of ShareGPT usually are."""
    values = [{"instruction": f"é{n}", "output": "ü" * n} for n in range(40)]
    path = tmp_path / "alpaca.json"
    path.write_text("\ufeff \n" + json.dumps(values, ensure_ascii=False, indent=indent))
    data = load_chats([str(path)])
    parts = (data.train, data.validation)
    read = [part.read(i) for part in parts for i in range(len(part))]
    answers = [c.messages[1]["content"] for c in read if isinstance(c, Chat)]
    assert sorted(map(len, answers)) == list(range(40))
    path.write_text(json.dumps([*values, {"from": 1}], indent=0))
    with pytest.raises(ChatError, match=r"alpaca.json, line 162: found 'from', expected"):
        load_chats([str(path)])


@pytest.mark.parametrize("text", ["[{}", '[{"a": 1} 2]', "[{]", "[" * 100_000])
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ChatError, match=r"a.json, line 1: "):
        load_chats([str(tmp_path / "a.json")])


@pytest.mark.parametrize(
    "line",
    [
        b'{"messages": [',
        b'{"prompt": "\xff", "completion": "x"}',
        b'{"prompt": "a", "prompt": "b", "completion": "x"}',
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": NaN, "completion": "x"}',
    ],
)
def test_hostile_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ChatError, match=r"^here"):
        parse_chat(line, "here")


def test_errors_name_file_and_line_counting_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    good = json.dumps({"messages": [USER, ANSWER]})
    path.write_bytes(b"\xef\xbb\xbf" + f"{good}\r\n\n{good}\n[1]\n".encode())
    with pytest.raises(ChatError) as refused:
        load_chats([str(path)])
    assert str(refused.value).startswith(f"--chat: {path}, line 4: found a list, expected an")


@pytest.mark.parametrize(
    ("data", "line", "name"),
    [
        (b'{"prompt": "a", "completion": "b"}\n' * 2, 3, "UTF-8"),
        ('\ufeff{"prompt": "a", "completion": "b"}\n'.encode("utf-16-le"), 1, "UTF-16"),
        ('\ufeff{"prompt": "a", "completion": "b"}\n'.encode("utf-16-be"), 1, "UTF-16"),
    ],
    ids=["behind another file", "little endian", "big endian"],
)
def test_a_byte_order_mark_is_named(tmp_path: Path, data: bytes, line: int, name: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(data + (codecs.BOM_UTF8 + data if name == "UTF-8" else b""))
    expected = f"{path}, line {line}: found a byte order mark of {name} in front of it"
    with pytest.raises(ChatError, match=re.escape(expected)):
        load_chats([str(path)])


def test_lines_are_read_again_from_where_they_lie(tmp_path: Path) -> None:
    values = [{"prompt": f"é{number}", "completion": "ü" * number} for number in range(1, 40)]
    text = "\ufeff" + "\n\n".join(json.dumps(each, ensure_ascii=False) for each in values)
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    data = load_chats([str(path)])
    read = [
        part.read(index) for part in (data.train, data.validation) for index in range(len(part))
    ]
    assert sorted(len(each.completion) for each in read if isinstance(each, Completion)) == list(
        range(1, 40)
    )
    assert data.train.where(1).endswith(", line 3")


def test_one_chat_in_20_is_held_out_by_its_text_alone(tmp_path: Path) -> None:
    lines = chats(100)
    one = load_chats([str(write_lines(tmp_path / "one.jsonl", lines))])
    assert (len(one.train), len(one.validation)) == (95, 5)
    # In another order, and in two files.
    write_lines(tmp_path / "a.jsonl", lines[:30:-1])
    write_lines(tmp_path / "b.jsonl", lines[30::-1])
    two = load_chats([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    held = [
        {str(data.validation.read(i)) for i in range(len(data.validation))} for data in (one, two)
    ]
    assert held[0] == held[1]
    assert one.fingerprint != two.fingerprint


def test_copies_of_a_chat_are_all_on_one_side(tmp_path: Path) -> None:
    data = load_chats([str(write_lines(tmp_path / "twice.jsonl", chats(40) * 3))])
    train = {str(data.train.read(i)) for i in range(len(data.train))}
    held = {str(data.validation.read(i)) for i in range(len(data.validation))}
    assert train.isdisjoint(held)
    with pytest.raises(OptionError, match="of which all are held out, expected at least two"):
        load_chats([str(write_lines(tmp_path / "same.jsonl", chats(1) * 3))])


def test_files_to_evaluate_on_are_not_held_out_of_the_others(tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "chats.jsonl", chats(30)))
    held = write_lines(tmp_path / "held.jsonl", chats(7, seed=1))
    data = load_chats([path], [str(held)])
    assert (len(data.train), len(data.validation)) == (30, 7)
    held.write_text("{}\n")
    with pytest.raises(ChatError, match=r"--eval-data: .*held.jsonl, line 1: found no fields"):
        load_chats([path], [str(held)])


def test_files_that_are_no_chat_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--chat: found nothing at"):
        load_chats([str(tmp_path / "missing.jsonl")])
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(OptionError, match="--chat: found no chats in"):
        load_chats([str(tmp_path / "blank.jsonl")])
    (tmp_path / "chats.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(OptionError, match="which is compressed, expected an uncompressed"):
        load_chats([str(tmp_path / "chats.jsonl.gz")])


def test_a_file_that_changes_under_a_training_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", chats(30))
    data = load_chats([str(path)])
    path.write_text("x" * path.stat().st_size)
    with pytest.raises(ChatError, match=r"--chat: .*chats.jsonl, line 1: is not valid JSON"):
        data.train.read(0)
