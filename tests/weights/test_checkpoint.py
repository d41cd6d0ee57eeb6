"""Exact reads: any box of any format is what slicing the whole gives, and only its bytes are read."""

import os
import struct
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardwise.weights import checkpoint as module
from shardwise.weights.checkpoint import BLOCKS, DENSE, Checkpoint, Index, LoadError, TensorInfo, cell
from shardwise.weights.gguf import TENSOR_TYPES, read_gguf
from shardwise.weights.safetensors import index_safetensors

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

ROWS, COLS = 6, 768


def stored(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a tensor in a format, one row a row, and its numbers as the gguf package reads them."""
    generator = np.random.default_rng(list(dtype.encode()))
    if dtype in DENSE:
        whole = generator.integers(0, 256, (ROWS, COLS * cell(dtype)[1]), dtype=np.uint8)
        return whole, whole.view(DENSE[dtype])
    numbers = generator.normal(size=(ROWS, COLS)).astype(np.float32)
    try:
        raw = gguf.quants.quantize(numbers, Kind[dtype])
    except NotImplementedError:
        block, size = BLOCKS[dtype]
        raw = generator.integers(0, 256, (ROWS, COLS // block * size), dtype=np.uint8)
    return raw, gguf.quants.dequantize(raw, Kind[dtype])


def lay(path: Path, dtype: str, shape: list[int], raw: np.ndarray) -> Checkpoint:
    path.write_bytes(b"before" + raw.tobytes() + b"after")
    return Checkpoint(Index([str(path)], {"t": TensorInfo(0, 6, shape, dtype)}))


SPANS = [None, (0, COLS), (0, 1), (256, 512), (5, 261), (255, 257), (300, 300), (40, 760), (767, 768)]


@pytest.mark.parametrize("dtype", [*DENSE, *BLOCKS])
def test_a_box_is_a_slice_of_the_whole(tmp_path, dtype):
    """A wrong stride or block reads a neighbour's numbers, which nothing downstream would notice."""
    raw, whole = stored(dtype)
    checkpoint = lay(tmp_path / "file", dtype, [ROWS, COLS], raw)
    for rows, cols in product((None, (0, 1), (2, 5), (3, 3)), SPANS):
        found = checkpoint.read("t", rows, cols)
        wanted = whole[slice(*(rows or (None,))), slice(*(cols or (None,)))]
        assert found.dtype == wanted.dtype
        assert found.flags.c_contiguous
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()
    checkpoint.close()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_boxes_of_any_dimension(tmp_path_factory, data):
    """Experts' weights have three dimensions, biases one."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    path = tmp_path_factory.getbasetemp() / "box"
    checkpoint = lay(path, "F32", shape, whole)
    spans = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        start = data.draw(st.integers(0, size))
        spans.append(data.draw(st.sampled_from([None, (start, data.draw(st.integers(start, size)))])))
    found = checkpoint.read("t", *spans)
    assert np.array_equal(found, whole[tuple(slice(*(span or (None,))) for span in spans)])
    assert found.nbytes <= checkpoint.bytes_read <= whole.nbytes if found.size else checkpoint.bytes_read == 0
    checkpoint.close()


def test_only_the_bytes_asked_for_are_read(tmp_path, monkeypatch):
    """A rank of many must not read the whole model, and the count must be the disk's."""
    raw, _ = stored("F32")
    checkpoint = lay(tmp_path / "file", "F32", [ROWS, COLS], raw)
    real, seen = os.preadv, []

    def counted(descriptor: int, buffers: list, offset: int) -> int:
        seen.append(real(descriptor, buffers, offset))
        return seen[-1]

    monkeypatch.setattr(os, "preadv", counted)

    def cost(*spans: tuple[int, int] | None) -> tuple[int, int]:
        before, calls = checkpoint.bytes_read, len(seen)
        checkpoint.read("t", *spans)
        assert checkpoint.bytes_read - before == sum(seen[calls:])
        return checkpoint.bytes_read - before, len(seen) - calls

    assert cost() == (ROWS * COLS * 4, 1)
    assert cost((1, 3)) == (2 * COLS * 4, 1)
    assert cost(None, (0, 384)) == (ROWS * 384 * 4, ROWS)
    assert cost((1, 3), (0, 384)) == (2 * 384 * 4, 2)
    assert cost(None, (0, 576)) == (ROWS * COLS * 4, 1)  # three quarters of the row: one read of it all
    quantised = lay(tmp_path / "quantised", "Q4_1", [ROWS, COLS], stored("Q4_1")[0])
    quantised.read("t", (0, 2), (31, 65))
    assert quantised.bytes_read == 2 * 3 * 20


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """Linux returns at most 2 GiB a call, and network disks less."""
    raw, whole = stored("F32")
    checkpoint = lay(tmp_path / "file", "F32", [ROWS, COLS], raw)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:100]], at))
    assert checkpoint.read("t").tobytes() == whole.tobytes()


def test_a_file_cut_after_it_was_indexed(tmp_path):
    """R34: another process truncates the file; a mapping would kill us."""
    save_file({"a": np.ones(1000, np.float32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(index_safetensors(tmp_path))
    checkpoint.read("a", (0, 10))
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(LoadError, match=r"model\.safetensors: tensor 'a': .*cut short"):
        checkpoint.read("a")


def test_disk_errors_name_file_and_tensor(tmp_path, monkeypatch):
    """R33: EIO in the middle of a load."""
    checkpoint = lay(tmp_path / "file", "F32", [ROWS, COLS], stored("F32")[0])

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(LoadError, match="file: tensor 't': Input/output error"):
        checkpoint.read("t")


def test_a_vanished_file_and_an_unknown_tensor(tmp_path):
    checkpoint = lay(tmp_path / "file", "F32", [ROWS, COLS], stored("F32")[0])
    with pytest.raises(LoadError, match=r"'other' is not in .*file"):
        checkpoint.read("other")
    (tmp_path / "file").unlink()
    with pytest.raises(LoadError, match="file: cannot be opened: No such file"):
        checkpoint.read("t")


def test_the_tables_are_the_gguf_packages():
    """A block size or type number mistyped."""
    for number, name in TENSOR_TYPES.items():
        assert Kind[name] == number
        assert gguf.GGML_QUANT_SIZES[Kind[name]] == cell(name)
    assert set(BLOCKS) <= set(TENSOR_TYPES.values())


def test_dequantising_in_pieces_is_dequantising(tmp_path, monkeypatch):
    """The last piece is shorter than the others."""
    raw, whole = stored("Q6_K")
    monkeypatch.setattr(module, "DEQUANTISE_BYTES", 5 * 210)
    assert lay(tmp_path / "file", "Q6_K", [ROWS, COLS], raw).read("t").tobytes() == whole.tobytes()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.Q4_1])
def test_gguf_files_of_its_own_writer(tmp_path, kind):
    """The whole way, from a file that another program wrote: order of dimensions, offsets, alignment."""
    numbers = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    raw = gguf.quants.quantize(numbers, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("first", np.ones(3, np.float32))
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, index = read_gguf(tmp_path / "m.gguf")
    assert index.tensors["t"].shape == [5, 64]
    found = Checkpoint(index).read("t", (1, 4), (3, 40))
    if kind is Kind.BF16:
        found = (found.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found.astype(np.float32), gguf.quants.dequantize(raw, kind)[1:4, 3:40])


def test_bfloat16_is_its_bits(tmp_path):
    """numpy has no bfloat16, and widening it would double the memory."""
    bits = struct.pack("<2H", 0x3F80, 0xC000)
    checkpoint = lay(tmp_path / "file", "BF16", [2], np.frombuffer(bits, np.uint8))
    assert checkpoint.read("t").tolist() == [0x3F80, 0xC000]
