"""Headers of GGUF files: as another program reads them, and hostile ones refused."""

import random
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from shardwise.weights.checkpoint import Checkpoint, LoadError
from shardwise.weights.gguf import MAX_ITEMS, read_gguf
from shardwise.weights.resolve import resolve

UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(name: str, kind: int, count: int, items: bytes = b"") -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", kind, count) + items)


def tensor(
    name: str = "t", dims: tuple[int, ...] = (2,), kind: int = 0, offset: int = 0, num: int | None = None
) -> bytes:
    head = text(name) + struct.pack("<I", len(dims) if num is None else num)
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def header(
    keys: list[bytes] = (), tensors: list[bytes] = (), version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join([*keys, *tensors])


def write(path: Path, data: bytes, body: int = 0) -> Path:
    file = path / "m.gguf"
    file.write_bytes(data + bytes(-len(data) % 32 + body))
    return file


ALIGNMENT = "general.alignment"
HOSTILE = {
    "empty": b"",
    "magic": b"GGML" + bytes(60),
    "only magic": b"GGUF",
    "version 1": header(version=1),
    "version 4": header(version=4),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "2**63 keys": header(counts=(0, 2**63)),
    "2**63 tensors": header(counts=(2**63, 0)),
    "more keys than there are": header(counts=(0, 5)),
    "string of 2**63 bytes": header([struct.pack("<Q", 2**63)], counts=(0, 1)),
    "string of 2**64-1 bytes": header([struct.pack("<Q", 2**64 - 1) + bytes(64)], counts=(0, 1)),
    "array of 2**63": header([array("a", UINT32, 2**63)]),
    "array of 2**62 strings": header([array("a", STRING, 2**62)]),
    "array past the end": header([array("a", UINT64, 1000)]),
    "nested arrays": header([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 1000)]),
    "array of unknown type": header([array("a", 77, 1, bytes(8))]),
    "unknown type": header([key("a", 13, bytes(8))]),
    "duplicate key": header([key("a", UINT32, bytes(4)), key("a", UINT32, bytes(4))]),
    "key that is no text": header([key(b"\xff\xfe", UINT32, bytes(4))]),
    "value that is no text": header([key("a", STRING, text(b"\xff"))]),
    "bad bool": header([key("a", BOOL, b"\x02")]),
    "alignment 0": header([key(ALIGNMENT, UINT32, struct.pack("<I", 0))]),
    "alignment 24": header([key(ALIGNMENT, UINT32, struct.pack("<I", 24))]),
    "alignment of a float": header([key(ALIGNMENT, FLOAT32, struct.pack("<f", 32))]),
    "alignment 2**63": header([key(ALIGNMENT, UINT64, struct.pack("<Q", 2**63))]),
    "0 dims": header([], [tensor(dims=())]),
    "5 dims": header([], [tensor(dims=(2,) * 5)]),
    "2**31 dims": header([], [tensor(num=2**31)]),
    "dim 0": header([], [tensor(dims=(2, 0))]),
    "overflowing dims": header([], [tensor(dims=(2**32, 2**32))]),
    "overflowing dims to 8": header([], [tensor(dims=(2**39,) * 4)]),
    "huge dim": header([], [tensor(dims=(2**63,))]),
    "broken block": header([], [tensor(dims=(33,), kind=2)]),
    "unknown tensor type": header([], [tensor(kind=99)]),
    "removed tensor type": header([], [tensor(kind=4)]),
    "duplicate tensor": header([], [tensor(), tensor(offset=32)]),
    "unaligned": header([], [tensor(offset=4)]),
    "offset past the end": header([], [tensor(offset=2**20)]),
    "offset 2**63": header([], [tensor(offset=2**63)]),
    "overlap": header([], [tensor(dims=(16,)), tensor("u", offset=32)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_lying_headers_are_refused(tmp_path, name):
    """R10: a number of the file believed: memory, time, or a read outside the tensor."""
    file = write(tmp_path, HOSTILE[name], body=64)
    tracemalloc.start()
    start = time.thread_time()
    with pytest.raises(LoadError, match=str(file)) as caught:
        read_gguf(file)
    assert time.thread_time() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 16e6
    tracemalloc.stop()
    assert len(str(caught.value)) < 1000


def test_errors_name_the_key_or_the_tensor(tmp_path):
    for data, name in [
        (header([key("general.name", 13, bytes(8))]), r"'general\.name'"),
        (header([], [tensor("blk.0.attn_q.weight", kind=99)]), r"'blk\.0\.attn_q\.weight'"),
        (header([key(ALIGNMENT, UINT32, struct.pack("<I", 24))]), r"'general\.alignment'.*24"),
    ]:
        with pytest.raises(LoadError, match=name):
            read_gguf(write(tmp_path, data, 64))


def test_items_are_bounded_even_where_the_file_bears_them_out(tmp_path):
    """A sparse file of zeros is any number of empty strings."""
    file = write(tmp_path, header([array("a", STRING, MAX_ITEMS + 1)]), body=0)
    with file.open("ab") as handle:
        handle.truncate(2**27)
    with pytest.raises(LoadError, match="more than a header may hold"):
        read_gguf(file)


def test_a_part_of_a_split_model_is_refused_with_the_remedy(tmp_path):
    """A third of the layers would load as a model."""
    with pytest.raises(LoadError, match=r"one of 3 parts.*--merge"):
        read_gguf(write(tmp_path, header([key("split.count", 2, struct.pack("<H", 3))])))
    read_gguf(write(tmp_path, header([key("split.count", 2, struct.pack("<H", 1))])))


def sample(path: Path) -> Path:
    writer = gguf.GGUFWriter(path / "sample.gguf", "llama")
    writer.add_uint8("k.u8", 255)
    writer.add_int8("k.i8", -128)
    writer.add_uint16("k.u16", 65535)
    writer.add_int16("k.i16", -32768)
    writer.add_uint32("k.u32", 2**32 - 1)
    writer.add_int32("k.i32", -(2**31))
    writer.add_uint64("k.u64", 2**64 - 1)
    writer.add_int64("k.i64", -(2**63))
    writer.add_float32("k.f32", 0.5)
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.yes", True)
    writer.add_string("k.text", "héllo 😀")
    writer.add_array("k.texts", ["a", "", "ü"])
    writer.add_array("k.numbers", [1, -2, 3])
    writer.add_array("k.floats", [0.5, -1.5])
    writer.add_array("k.flags", [True, False])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(3, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "sample.gguf"


def test_reads_what_another_program_wrote(tmp_path):
    """A sign, a width or an order of dimensions mistaken."""
    metadata, index = read_gguf(sample(tmp_path))
    found = {name[2:]: value for name, value in metadata.items() if name.startswith("k.")}
    assert found == {
        "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31), "u64": 2**64 - 1,
        "i64": -(2**63), "f32": 0.5, "f64": 0.1, "yes": True, "text": "héllo 😀", "texts": ["a", "", "ü"],
        "numbers": [1, -2, 3], "floats": [0.5, -1.5], "flags": [True, False],
    }  # fmt: skip
    assert found["yes"] is True
    assert metadata["general.architecture"] == "llama"
    checkpoint = Checkpoint(index)
    assert np.array_equal(checkpoint.read("matrix"), np.arange(12, dtype=np.float32).reshape(3, 4))
    assert np.array_equal(checkpoint.read("vector"), np.arange(3, dtype=np.float16))


def test_mutants(tmp_path):
    """R10: whatever bits flip and wherever the file ends, it loads or is refused: fast, in little memory."""
    original = sample(tmp_path).read_bytes()
    generator = random.Random(10)
    file = tmp_path / "mutant.gguf"
    refused = []
    tracemalloc.start()
    for number in range(500):
        data = bytearray(original)
        if number % 4 == 0:
            del data[generator.randrange(len(data)) :]
        elif number % 4 == 1:  # a whole field at once
            at = generator.randrange(len(data) - 8)
            data[at : at + 8] = struct.pack("<Q", generator.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)))
        else:
            for _ in range(generator.choice((1, 1, 2, 8))):
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        file.write_bytes(data)
        start = time.thread_time()
        try:
            checkpoint = Checkpoint(read_gguf(file)[1])
            for name in checkpoint.index.tensors:
                checkpoint.read(name)
            checkpoint.close()
        except LoadError as error:
            refused.append(str(error))
        assert time.thread_time() - start < 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6
    assert all("mutant.gguf" in reason for reason in refused)
    assert 100 < len(refused) < 500


def test_the_default_model_is_read_fast_and_whole():
    """gguf's own reader takes seconds on this header."""
    start = time.thread_time()
    metadata, index = read_gguf(resolve("smollm2").path)
    assert time.thread_time() - start < 1
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(index.tensors) == 272
    assert index.tensors["token_embd.weight"].shape == [49152, 576]
    assert index.tensors["blk.0.ffn_down.weight"].shape == [576, 1536]
