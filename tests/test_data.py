"""Data: loss masks by format, packing, global batches whatever the mesh, resume, messages for bad input."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from meshpar.train.data import (
    GlobalBatches,
    Row,
    check_vocabulary,
    eval_batches,
    load_rows,
    pack_documents,
    pad_token_id,
    read_rows,
    truncate_documents,
)
from meshpar.train.formats import IGNORE, Document, make_documents

CORPUS = [
    "What is the capital of France? The capital of France is Paris.",
    "user assistant system think A pipeline has stages, a mesh has dimensions.",
    "def f(x):\n    return x + 1\n\nprint(f(2))",
]
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<pad>"]

OPEN = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
TURN = "{{ m['content'] + '<|im_end|>\n' }}"
CLOSE = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = OPEN + TURN + CLOSE
MARKS = "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
MARKED = OPEN + "{% if m['role'] == 'assistant' %}" + MARKS + "{% else %}" + TURN + "{% endif %}" + CLOSE
# As Qwen3's: the last answer is opened by an empty reasoning block, earlier answers are not.
THINK = "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
REASONING = OPEN + THINK + TURN + CLOSE

CONVERSATION = [
    {"role": "system", "content": "You know the capital of France."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "The capital is Paris."},
    {"role": "user", "content": "And 你好? It is  h\u00e9llo"},
    {"role": "assistant", "content": "  x + 1\n\n你好\n"},
]


def make_tokenizer(chat_template: str | None = None, add_bos: bool = False) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    if add_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def counted_text(document: Document, tokenizer) -> str:
    """The text whose prediction the loss counts: label i is predicted from position i - 1."""
    return tokenizer.decode(document.labels[1:][document.labels[1:] != IGNORE])


def write_lines(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- which tokens count


@pytest.mark.parametrize("add_bos", [False, True])
def test_text_counts_every_token_and_an_eos(add_bos):
    tokenizer = make_tokenizer(add_bos=add_bos)
    (document,) = make_documents([{"text": CORPUS[0]}], "text", tokenizer)
    assert tokenizer.decode(document.input_ids) == ("<s>" if add_bos else "") + CORPUS[0] + "<|im_end|>"
    assert document.labels[0] == IGNORE
    np.testing.assert_array_equal(document.labels[1:], document.input_ids[1:])


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "generation-marks"])
def test_instruct_with_a_template_counts_the_response_and_its_eos(template):
    tokenizer = make_tokenizer(template)
    row = {"prompt": "What is the capital of France?", "response": "The capital is Paris."}
    (document,) = make_documents([row], "instruct", tokenizer)
    assert counted_text(document, tokenizer) == "The capital is Paris.<|im_end|>"
    asked = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], tokenize=False)
    assert tokenizer.decode(document.input_ids).startswith(asked + "<|im_start|>assistant\n")


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("prompt", ["What is the capital? ", "The cap", "", "print(", "Paris\n\n"])
def test_instruct_without_a_template_counts_the_response_and_an_eos(prompt, add_bos):
    tokenizer = make_tokenizer(add_bos=add_bos)
    (document,) = make_documents([{"prompt": prompt, "response": "ital of France"}], "instruct", tokenizer)
    bos = "<s>" if add_bos else ""
    assert tokenizer.decode(document.input_ids) == bos + prompt + "ital of France<|im_end|>"
    counted = counted_text(document, tokenizer)  # without a bos nothing predicts the very first token
    assert counted == "ital of France<|im_end|>" or (not prompt and not add_bos)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "generation-marks"])
def test_chat_counts_every_assistant_turn_and_nothing_else(template):
    tokenizer = make_tokenizer(template)
    (document,) = make_documents([{"messages": CONVERSATION}], "chat", tokenizer)
    assert counted_text(document, tokenizer) == "The capital is Paris.<|im_end|>  x + 1\n\n你好\n<|im_end|>"
    rendered = tokenizer.apply_chat_template(CONVERSATION, return_dict=True)
    assert document.input_ids.tolist() == rendered["input_ids"]


def test_chat_template_that_opens_only_the_last_answer_with_reasoning():
    tokenizer = make_tokenizer(REASONING)
    (document,) = make_documents([{"messages": CONVERSATION}], "chat", tokenizer)
    assert counted_text(document, tokenizer) == (
        "The capital is Paris.<|im_end|><think>\n\n</think>\n\n  x + 1\n\n你好\n<|im_end|>"
    )


def test_chat_template_whose_prefixes_are_no_prefixes_is_refused():
    tokenizer = make_tokenizer("{{ messages | length }}" + CHATML)
    with pytest.raises(ValueError, match=r"f\.jsonl, row 1, message 3: cannot tell.*generation"):
        list(make_documents([{"messages": CONVERSATION}], "chat", tokenizer, "f.jsonl"))


def test_a_template_that_prints_the_date_gives_the_same_tokens_every_day():
    tokenizer = make_tokenizer("{{ strftime_now('%d %b %Y') }}" + CHATML)
    (document,) = make_documents([{"messages": CONVERSATION}], "chat", tokenizer)
    assert tokenizer.decode(document.input_ids).startswith("26 Jul 2024<|im_start|>system")


def test_rows_come_out_in_order_over_more_than_one_tokenizer_call():
    tokenizer = make_tokenizer()
    texts = [f"x + {i}" for i in range(2500)]
    documents = list(make_documents([{"text": text} for text in texts], "text", tokenizer))
    assert [tokenizer.decode(document.input_ids[:-1]) for document in documents] == texts


# --- bad input


@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        ("text", {"txt": "a"}, r"row 2: key 'text' is missing; the row has 'txt'"),
        ("text", {"text": None}, r"row 2: 'text' is null or missing, not a string"),
        ("text", {"text": "\ud800"}, r"row 2: 'text' holds half of a surrogate pair"),
        ("instruct", {"prompt": "a"}, r"row 2: key 'response' is missing"),
        ("instruct", {"prompt": ["a"], "response": "b"}, r"row 2: 'prompt' is of type list"),
        ("chat", {"messages": []}, r"row 2: 'messages' is an empty list"),
        ("chat", {"messages": ["hi"]}, r"row 2: 'messages\[0\]' is of type str"),
        ("chat", {"messages": [{"role": "user"}]}, r"row 2: 'messages\[0\].content' is null or missing"),
    ],
)
def test_a_row_not_of_the_format_is_named(format, row, message):
    good = {"text": "a", "prompt": "a", "response": "b", "messages": CONVERSATION}
    with pytest.raises(ValueError, match=r"^f\.jsonl, " + message):
        list(make_documents([good, row], format, make_tokenizer(CHATML), "f.jsonl"))


def test_a_conversation_the_template_refuses_is_named():
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"^f, row 1: the chat template refuses.*roles must alternate"):
        list(make_documents([{"messages": CONVERSATION}], "chat", tokenizer, "f"))


def test_chat_without_a_template_and_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="chat template"):
        list(make_documents([{"messages": CONVERSATION}], "chat", make_tokenizer()))
    with pytest.raises(ValueError, match="'alpaca' is not one of text, instruct, chat"):
        list(make_documents([], "alpaca", make_tokenizer()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', r"a\.jsonl, line 3: not JSON \(Expect.* at column 14\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'["a"]\n', r"a\.jsonl, line 1: a JSON list, not an object"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl, line 1: not JSON"),
        ("a.jsonl", b'{"text": "a"}\r{"text": "b"}', r"a\.jsonl, line 1: not JSON \(Extra data at column 15\)"),
        ("a.jsonl", b'{"text": "a"}\n\0\0\0\0', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "a\0"}', r"a\.jsonl, line 1: not JSON \(Invalid control character at column 12\)"),
        (
            "a.jsonl",
            '{"text": "a"}'.encode("utf-16"),
            r"a\.jsonl, line 1: not JSON \('utf-8' codec can't decode byte 0xff",
        ),
        ("a.json", b'[\n{"text": "a"}\n]', r"a\.json, line 1: not JSON .*; each line holds one object"),
        ("a.jsonl", b"", r"a\.jsonl: there are no rows"),
        ("a.jsonl", b" \n\t\r\n", r"a\.jsonl: there are no rows"),
        ("a.jsonl", b"\xef\xbb\xbf\n", r"a\.jsonl: there are no rows"),
        ("a.parquet", b"", r"a\.parquet: not a readable parquet file"),
        ("a.parquet", b"PAR1 no", r"a\.parquet: not a readable parquet file"),
        ("a.csv", b"text\na\n", r"a\.csv: files of this kind are not read; use \.jsonl"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz: files of this kind"),
        ("a.jsonl", None, r"a\.jsonl: no such file"),
        ("a.parquet", None, r"a\.parquet: no such file"),
        ("no/such/thing", None, r"no/such/thing: no such file"),
    ],
)
def test_a_broken_or_missing_file_is_one_clear_sentence(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name)


def test_a_parquet_file_without_rows_or_cut_short_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    with pytest.raises(ValueError, match=r"a\.parquet: there are no rows"):
        read_rows(file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable parquet file"):
        read_rows(file)


def test_lines_may_have_a_byte_order_mark_and_end_as_on_windows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert read_rows(tmp_path / "a.jsonl") == [{"text": "a"}, {"text": "b"}]


def test_the_same_rows_from_json_lines_parquet_and_datasets(tmp_path):
    import datasets

    rows = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:3]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.DatasetDict({"part": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    assert read_rows(write_lines(tmp_path / "a.jsonl", rows)) == rows
    assert read_rows(tmp_path / "a.parquet") == rows
    assert list(read_rows(tmp_path / "saved", split="part")) == rows


def test_token_ids_beyond_the_vocabulary_are_refused():
    rows = [filled(3), filled(300)]
    check_vocabulary(rows, 301)
    with pytest.raises(ValueError, match=r"row 2 .* token id 300, .* ends at 299"):
        check_vocabulary(rows, 300)


# --- packing


def document_of(length: int, first: int = 100, counted_from: int = 1) -> Document:
    ids = np.arange(first, first + length, dtype=np.int32)
    return Document(ids, np.where(np.arange(length) >= counted_from, ids, IGNORE).astype(np.int32))


def test_whole_documents_are_packed_in_order_and_never_split():
    documents = [document_of(n, 100 * i) for i, n in enumerate([3, 4, 2, 6, 12, 1])]
    rows = pack_documents(documents, seq_len=8, pad_id=7, cut=False)
    assert [row.input_ids.tolist() for row in rows] == [
        [0, 1, 2, 100, 101, 102, 103, 7],
        [200, 201, 300, 301, 302, 303, 304, 305],
        [400, 401, 402, 403, 404, 405, 406, 407],
        [500, 7, 7, 7, 7, 7, 7, 7],
    ]
    assert rows[0].position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert rows[0].labels.tolist() == [-100, 1, 2, -100, 101, 102, 103, -100]
    assert rows[3].position_ids.tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    assert (rows[3].labels == IGNORE).all()


def test_text_is_cut_across_rows_without_losing_a_token():
    documents = [document_of(n, 100 * i) for i, n in enumerate([3, 20, 5, 4])]
    rows = pack_documents(documents, seq_len=8, pad_id=7, cut=True)
    assert [len(row.input_ids) for row in rows] == [8, 8, 8, 8]
    np.testing.assert_array_equal(
        np.concatenate([row.input_ids for row in rows]), np.concatenate([d.input_ids for d in documents])
    )
    assert rows[0].position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert rows[1].position_ids.tolist() == list(range(8))
    starts = np.concatenate([row.position_ids for row in rows]) == 0
    assert (np.concatenate([row.labels for row in rows])[starts] == IGNORE).all()


def test_a_packed_row_has_no_attention_across_documents():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=4, initializer_range=0.2, **sizes)
    model = LlamaForCausalLM(config).eval()
    draw = [np.random.default_rng(seed).integers(0, 64, n, dtype=np.int32) for seed, n in ((5, 6), (6, 10))]
    documents = [Document(ids, ids) for ids in draw]
    rows = pack_documents(documents, seq_len=20, pad_id=0, cut=False)
    batch = GlobalBatches(rows, 1, seed=0, pad_id=0, seq_len=20).next()
    assert "attention_mask" not in batch
    labels = batch.pop("labels")
    assert (labels[:, 1:] != IGNORE).sum() == 14
    with torch.no_grad():  # with a cache transformers would not look for packing
        packed = model(**batch, use_cache=False).logits[0]
        alone = [model(torch.from_numpy(ids).long()[None]).logits[0] for ids in draw]
    torch.testing.assert_close(packed[:6], alone[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(packed[6:16], alone[1], atol=1e-4, rtol=0)


def test_load_rows_packs_documents_and_reports_what_it_cuts(tmp_path, caplog):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "x", "response": "x + 1" * n} for n in (1, 2, 90)])
    tokenizer = make_tokenizer(CHATML)
    packed = load_rows(path, "instruct", tokenizer, seq_len=128, pack=True)
    assert [len(row.input_ids) for row in packed] == [128, 128]
    text = tokenizer.decode(packed[0].input_ids[packed[0].labels != IGNORE])
    assert text == "x + 1<|im_end|>x + 1x + 1<|im_end|>"
    assert "1 of 3 documents are longer than seq_len 128" in caplog.text
    padded = load_rows(path, "instruct", tokenizer, seq_len=128, pack=False)
    assert len(padded[2].input_ids) == 128
    assert [row.position_ids for row in padded] == [None, None, None]
    assert pad_token_id(tokenizer) == packed[0].input_ids[-1] == 3
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == tokenizer.eos_token_id


# --- global batches


def filled(token: int, length: int = 8) -> Row:
    ids = np.full(length, token, dtype=np.int32)
    return Row(ids, ids)


def walk(batches: GlobalBatches, steps: int, dp_size: int = 1) -> list[int]:
    """First tokens of all rows of `steps` global batches, put together from the parts of `dp_size` ranks."""
    start, parts = batches.state_dict(), []
    for rank in range(dp_size):
        batches.load_state_dict(start)
        parts.append(torch.stack([batches.next(rank, dp_size)["input_ids"][:, 0] for _ in range(steps)]))
    return torch.cat(parts, dim=1).flatten().tolist()


def batches_of_16(global_size: int = 4, seed: int = 1, **options) -> GlobalBatches:
    return GlobalBatches([filled(3 + i) for i in range(16)], global_size, seed, pad_id=0, seq_len=128, **options)


@pytest.mark.parametrize("dp_size", [2, 4])
def test_the_global_batch_is_the_same_whatever_the_mesh(dp_size):
    assert walk(batches_of_16(), 10, dp_size) == walk(batches_of_16(), 10)


def test_every_epoch_has_each_row_once_and_its_own_order():
    tokens = walk(batches_of_16(global_size=5), 16)  # 80 rows: 5 epochs of 16
    epochs = [tokens[i : i + 16] for i in range(0, 80, 16)]
    assert all(sorted(epoch) == list(range(3, 19)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert tokens != walk(batches_of_16(global_size=5, seed=2), 16)


def test_the_order_is_fixed_for_all_time():
    """A checkpoint of today must find its rows in tomorrow's release."""
    assert walk(batches_of_16(), 4) == [12, 5, 17, 7, 15, 10, 8, 18, 3, 14, 11, 13, 16, 9, 6, 4]


def test_without_shuffling_rows_come_in_the_file_s_order():
    assert walk(batches_of_16(shuffle=False), 4) == list(range(3, 19))


@pytest.mark.parametrize(("global_size", "dp_size"), [(4, 1), (4, 4), (8, 2), (2, 2)])
def test_resume_mid_epoch_with_another_mesh_or_batch_size_goes_on_at_the_same_row(global_size, dp_size):
    before = batches_of_16()
    seen = walk(before, 2, 2)
    state = json.loads(json.dumps(before.state_dict()))
    assert (state["epoch"], state["position"], state["rows_seen"]) == (0, 8, 8)
    after = batches_of_16(global_size)
    after.load_state_dict(state)
    rest = walk(after, 8 // global_size, dp_size)
    assert seen + rest == walk(batches_of_16(), 4)
    assert (after.epoch, after.position, after.rows_seen) == (1, 0, 16)


def test_a_state_of_other_data_is_refused():
    state = batches_of_16().state_dict()
    with pytest.raises(ValueError, match="rows 16 there, 15 here"):
        GlobalBatches([filled(3)] * 15, 4, 1, pad_id=0, seq_len=8).load_state_dict(state)
    with pytest.raises(ValueError, match="checksum"):
        GlobalBatches([filled(3)] * 16, 4, 1, pad_id=0, seq_len=8).load_state_dict(state)
    with pytest.raises(ValueError, match="seed 1 there, 2 here"):
        batches_of_16(seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="row 16, does not exist"):
        batches_of_16().load_state_dict({**state, "position": 16})


def test_padding_is_that_of_the_global_batch_on_every_rank():
    rows = [filled(5, length) for length in (3, 10, 65, 2)]
    ranks = [GlobalBatches(rows, 4, 0, pad_id=9, seq_len=100).next(rank, 2) for rank in range(2)]
    assert {tuple(rank[key].shape) for rank in ranks for key in rank} == {(2, 100)}
    assert all(tensor.dtype == torch.int64 for rank in ranks for tensor in rank.values())
    ids, labels, mask = (torch.cat([rank[key] for rank in ranks]) for key in ("input_ids", "labels", "attention_mask"))
    assert sorted(mask.sum(1).tolist()) == [2, 3, 10, 65]
    assert torch.equal(ids == 9, mask == 0)
    assert torch.equal(labels == IGNORE, mask == 0)
    short = GlobalBatches(rows[:2], 2, 0, pad_id=9, seq_len=100).next()
    assert short["input_ids"].shape == (2, 64)


def test_a_batch_size_that_does_not_divide_is_refused_with_sizes_that_do():
    with pytest.raises(ValueError, match=r"global_size 4 .* size 3; 3 or 6 would"):
        batches_of_16().next(0, 3)
    with pytest.raises(ValueError, match="no rows"):
        GlobalBatches([], 4, 0, pad_id=0, seq_len=8)


# --- evaluation


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("count", "global_size"), [(5, 2), (1, 2), (5, 4), (8, 4)])
def test_eval_gives_every_rank_as_many_batches_and_every_row_once(count, global_size, packed):
    documents = [document_of(3 + i, 10 * (i + 1)) for i in range(count)]
    rows = pack_documents(documents, 8, 0, cut=False) if packed else truncate_documents(documents, 8)
    ranks = [list(eval_batches(rows, global_size, rank, 2, pad_id=0, seq_len=8)) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == -(-len(rows) // global_size)
    shapes = [[{key: batch[key].shape for key in batch} for batch in rank] for rank in ranks]
    assert shapes[0] == shapes[1]
    labels = torch.cat([batch["labels"] for rank in ranks for batch in rank])
    counted = labels[:, 1:][labels[:, 1:] != IGNORE].tolist()
    assert sorted(counted) == sorted(np.concatenate([row.labels[row.labels != IGNORE] for row in rows]))
    masks = [batch["attention_mask"] for rank in ranks for batch in rank if not packed]
    assert all(mask[:, 0].all() for mask in masks)  # attention over nothing would be 0 / 0
