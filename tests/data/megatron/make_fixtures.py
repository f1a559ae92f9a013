"""Writes the `.bin`/`.idx` files beside this script with Megatron-Core's own builder.

Run once with a Python that has numpy and torch, and with `megatron-core` unpacked from its wheel:

    pip download --no-deps megatron-core==0.16.1
    unzip megatron_core-*.whl 'megatron/core/datasets/*' -d wheel
    python make_fixtures.py wheel

Only `indexed_dataset.py` is run; what it imports from the rest of the package (object stores, logging over
ranks) is replaced by empty modules. The tests read the files and need no Python.
"""

import importlib.util
import pathlib
import sys
import types

import numpy
import torch

FIXTURES = {
    # An empty document in the middle, and an odd number of sequences.
    "small-u16": (numpy.uint16, [[1, 2, 3], [4], [], [5, 6, 7, 8, 9]]),
    # Ids that u16 cannot hold.
    "wide-i32": (numpy.int32, [[65535, 65536, 70000], [0, 99999]]),
    "bytes-u8": (numpy.uint8, [[0, 127, 255]]),
    "long-i64": (numpy.int64, [[3, 2], [1]]),
    # One document of three sequences, then one of one.
    "sentences-u16": (numpy.uint16, [[[10, 11], [12], [13, 14, 15]], [[16]]]),
    "negative-i16": (numpy.int16, [[1, -2, 3]]),
    "floats-f32": (numpy.float32, [[1, 2]]),
}


def load_builder(wheel):
    """The module `indexed_dataset.py`, without the package around it."""
    for name in ("megatron", "megatron.core", "megatron.core.datasets", "megatron.core.datasets.object_storage_utils",
                 "megatron.core.msc_utils", "megatron.core.utils"):
        sys.modules[name] = types.ModuleType(name)
    storage = sys.modules["megatron.core.datasets.object_storage_utils"]
    for name in ("S3Config", "ObjectStorageConfig", "cache_index_file", "dataset_exists", "get_index_cache_path",
                 "get_object_storage_access", "is_object_storage_path", "parse_s3_path"):
        setattr(storage, name, type(name, (), {}))
    feature = type("MultiStorageClientFeature", (), {"is_enabled": staticmethod(lambda: False)})
    sys.modules["megatron.core.msc_utils"].MultiStorageClientFeature = feature
    sys.modules["megatron.core.utils"].log_single_rank = lambda *arguments: None
    path = pathlib.Path(wheel) / "megatron/core/datasets/indexed_dataset.py"
    spec = importlib.util.spec_from_file_location("indexed_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(module, folder, name, dtype, documents):
    builder = module.IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
    for document in documents:
        sequences = document if document and isinstance(document[0], list) else [document] if document else []
        flat = [token for sequence in sequences for token in sequence]
        builder.add_document(torch.tensor(flat, dtype=torch.float64 if dtype is numpy.float32 else torch.int64),
                             [len(sequence) for sequence in sequences])
    builder.finalize(str(folder / f"{name}.idx"))


if __name__ == "__main__":
    indexed_dataset = load_builder(sys.argv[1])
    for fixture, (fixture_dtype, fixture_documents) in FIXTURES.items():
        write(indexed_dataset, pathlib.Path(__file__).parent, fixture, fixture_dtype, fixture_documents)
