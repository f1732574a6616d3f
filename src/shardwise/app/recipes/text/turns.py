"""Chats as tokens, and which of the tokens are the assistant's.

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

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.app.recipes.text.chat import ASSISTANT, Chat, ChatError, Completion
from shardwise.app.recipes.text.data import Tokenizer
from shardwise.base.errors import CheckpointError
from shardwise.elastic.errors import UserError
from shardwise.frontends.pretrained.opening import limited
from shardwise.insight.schema.option import OptionError

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
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ChatError(f"{where}: {self._name} cannot encode it ({reason})") from error
        for document in found:
            try:
                self._check(document.tokens)
            except UserError as error:
                raise ChatError(f"{where}: {error}") from None
        return found

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
        encoded = self._encode(text, special=True)
        spans = [(len(given.prompt), len(text))]
        tokens, offsets = list(encoded["input_ids"]), list(encoded["offset_mapping"])
        end = self._tokenizer.eos_token_id
        if end is not None and tokens and tokens[-1] == end and offsets[-1] == (0, 0):
            del tokens[-1], offsets[-1]  # some tokenizers add it themselves
        trained = _in_spans(offsets, spans)
        if end is not None:
            tokens, trained = [*tokens, end], [*trained, True]
        return MaskedTokens(tokens, trained)

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
