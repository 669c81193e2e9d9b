"""From a data file to tokens: the formats text, instruct and chat, and which tokens count in the loss."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

IGNORE = -100  # a label the loss does not count
CHUNK = 1000  # rows a tokenizer call: enough to keep its threads busy, little enough to stream

# A template that prints today's date would make other tokens tomorrow, and a resumed run other data.
FIXED_DATE = (
    '{%- macro strftime_now(format) %}{{ format | replace("%d", "26") | replace("%b", "Jul")'
    ' | replace("%B", "July") | replace("%m", "07") | replace("%Y", "2024") }}{%- endmacro %}{{ "" }}'
)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One tokenised example: `input_ids` and `labels`, int32 [tokens].

    Labels are unshifted: labels[i] is input_ids[i] where the loss counts that token, else -100. labels[0] is
    -100, because nothing inside the document predicts its first token.
    """

    input_ids: np.ndarray
    labels: np.ndarray


def read_rows(path: str | Path, split: str = "train") -> Sequence[dict]:
    """The rows of a JSON lines file (.jsonl, .json), a parquet file, or a `datasets` name or directory.

    `split` is used for `datasets` only. Raises ValueError for a file that is missing, empty, broken (with the
    line number) or of another kind.
    """
    path, file = str(path), Path(path).expanduser()
    readers = {".jsonl": _read_json_lines, ".json": _read_json_lines, ".parquet": _read_parquet}
    reader = readers.get(file.suffix.lower())
    if reader is None and not file.is_dir():
        if file.is_file() or re.fullmatch(r"\.[A-Za-z]+", file.suffix):
            raise ValueError(f"{path}: files of this kind are not read; use {', '.join(readers)} or a datasets name.")
        if file.is_absolute() or len(file.parts) > 2 or path.startswith((".", "~")):
            raise ValueError(f"{path}: no such file.")
    if reader is not None and not file.is_file():
        raise ValueError(f"{path}: no such file.")
    rows = reader(file) if reader else _read_dataset(str(file), split)
    if len(rows) == 0:
        raise ValueError(f"{path}: there are no rows in it.")
    return rows


def _read_json_lines(file: Path) -> list[dict]:
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.removeprefix(BOM_UTF8).strip():
                rows.append(_parse_line(line, f"{file}, line {number}"))
    return rows


def _parse_line(line: bytes, where: str) -> dict:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        # Its own "line 1" would be that of the string.
        reason = error
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
        raise ValueError(f"{where}: not JSON ({reason}); each line holds one object.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON {type(row).__name__}, not an object with keys.")
    return row


def _read_parquet(file: Path) -> list[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file}: not a readable parquet file ({reason}).") from error


def _read_dataset(name: str, split: str) -> Sequence[dict]:
    import datasets

    try:
        if (Path(name) / "dataset_info.json").exists() or (Path(name) / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(name)
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # a data set's own builder may raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name}: neither a file here nor a data set that `datasets` can load with split {split!r} "
            f"({type(error).__name__}: {reason})."
        ) from error


def make_documents(
    rows: Iterable[dict], format: str, tokenizer: PreTrainedTokenizerBase, source: str = "data"
) -> Iterator[Document]:
    """Tokenise `rows` one document a row, in order. `source` is the file's name for messages.

    - text: {"text"}; every token counts, an eos is added at the end.
    - instruct: {"prompt", "response"}; the response and the eos after it count. With a chat template the pair
      is a user and an assistant turn; without one the prompt and the response are concatenated.
    - chat: {"messages": [{"role", "content"}, ...]} in the tokenizer's chat template; assistant turns count.

    Raises ValueError with source, row number (from 1) and key for a row that is not of the format.
    """
    if format not in FORMATS:
        raise ValueError(f"data.format {format!r} is not one of {', '.join(FORMATS)}.")
    convert = FORMATS[format]
    numbered = ((f"{source}, row {i}", row) for i, row in enumerate(rows, 1))
    while chunk := list(islice(numbered, CHUNK)):
        yield from convert(chunk, tokenizer)


def _text(rows: list[tuple[str, dict]], tokenizer) -> Iterator[Document]:
    texts = [_string(row, "text", where) for where, row in rows]
    for ids in tokenizer(texts, verbose=False)["input_ids"]:
        ids = _with_eos(ids, tokenizer)
        yield _document(ids, np.ones(len(ids), dtype=bool))


def _instruct(rows: list[tuple[str, dict]], tokenizer) -> Iterator[Document]:
    pairs = [(_string(row, "prompt", where), _string(row, "response", where)) for where, row in rows]
    if tokenizer.chat_template is None:
        return _concatenated(pairs, tokenizer)
    turns = [[{"role": "user", "content": p}, {"role": "assistant", "content": r}] for p, r in pairs]
    return _conversations([(where, messages) for (where, _), messages in zip(rows, turns, strict=True)], tokenizer)


def _chat(rows: list[tuple[str, dict]], tokenizer) -> Iterator[Document]:
    if tokenizer.chat_template is None:
        raise ValueError("data.format chat needs a tokenizer with a chat template; this one has none.")
    return _conversations([(where, _messages(row, where)) for where, row in rows], tokenizer)


FORMATS: dict[str, Callable[[list[tuple[str, dict]], Any], Iterator[Document]]] = {
    "text": _text,
    "instruct": _instruct,
    "chat": _chat,
}


def _concatenated(pairs: list[tuple[str, str]], tokenizer) -> Iterator[Document]:
    texts = [prompt + response for prompt, response in pairs]
    for (prompt, response), (ids, offsets) in zip(
        pairs, _encode(texts, tokenizer, add_special_tokens=True), strict=True
    ):
        counted = offsets[:, 1] > len(prompt)
        if (counted & (offsets[:, 0] < len(prompt))).any():
            # A token would hold the prompt's end and the response's start; generation starts between them.
            head = tokenizer(prompt, verbose=False)["input_ids"]
            head = head[:-1] if head[-1] == tokenizer.eos_token_id else head
            ids = head + tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
            counted = np.arange(len(ids)) >= len(head)
        whole = _with_eos(ids, tokenizer)
        yield _document(whole, np.append(counted[: len(whole) - 1], True))


def _conversations(rows: list[tuple[str, list[dict]]], tokenizer) -> Iterator[Document]:
    template = tokenizer.get_chat_template()
    marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    template = FIXED_DATE + template if "strftime_now" in template else template

    def render(messages: list[dict], where: str, **options) -> str:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **options)
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: the chat template refuses the messages: {error}") from error

    texts = [render(messages, where) for where, messages in rows]
    if marks_turns:
        return _by_template_marks([messages for _, messages in rows], template, tokenizer)
    spans = [
        _assistant_spans(text, messages, where, render) for text, (where, messages) in zip(texts, rows, strict=True)
    ]
    return _by_spans(texts, spans, tokenizer)


def _by_template_marks(conversations: list[list[dict]], template: str, tokenizer) -> Iterator[Document]:
    encoded = tokenizer.apply_chat_template(
        conversations,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
    )
    for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        yield _document(ids, np.asarray(mask, dtype=bool))


def _by_spans(texts: list[str], spans: list[list[tuple[int, int]]], tokenizer) -> Iterator[Document]:
    for turns, (ids, offsets) in zip(spans, _encode(texts, tokenizer, add_special_tokens=False), strict=True):
        counted = np.zeros(len(ids), dtype=bool)
        for start, end in turns:
            counted |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
        yield _document(ids, counted)


def _assistant_spans(full: str, messages: list[dict], where: str, render) -> list[tuple[int, int]]:
    """The character ranges of `full` that the assistant wrote, found by rendering each turn's prefix."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:i], where, add_generation_prompt=True) if i else None
            after = render(messages[: i + 1], where)
            spans.append(_turn_span(full, before, after, message.get("content"), f"{where}, message {i + 1}"))
    return spans


def _turn_span(full: str, before: str | None, after: str, content: str | None, where: str) -> tuple[int, int]:
    """`before` ends where the assistant starts to write, `after` where its turn is over, if `full` agrees."""
    if before is not None and full.startswith(before) and after.startswith(before):
        start, turn, words = len(before), after[len(before) :], (content or "").strip()
        # Qwen3 gives the last answer an empty reasoning block and earlier ones none: the turn's longest
        # ending that `full` has at its place, and that holds the content, is what the answer became.
        for cut in range(len(turn) if words else 1):
            ending = turn[cut:]
            if full.startswith(ending, start) and (cut == 0 or words in ending):
                # Nothing generates the line break after the end-of-turn token.
                return start, start + len(ending.rstrip())
    raise ValueError(
        f"{where}: cannot tell which tokens the assistant wrote, because the chat template renders the "
        "conversation up to this turn differently than as a part of the whole. Give the tokenizer a template "
        "that marks the assistant's text with {% generation %} ... {% endgeneration %}."
    )


def _encode(texts: list[str], tokenizer, add_special_tokens: bool) -> Iterator[tuple[list[int], np.ndarray]]:
    """Token ids and character offsets [tokens, 2] of each text."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not report character offsets, which loss masks need; use a "
            "tokenizer that has a tokenizer.json."
        )
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False)
    for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        yield ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2)


def _document(ids: list[int], counted: np.ndarray) -> Document:
    input_ids = np.asarray(ids, dtype=np.int32)
    labels = np.where(counted, input_ids, np.int32(IGNORE))
    labels[:1] = IGNORE
    return Document(input_ids, labels)


def _with_eos(ids: list[int], tokenizer) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no eos token, so a model could not learn where a text ends.")
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _value(row: dict, key: str, where: str) -> Any:
    if key not in row:
        raise ValueError(f"{where}: key {key!r} is missing; the row has {', '.join(map(repr, row)) or 'no keys'}.")
    return row[key]


def _string(row: dict, key: str, where: str) -> str:
    return _checked(_value(row, key, where), where, key)


def _checked(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key!r} is {_kind(value)}, not a string.")
    if re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{where}: {key!r} holds half of a surrogate pair, which is not text.")
    return value


def _messages(row: dict, where: str) -> list[dict]:
    messages = _value(row, "messages", where)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' is {_kind(messages)}, not a list of at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"{where}: 'messages[{i}]' is {_kind(message)}, not an object with role and content.")
        calls_tool = message.get("tool_calls") and message.get("content") is None
        for key in ("role",) if calls_tool else ("role", "content"):
            _checked(message.get(key), where, f"messages[{i}].{key}")
    return messages


def _kind(value: Any) -> str:
    if value is None:
        return "null or missing"
    if value in ([], {}):
        return f"an empty {type(value).__name__}"
    return f"of type {type(value).__name__}"
