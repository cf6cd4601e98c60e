"""Text to token ids and back, and the chat template, from the files that the target service hands over."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.detokenize import Detokenizer, TokenTable
from tandem.errors import InvalidRequest

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer. Immutable, safe to use from several threads.

    Text that spells a special token (`<|im_end|>` in a user's message) becomes that token, as in other servers: the
    chat template is rendered to text before it is tokenised, so the two cannot be told apart.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        template: ChatTemplate,
        named_tokens: Mapping[str, str],
    ) -> None:
        tokenizer.no_truncation()  # a prompt that is too long is refused, never cut
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._named_tokens = dict(named_tokens)
        self._table = TokenTable(tokenizer)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """From `tokenizer.json` and, where there are any, `tokenizer_config.json` and `chat_template.jinja`.

        Raises ValueError where a file cannot be read. A chat template that is missing or broken does not stop the
        model from serving completions: it is reported by `render_chat`.
        """
        if "tokenizer.json" not in files:
            raise ValueError(f"no tokenizer.json among the tokenizer's files: {', '.join(sorted(files)) or 'none'}")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        return cls(tokenizer, template=_find_template(files, config), named_tokens=_named_tokens(config))

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one, added tokens included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def special_token_ids(self) -> Mapping[str, int]:
        """The ids of bos_token, eos_token and so on, as far as the tokenizer has them."""
        ids = {name: self._tokenizer.token_to_id(token) for name, token in self._named_tokens.items()}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`. Rendered chats carry their special tokens already: pass False for them."""
        # Not `encode`, which holds the interpreter's lock all the while (0.7 s for 500,000 characters, where this one
        # takes 0.4 s without it), so that a thread would not keep the event loop free.
        return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`. `variables` are the request's own; they cannot replace the template's.

        Raises InvalidRequest with the template's own words where it refuses the messages, or where there is none.
        """
        return self._template.render(
            {
                **(variables or {}),
                **self._named_tokens,
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokeniser for one answer."""
        return self._table.detokenizer(skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._table.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        return self._table.token_text(token_id)

    def is_special(self, token_id: int) -> bool:
        return self._table.is_special(token_id)


class ChatTemplate:
    """A Jinja chat template, compiled once, in the environment that transformers gives templates.

    That is `_compile_jinja_template` in transformers' utils/chat_template_utils.py: the immutable sandbox, trimmed
    blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that escapes neither HTML nor Unicode, a
    `dict` without attributes and a `namespace` without private ones (templates are code that came with a model), and
    the `generation` block, which here is just its body.
    """

    def __init__(self, source: str | None) -> None:
        self._fault: str | None = None
        self._template: jinja2.Template | None = None
        if source is None:
            self._fault = (
                "this model has no chat template, so /v1/chat/completions cannot be used with it; "
                "use /v1/completions instead"
            )
            return
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["dict"] = _MakeDict()
        environment.globals["namespace"] = _Namespace
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            self._fault = f"this model's chat template cannot be compiled: {error}"

    def render(self, variables: Mapping[str, Any]) -> str:
        if self._template is None:
            raise InvalidRequest(self._fault or "", param="messages")
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(str(error), param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            # The template itself fails over messages of a shape that it does not expect.
            message = f"the model's chat template cannot render these messages: {error}"
            raise InvalidRequest(message, param="messages") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; when serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, closed to underscore names, by which sandboxes are escaped."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's: `namespace(self=...)` is allowed
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a chat template must not set {name!r} on a namespace")


class _MakeDict:
    """`dict(...)` and `dict.fromkeys(...)` for templates, and nothing else of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (templates pass it by position)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 (templates expect local time, as transformers gives it)


def _find_template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> ChatTemplate:
    """chat_template.jinja wins over tokenizer_config.json, where it is a string or a list of named ones."""
    if "chat_template.jinja" in files:
        return ChatTemplate(files["chat_template.jinja"].decode())
    entry = config.get("chat_template")
    if isinstance(entry, list):
        entry = {item["name"]: item["template"] for item in entry}.get("default")
    return ChatTemplate(entry)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and so on: strings, or objects with a `content`."""
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        entry = config.get(name)
        content = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(content, str):
            tokens[name] = content
    return tokens
