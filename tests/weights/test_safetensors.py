"""Headers of safetensors files and indexes of shards: the right ones read as the library reads them, no other read."""

import json
import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardwise.weights.checkpoint import Checkpoint, LoadError
from shardwise.weights.safetensors import index_safetensors

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "scalar": np.array(2.5, np.float64),
    "empty": np.zeros((0, 4), np.float32),
    "ids": np.arange(5, dtype=np.int64),
}


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def shards(directory: Path) -> None:
    save_file({"a": TENSORS["a"]}, directory / "model-00001-of-00002.safetensors")
    save_file({"b.weight": TENSORS["b.weight"], "a": -TENSORS["a"]}, directory / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_single_file_reads_as_written(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = index_safetensors(tmp_path)
    assert set(index.tensors) == set(TENSORS)
    checkpoint = Checkpoint(index)
    for name, wanted in TENSORS.items():
        found = checkpoint.read(name)
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert np.array_equal(found, wanted)
    assert checkpoint.bytes_read == sum(tensor.nbytes for tensor in TENSORS.values())


def test_the_index_wins(tmp_path):
    """C48: a stray file or a second copy of a tensor merged into the model."""
    shards(tmp_path)
    save_file({"stray": TENSORS["a"]}, tmp_path / "model.safetensors")
    write(tmp_path / "broken.safetensors", b"", length=2**60)
    index = index_safetensors(tmp_path)
    assert set(index.tensors) == {"a", "b.weight"}
    assert np.array_equal(Checkpoint(index).read("a"), TENSORS["a"])


def test_missing_shards_are_all_named(tmp_path):
    """C45: a model that starts with random weights where a shard is missing."""
    shards(tmp_path)
    for file in tmp_path.glob("model-*.safetensors"):
        file.unlink()
    with pytest.raises(LoadError, match=r"00001-of-00002.safetensors, model-00002-of-00002.safetensors"):
        index_safetensors(tmp_path)


def test_a_stale_index_names_tensor_and_shard(tmp_path):
    """C48: an index of another version of the model."""
    shards(tmp_path)
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(file.read_text().replace('"b.weight"', '"c.weight"'))
    with pytest.raises(LoadError, match=r"00002-of-00002.*'c\.weight'"):
        index_safetensors(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\udcff"]
)
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(LoadError, match="index"):
        index_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "pytorch_model.bin", ""])
def test_shards_lie_beside_the_index(tmp_path, name):
    """A path out of the directory, or a pickle named as a shard."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(LoadError, match=r"is not the name of a \.safetensors file"):
        index_safetensors(tmp_path)


def test_directories_without_safetensors_say_what_to_do(tmp_path):
    with pytest.raises(LoadError, match="holds no"):
        index_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(LoadError, match="convert"):
        index_safetensors(tmp_path)
    for number in "12":
        save_file(TENSORS, tmp_path / f"part{number}.safetensors")
    with pytest.raises(LoadError, match=r"without model\.safetensors\.index\.json"):
        index_safetensors(tmp_path)


HOSTILE = {
    "empty header": (b"", b""),
    "no JSON": (b"\x00" * 8, b""),
    "deep JSON": (b'{"a":' * 50_000, b""),
    "a list": ([], b""),
    "no entry": ({"a": 5}, b"12345678"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, b"12345678"),
    "unknown dtype": ({"a": entry("F7")}, b"12345678"),
    "dtype of another kind": ({"a": entry(3)}, b"12345678"),
    "negative dim": ({"a": entry(shape=[-2])}, b"12345678"),
    "huge dim": ({"a": entry(shape=[2**62, 4])}, b"12345678"),
    "overflowing product": ({"a": entry(shape=[2**32, 2**32])}, b"12345678"),
    "many dims": ({"a": entry(shape=[1] * 1000 + [2])}, b"12345678"),
    "fraction": ({"a": entry(shape=[2.5])}, b"12345678"),
    "size against shape": ({"a": entry(shape=[3])}, b"12345678"),
    "three offsets": ({"a": entry(offsets=[0, 8, 8])}, b"12345678"),
    "offset past the end": ({"a": entry(offsets=[8, 16])}, b"12345678"),
    "negative offset": ({"a": entry(offsets=[-8, 0])}, b"12345678"),
    "huge offset": ({"a": entry(offsets=[2**64, 2**64 + 8])}, b"12345678"),
    "backwards": ({"a": entry(offsets=[8, 0])}, b"12345678"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, b"x" * 12),
    "gap": ({"a": entry(), "b": entry(offsets=[12, 20])}, b"x" * 20),
    "twice": (b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"x" * 16),
    "too short": ({"a": entry()}, b"1234567"),
    "too long": ({"a": entry()}, b"123456789"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_lying_headers_are_refused(tmp_path, name):
    """R9: a number in the header believed."""
    header, data = HOSTILE[name]
    file = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(LoadError, match=str(file)):
        index_safetensors(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_lying_header_length(tmp_path, length):
    """R9: memory for a header of 2**63 bytes."""
    write(tmp_path / "model.safetensors", {"a": entry()}, b"12345678", length)
    with pytest.raises(LoadError, match="header"):
        index_safetensors(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    """C46: what a mapping shows past the end of a file are zeros, or a SIGBUS."""
    save_file({"a": np.ones((512, 1024), np.float32)}, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 2**20)
    with pytest.raises(LoadError, match=r"'a'.*truncated"):
        index_safetensors(tmp_path)


@pytest.mark.timeout(20)
def test_only_regular_files_are_read(tmp_path):
    """Opening a pipe would wait for ever."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="regular"):
        index_safetensors(tmp_path)


def test_mutants(tmp_path):
    """R9: whatever bits flip and wherever the file ends, it loads or is refused: fast, in little memory."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    original = (tmp_path / "model.safetensors").read_bytes()
    generator = random.Random(9)
    refused = []
    tracemalloc.start()
    for number in range(400):
        data = bytearray(original)
        if number % 4 == 0:
            del data[generator.randrange(len(data)) :]
        else:
            for _ in range(generator.choice((1, 1, 2, 8))):
                data[generator.randrange(min(len(data), 400))] ^= 1 << generator.randrange(8)
        (tmp_path / "model.safetensors").write_bytes(data)
        start = time.thread_time()
        try:
            checkpoint = Checkpoint(index_safetensors(tmp_path))
            for name in checkpoint.index.tensors:
                checkpoint.read(name)
            checkpoint.close()
        except LoadError as error:
            refused.append(str(error))
        assert time.thread_time() - start < 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6
    assert all("model.safetensors" in reason for reason in refused)
    assert 100 < len(refused) < 400
