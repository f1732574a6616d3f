"""Chat files: their lines, what each says, and which of its tokens are trained on. No torch here.

A chat file has one JSON object per line, or is one list of them. Each is in one of these forms;
other fields are ignored:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"prompt": "a text", "completion": "how it goes on"}
    {"prompt": [messages], "completion": [messages]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}   ShareGPT
    {"instruction": "a text", "input": "more of it, or nothing", "output": ...}           Alpaca

The assistant's messages are trained on, but not those with ``"weight": 0`` (OpenAI's format).
``"tools"`` beside ``"messages"`` is given to the chat template.

Every line is checked before a training starts. Then only places of lines are in memory.

A chat is rendered by the tokenizer's chat template and tokenized once, as for inference. Which part
of the text is the assistant's, the template says itself (``{% generation %}``), or it is found from
what the template makes of fewer messages:

    messages[:1] and a generation prompt   <user>2 + 2?<end><assistant>
    messages[:2]                           <user>2 + 2?<end><assistant>4<end>
    all messages                           <user>2 + 2?<end><assistant>4<end><user>Thanks<end>
                                                                       ^^^^^^ trained on

Each of them has to be the beginning of the next. Some templates write earlier turns in another way
than the last one: they leave out its reasoning. Such a chat becomes a document for each turn that
is trained on, with the turns before it, just as the model meets them at inference.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shardwise.app.recipes.text.data import VALIDATION_SHARE, Tokenizer, find_files, read_bytes
from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.progress import progress
from shardwise.base.strict import parse
from shardwise.base.units import counted, one_line
from shardwise.insight.schema.option import OptionError
from shardwise.pretrained.opening import limited

ASSISTANT = "assistant"
HELD_OUT_AT_MOST = 512  # chats: an evaluation should take less time than the steps between two
_LONGEST_LINE = 1 << 26  # bytes: far above any context; a file without line ends is no chat file
_LARGEST_LIST = 1 << 30  # bytes of a file that is one list: it is read as a whole
_BEGINNING = 1 << 10  # bytes that tell a list from lines
_COMPRESSED = frozenset({".gz", ".zst", ".bz2", ".xz", ".zip"})


class ChatError(UserError):
    """A line of a chat file that cannot be used; the message names file, line and reason."""


@dataclass(frozen=True)
class Chat:
    """Messages for a chat template.

    Attributes:
        messages: as in the file, each with a ``role``.
        trained: numbers of the messages to train on, ascending; at least one.
        tools: for the template; None: none given.
    """

    messages: tuple[dict[str, Any], ...]
    trained: tuple[int, ...]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Completion:
    """A text, and how it goes on. No template is used.

    Attributes:
        prompt: only read; may be empty.
        completion: trained on, with the end-of-text token after it.
    """

    prompt: str
    completion: str


def parse_chat(line: bytes, where: str) -> Chat | Completion:
    """Return what a line of a chat file says.

    Args:
        line: the line.
        where: option, file and line, for errors.

    Raises:
        ChatError: it is in none of the forms.
    """
    try:
        value = parse(line, where)
    except CheckpointError as error:
        raise ChatError(str(error)) from None
    if not isinstance(value, dict):
        raise _wrong(where, _kind(value), f"an object with {_FORMS}")
    value = _in_messages(value, where)
    if "messages" in value:
        messages = _messages(value["messages"], "messages", where)
        return _chat(messages, 0, value.get("tools"), where)
    if "prompt" not in value or "completion" not in value:
        found = ", ".join(sorted(map(repr, value))[:10]) or "no fields"
        raise _wrong(where, found, _FORMS)
    prompt, completion = value["prompt"], value["completion"]
    match prompt, completion:
        case str(), str():
            if not completion:
                raise _wrong(where, 'an empty "completion"', "a text to train on")
            return Completion(prompt, completion)
        case list(), list():
            given = _messages(prompt, "prompt", where)
            messages = given + _messages(completion, "completion", where)
            return _chat(messages, len(given), value.get("tools"), where)
    found = f'"prompt" {_kind(prompt)}, "completion" {_kind(completion)}'
    raise _wrong(where, found, "two texts, or two lists of messages")


_FORMS = (
    '"messages", "prompt" and "completion", "conversations" (ShareGPT), or "instruction" and '
    '"output" (Alpaca)'
)
_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT} | {
    role: role for role in ("user", ASSISTANT, "system")
}


def _in_messages(value: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a chat of ShareGPT or of Alpaca with messages; any other as it is.

    An instruction and its input become one message. Alpaca's own words around them are left out:
    a chat template has others.
    """
    if "messages" in value:
        return value
    system = value.get("system")
    first = [{"role": "system", "content": system}] if system else []
    turns = value.get("conversations")
    if isinstance(turns, list):
        for number, turn in enumerate(turns, start=1):
            if not isinstance(turn, dict) or (
                "role" not in turn and turn.get("from") not in _ROLES
            ):
                found = repr(turn.get("from"))[:80] if isinstance(turn, dict) else _kind(turn)
                place = f'{where}, message {number} of "conversations"'
                raise _wrong(place, f"{found} as who speaks", f"one of {', '.join(_ROLES)}")
        named = [
            turn if "role" in turn else {"role": _ROLES[turn["from"]], "content": turn.get("value")}
            for turn in turns
        ]
        return {**value, "messages": first + named}
    if isinstance(value.get("instruction"), str) and "output" in value:
        asked = "\n".join(filter(None, [value["instruction"], str(value.get("input") or "")]))
        answer = {"role": ASSISTANT, "content": value["output"]}
        return {**value, "messages": [*first, {"role": "user", "content": asked}, answer]}
    return value


def _messages(value: Any, name: str, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else _kind(value)
        raise _wrong(where, f'"{name}" {found}', "a list of messages")
    for number, message in enumerate(value, start=1):
        place = f'{where}, message {number} of "{name}"'
        if not isinstance(message, dict):
            raise _wrong(place, _kind(message), 'an object with "role" and "content"')
        if not isinstance(message.get("role"), str):
            raise _wrong(place, f'"role" {_kind(message.get("role"))}', "a text, such as user")
        content = message.get("content")
        if not (isinstance(content, str | list) or (content is None and "tool_calls" in message)):
            raise _wrong(place, f'"content" {_kind(content)}', "a text")
        if message.get("weight") not in (None, 0, 1):
            raise _wrong(place, f'"weight" {message["weight"]!r}'[:80], "0 or 1")
    return tuple(value)


def _chat(messages: Sequence[dict[str, Any]], first: int, tools: Any, where: str) -> Chat:
    """Return a chat whose assistant's messages from ``first`` on are trained on."""
    if not isinstance(tools, list | None):
        raise _wrong(where, f'"tools" {_kind(tools)}', "a list")
    trained = tuple(
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == ASSISTANT and message.get("weight") != 0
    )
    if not trained:
        raise _wrong(where, "no message of the assistant to train on", "at least one")
    # A template would not know what a weight is.
    plain = tuple({k: v for k, v in message.items() if k != "weight"} for message in messages)
    return Chat(plain, trained, tools)


def _wrong(where: str, found: str, expected: str) -> ChatError:
    return ChatError(f"{where}: found {found}, expected {expected}")


_KINDS: Mapping[type, str] = {
    type(None): "nothing",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def _kind(value: Any) -> str:
    return _KINDS[type(value)]


class ChatLines:
    """Lines of chat files, of which each is read when it is needed.

    Args:
        option: what named the files, for errors.
        paths: the files.
    """

    def __init__(self, option: str, paths: Sequence[Path]) -> None:
        self.option = option
        self.paths = tuple(paths)
        # Four numbers of each line, as :meth:`add` gets them.
        self._places = array("q")

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._places) // 4

    def add(self, file: int, number: int, offset: int, size: int) -> None:
        """Add a line, by its file's number, its own number there (from 1), and where it lies."""
        self._places.extend((file, number, offset, size))

    def _place(self, index: int) -> array[int]:
        return self._places[4 * index : 4 * index + 4]

    def of(self, indices: Sequence[int]) -> ChatLines:
        """Return some of the lines."""
        some = ChatLines(self.option, self.paths)
        for i in indices:
            some.add(*self._place(i))
        return some

    def where(self, index: int) -> str:
        """Return option, file and line, for errors."""
        file, number, _, _ = self._place(index)
        return _where(self.option, self.paths[file], number)

    def read(self, index: int) -> Chat | Completion:
        """Return what a line says.

        Raises:
            ChatError: the file has changed since it was checked.
            UserError: the file cannot be read any more, or is shorter.
        """
        which, _, offset, size = self._place(index)
        line = read_bytes(self.paths[which], offset, size, self.option)
        return parse_chat(line, self.where(index))


def _where(option: str, path: Path, number: int) -> str:
    return f"{option}: {path}, line {number}"


@dataclass(frozen=True)
class ChatData:
    """Chats to train on, and others to evaluate on.

    Attributes:
        name: for people: where they come from.
        train: to train on.
        validation: not trained on.
        fingerprint: a text that changes when the files do.
    """

    name: str
    train: ChatLines
    validation: ChatLines
    fingerprint: str

    @property
    def summary(self) -> str:
        """For people: how much there is."""
        return f"{self.name}, {len(self.train):,} chats, {len(self.validation):,} for validation"

    def facts(self) -> dict[str, Any]:
        """Return the data's part of ``run.json``."""
        return {
            "name": self.name,
            "summary": self.summary,
            "files": len(self.train.paths),
            "training_chats": len(self.train),
            "validation_chats": len(self.validation),
            "fingerprint": self.fingerprint,
        }


def load_chats(paths: Sequence[str], eval_paths: Sequence[str] = ()) -> ChatData:
    """Find chat files, and check every line of them.

    Without files to evaluate on, one chat in 20 is held out, at most 512: those whose texts have
    the smallest hashes, so that the same chat is never on both sides.

    Args:
        paths: files, folders and patterns.
        eval_paths: the same, to evaluate on.

    Raises:
        ChatError: a line is in no known form.
        OptionError: nothing is there, or nothing is left to train on.
    """
    lines, hashes, digest = _scan("--chat", paths)
    name = ", ".join(paths)
    if eval_paths:
        held, _, held_digest = _scan("--eval-data", eval_paths)
        return ChatData(name, lines, held, f"{digest}-{held_digest}")
    count = min(max(1, len(lines) // VALIDATION_SHARE), HELD_OUT_AT_MOST)
    largest = sorted(hashes)[count - 1]
    train = lines.of([i for i, each in enumerate(hashes) if each > largest])
    held = lines.of([i for i, each in enumerate(hashes) if each <= largest])
    if not len(train):
        raise OptionError(
            "--chat",
            f"{counted(lines, 'chat')}, of which all are held out",
            "at least two different ones, or --eval-data with others",
        )
    return ChatData(name, train, held, digest)


def _scan(option: str, paths: Sequence[str]) -> tuple[ChatLines, array[int], str]:
    """Return the lines of files, the hash of each line, and one of all files."""
    files = find_files(paths, option)
    lines, hashes, digest = ChatLines(option, files), array("Q"), xxhash.xxh3_64()
    size = sum(path.stat().st_size for path in files)
    with progress(f"checking the chats of {', '.join(paths)}", size, "bytes") as work:
        for which, path in enumerate(files):
            if path.suffix in _COMPRESSED:
                found = f"{path}, which is compressed"
                raise OptionError(option, found, "an uncompressed .jsonl file")
            for number, offset, line in _lines_of(option, path):
                parse_chat(line, _where(option, path, number))
                lines.add(which, number, offset, len(line))
                hashes.append(xxhash.xxh3_64_intdigest(line.strip()))
                digest.update(line)
                work.moved(len(line))
    if not len(lines):
        raise OptionError(option, f"no chats in {', '.join(paths)}", "one JSON object per line")
    return lines, hashes, digest.hexdigest()


def _lines_of(option: str, path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, place and text of every line that is not blank."""
    try:
        with path.open("rb") as file:
            offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            file.seek(offset)
            if file.peek(_BEGINNING).lstrip()[:1] == b"[":
                yield from _elements(_where(option, path, 1), offset, file.read(_LARGEST_LIST + 1))
                return
            number = 0
            while line := file.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE:
                    where = _where(option, path, number)
                    raise _wrong(where, f"more than {_LONGEST_LINE:,} bytes", "one chat per line")
                mark = next((mark for mark in _MARKS if line.startswith(mark)), None)
                if mark is not None:
                    found = f"a byte order mark of {_MARKS[mark]} in front of it"
                    raise _wrong(_where(option, path, number), found, "UTF-8 without one")
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise OptionError(
            option, f"{path}, which cannot be read ({os.strerror(error.errno or 0)})", "a chat file"
        ) from None


def _elements(where: str, begin: int, content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the line, the place and the text of every element of a list."""
    if len(content) > _LARGEST_LIST:
        raise _wrong(where, f"a list of more than {_LARGEST_LIST:,} bytes", "one chat per line")
    text = content.decode("latin-1")  # a character for each byte, so that places are those of bytes
    decoder, number, before = json.JSONDecoder(), 1, 0
    at = _after_blanks(text, text.index("[") + 1)
    more = text[at : at + 1] != "]"
    try:
        while more:
            _, end = decoder.raw_decode(text, at)
            number, before = number + text.count("\n", before, at), at
            yield number, begin + at, content[at:end]
            end = _after_blanks(text, end)
            more = text[end : end + 1] == ","
            if not more and text[end : end + 1] != "]":
                raise _wrong(where, "a list without an end", "a comma or ] behind each chat")
            at = _after_blanks(text, end + 1)
    except (RecursionError, json.JSONDecodeError) as error:
        raise ChatError(f"{where}: is not valid JSON ({one_line(error, 200)})") from None


def _after_blanks(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


_BOM = codecs.BOM_UTF8  # what some editors put in front of a file
_MARKS = {_BOM: "UTF-8", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


#: A target that no loss is computed on: the default ``ignore_index`` of torch's cross-entropy.
IGNORED = -100

# As transformers looks for it.
_MARKED = re.compile(r"\{\%-?\s*generation\s*-?\%\}")


@dataclass(frozen=True)
class MaskedTokens:
    """Tokens, and which of them are trained on.

    Attributes:
        tokens: of the whole text.
        trained: for each token, whether it is the assistant's.
    """

    tokens: list[int]
    trained: list[bool]

    def targets(self) -> list[int]:
        """Return for each token the one after it, or ``IGNORED`` where that is not trained on."""
        after = zip(self.tokens[1:], self.trained[1:], strict=True)
        return [*(token if trained else IGNORED for token, trained in after), IGNORED]

    def cut(self, length: int) -> MaskedTokens:
        """Return at most the first ``length`` tokens."""
        return MaskedTokens(self.tokens[:length], self.trained[:length])

    @property
    def target_count(self) -> int:
        """How many targets a loss is computed on."""
        return sum(self.trained[1:])


@dataclass(frozen=True)
class _Text:
    """A rendered text.

    Attributes:
        text: the text.
        spans: first and last character (exclusive) of what is trained on.
    """

    text: str
    spans: Sequence[tuple[int, int]]


class ChatEncoder:
    """Turns chats into documents.

    Args:
        tokenizer: with the chat template.

    Raises:
        OptionError: the tokenizer cannot say which characters a token stands for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._name, self._option = tokenizer.name, tokenizer.option
        self._tokenizer: Any = tokenizer.tokenizer
        self._check = tokenizer.check
        if not self._tokenizer.is_fast:
            raise OptionError(
                self._option,
                f"{self._name}, which does not report the characters of its tokens",
                "one with a tokenizer.json, a fast tokenizer of transformers",
            )
        padding = self._tokenizer.pad_token_id
        #: Fills rows; nothing is trained on it.
        known = padding is not None and padding < tokenizer.used
        self.padding = int(padding) if known else tokenizer.separator

    def documents(self, chat: Chat | Completion, where: str) -> list[MaskedTokens]:
        """Return the documents of a line: one, or one for each turn that is trained on.

        Args:
            chat: what the line says.
            where: option, file and line, for errors.

        Raises:
            ChatError: the chat template cannot render it, or not in parts.
            OptionError: there is no chat template.
        """
        try:
            with limited(f"{where}: the chat template or the tokenizer in {self._name}"):
                found = self._documents(chat, where)
        except UserError:
            raise
        except CheckpointError as error:
            raise ChatError(str(error)) from None
        except Exception as error:  # whatever a template raises, or a tokenizer about odd text
            reason = one_line(f"{type(error).__name__}: {error}")
            raise ChatError(f"{where}: {self._name} cannot encode it ({reason})") from error
        for document in found:
            try:
                self._check(document.tokens)
            except UserError as error:
                raise ChatError(f"{where}: {error}") from None
        return found

    def question(self, chat: Chat | Completion, asked: str | None) -> tuple[str, list[int]] | None:
        """Return what the model is to answer: for people, and as tokens.

        Args:
            chat: a line, of which everything before its first answer is taken.
            asked: what is asked in place of that.

        Returns:
            None if the line begins with the answer.
        """
        if isinstance(chat, Completion):
            text = chat.prompt if asked is None else asked
            return (text, self._plain(text)[0]) if text else None
        if asked is not None:
            chat = Chat(({"role": "user", "content": asked},), (), chat.tools)
        count = chat.trained[0] if chat.trained else 1
        if not count:
            return None
        rendered = self._render(chat, count, add_generation_prompt=True)
        said = chat.messages[count - 1].get("content")
        tokens = list(self._encode(rendered, special=False)["input_ids"])
        return (f"{said}\n" if isinstance(said, str) else ""), tokens

    def _documents(self, chat: Chat | Completion, where: str) -> list[MaskedTokens]:
        if isinstance(chat, Completion):
            return [self._completion(chat)]
        rendered = self._rendered(chat, where)
        self._check_lists(chat, rendered, where)
        return [self._document(each) for each in rendered]

    def _check_lists(self, chat: Chat, rendered: Sequence[_Text], where: str) -> None:
        """Check that the template takes apart the contents that are lists.

        One that expects texts writes a list as Python would, as if the user had said that.
        """
        for number, message in enumerate(chat.messages, start=1):
            content = message.get("content")
            if isinstance(content, list) and any(str(content) in each.text for each in rendered):
                raise ChatError(
                    f'{where}, message {number}: found "content" a list, expected a text: the chat '
                    f"template of {self._name} does not take lists apart"
                )

    def _completion(self, given: Completion) -> MaskedTokens:
        text = given.prompt + given.completion
        tokens, offsets = self._plain(text)
        trained = _in_spans(offsets, [(len(given.prompt), len(text))])
        end = self._tokenizer.eos_token_id
        if end is not None:
            tokens, trained = [*tokens, end], [*trained, True]
        return MaskedTokens(tokens, trained)

    def _plain(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text outside of a template, without its end, and their places."""
        encoded = self._encode(text, special=True)
        tokens, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        if tokens and tokens[-1] == self._tokenizer.eos_token_id and offsets[-1] == (0, 0):
            del tokens[-1], offsets[-1]  # some tokenizers add it themselves
        return tokens, offsets

    def _document(self, rendered: _Text) -> MaskedTokens:
        encoded = self._encode(rendered.text, special=False)
        return MaskedTokens(
            list(encoded["input_ids"]), _in_spans(encoded["offset_mapping"], rendered.spans)
        )

    def _encode(self, text: str, *, special: bool) -> Any:
        return self._tokenizer(
            text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
        )

    def _rendered(self, chat: Chat, where: str) -> list[_Text]:
        if _MARKED.search(self._template(chat)):
            marked = self._marked(chat)
            if marked is not None:
                return [marked]
        parts = [self._part(chat, number, where) for number in chat.trained]
        full = self._render(chat, len(chat.messages))
        if all(full.startswith(part.text) for part in parts):
            return [_Text(full, [span for part in parts for span in part.spans])]
        return parts

    def _template(self, chat: Chat) -> str:
        try:
            return str(self._tokenizer.get_chat_template(tools=chat.tools))
        except ValueError:
            raise OptionError(
                self._option,
                f"{self._name} without a chat template",
                'one with a chat template, or --chat with "prompt" and "completion" as texts',
            ) from None

    def _marked(self, chat: Chat) -> _Text | None:
        """Return the text with the spans that the template marks; None: it marks others."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[list(chat.messages)],
            tools=chat.tools,
            chat_template=self._template(chat),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        texts, spans = rendered
        of_assistant = [
            number for number, each in enumerate(chat.messages) if each["role"] == ASSISTANT
        ]
        marked = spans[0]
        if len(of_assistant) == len(marked):
            marked = [
                span
                for number, span in zip(of_assistant, marked, strict=True)
                if number in chat.trained
            ]
        elif len(of_assistant) > len(chat.trained) or not marked:
            return None  # which span is whose cannot be said
        return _Text(texts[0], marked)

    def _part(self, chat: Chat, number: int, where: str) -> _Text:
        """Return the chat up to an assistant's message, and where in it that message lies."""
        if number == 0:
            raise ChatError(
                f"{where}: found a chat that begins with the assistant, expected a message before: "
                f"the chat template of {self._name} does not mark what is the assistant's"
            )
        before = self._render(chat, number, add_generation_prompt=True)
        through = self._render(chat, number + 1)
        if not through.startswith(before):
            at = next(
                i for i, (a, b) in enumerate(zip(before, f"{through}\0", strict=False)) if a != b
            )
            raise ChatError(
                f"{where}: found no beginning of message {number + 1}: before an answer, the chat "
                f"template of {self._name} writes {before[at : at + 20]!r}, but "
                f"{through[at : at + 20]!r} before this one; expected the same, or a template with "
                "{% generation %}"
            )
        return _Text(through, [(len(before), len(through))])

    def _render(self, chat: Chat, count: int, **settings: Any) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(chat.messages[:count]), tools=chat.tools, tokenize=False, **settings
            )
        )


def _in_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return for each token whether the last of its characters lies in a span.

    The last, since tokenizers may report tokens of white space as empty, or without it. A token
    that begins in front of the assistant's text and ends in it is the assistant's.
    """
    found = []
    ahead = iter(sorted(spans))
    start, stop = next(ahead, (0, 0))
    for _, end in offsets:
        while end > stop:
            following = next(ahead, None)
            if following is None:
                break
            start, stop = following
        found.append(start < end <= stop)
    return found
