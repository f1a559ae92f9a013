"""Writes the files beside this script: a small tokenizer, texts, and what Megatron-Core makes of them.

Run once with a Python that has numpy, torch and tokenizers, and with `megatron-core` unpacked from its wheel (see
`../megatron/make_fixtures.py`):

    python make_fixtures.py wheel

Documents are made as `tools/preprocess_data.py --append-eod` of Megatron-LM makes them: a document that gives no
tokens has no sequence and no separator, every other ends with the separator.
"""

import json
import pathlib
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "megatron"))
import make_fixtures as megatron  # noqa: E402

DOCUMENTS = [
    "The ship sailed at noon.\nThe harbour was empty, and the gulls had gone.",
    "",
    "  leading spaces,\ttabs\r\nand  double  spaces \n\n",
    "Unicode: naïve café, 東京, \U0001F600, e\u0301.",
    "A literal <|endoftext|> in the text.",
    "12345 67 + 8 = 12420; don't, we'll, I'm.",
]
SEPARATOR = "<|endoftext|>"


def train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[SEPARATOR], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(DOCUMENTS * 3, trainer)
    return tokenizer


def write_pair(indexed_dataset, tokenizer, name, documents):
    builder = indexed_dataset.IndexedDatasetBuilder(
        str(FOLDER / f"{name}.bin"), dtype=indexed_dataset.DType.optimal_dtype(tokenizer.get_vocab_size()))
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        if ids:
            ids.append(tokenizer.token_to_id(SEPARATOR))
        builder.add_document(torch.tensor(ids, dtype=torch.int64), [len(ids)] if ids else [])
    builder.finalize(str(FOLDER / f"{name}.idx"))


if __name__ == "__main__":
    module = megatron.load_builder(sys.argv[1])
    trained = train()
    lines = [json.dumps({"id": at, "text": text}, ensure_ascii=at % 2 == 0) for at, text in enumerate(DOCUMENTS)]
    (FOLDER / "documents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (FOLDER / "document.txt").write_text("\n\n".join(DOCUMENTS), encoding="utf-8", newline="")
    write_pair(module, trained, "documents", DOCUMENTS)
    write_pair(module, trained, "document", ["\n\n".join(DOCUMENTS)])
    # Files of fine-tuned models often truncate and pad; a corpus must not be.
    trained.enable_truncation(max_length=4)
    trained.enable_padding(length=16)
    trained.save(str(FOLDER / "tokenizer.json"))
