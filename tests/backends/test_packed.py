"""Packed weights: which file belongs to a checkpoint, what a load reads of it, and which files are kept."""

import gc
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock
from gguf import GGMLQuantizationType as Type

import specbeam
from specbeam import SpecbeamError
from specbeam.backends import devices
from specbeam.backends.cpu import weights
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.files import Extent, fingerprint
from specbeam.checkpoints.sources import packed
from specbeam.cli import main
from specbeam.system.machine import Memory, mapped_bytes
from tests.checkpoints.test_folder import change_tensors
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model


def loaded(source, quantize="int8"):
    return specbeam.load(source, backend="cpu", quantize=quantize, threads=1)


def tokens(lm):
    return specbeam.generate(lm, [1, 2], max_new_tokens=9).token_ids


@pytest.fixture(scope="module")
def folders(save):
    """Three models of the same sizes."""
    return [save(random_model("llama", seed=seed)) for seed in range(3)]


@pytest.fixture
def folder(folders):
    return folders[0]


def limit(monkeypatch, size):
    monkeypatch.setenv("SPECBEAM_PACKED_GB", str(size / 1e9))


def the_file(cached):
    (file,) = cached.glob("*.weights")
    return file


def test_the_second_load_maps_the_file(folder, cached, monkeypatch, caplog):
    first, file = tokens(loaded(folder)), the_file(cached)
    monkeypatch.setattr(weights, "_pack", None)
    assert tokens(loaded(folder)) == first
    assert the_file(cached) == file
    assert not caplog.text


def test_mapped_weights_leave_less_memory_for_caches(folder, cached, monkeypatch):
    """They count once, however often the file is mapped, and no longer than the models live."""
    loaded(folder)  # packs
    gc.collect()
    size, others = the_file(cached).stat().st_size, mapped_bytes()
    total = 100 * (size + others)
    monkeypatch.setattr(devices, "usable_memory", lambda mapped=0: Memory(total, 2 * size + others - mapped))

    def room():
        return devices.memory_for_caches("cpu")

    assert room() == int(0.8 * 2 * size)
    models = [loaded(folder), loaded(folder)]
    assert models[0].backend.memory_for_caches() == room() == int(0.8 * size)
    del models
    gc.collect()
    assert room() == int(0.8 * 2 * size)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:], id="a bit"),
        pytest.param(lambda whole: whole[:-64], id="cut"),
        pytest.param(lambda whole: whole + b"x", id="longer"),
        pytest.param(lambda whole: whole.replace(b'"rows"', b'"rowz"', 1), id="header"),
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: b"x" * 99, id="magic"),
    ],
)
def test_a_damaged_file_is_packed_again(folder, cached, caplog, damage):
    first, file = tokens(loaded(folder)), the_file(cached)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert tokens(loaded(folder)) == first
    assert "is damaged" in caplog.text
    assert file.read_bytes() == whole


def test_without_a_writable_folder_models_still_load(folder, cached, caplog):
    cached.parent.write_text("")
    assert tokens(loaded(folder))
    assert "set SPECBEAM_HOME" in caplog.text


# Which file


def replace_at_the_same_time(path, write):
    """Replace a file, and keep its size and time, as ``rsync -t`` and reproducible images do."""
    before = path.stat()
    write()
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"])
def test_a_model_that_differs_in_one_tensor_is_packed_anew(save, cached, name):
    folder = save(random_model("llama"))
    first, file = tokens(loaded(folder)), folder / "model.safetensors"
    replace_at_the_same_time(file, lambda: change_tensors(file, lambda those: those[name].neg_()))
    assert tokens(loaded(folder)) != first


def test_another_gguf_file_of_the_same_size_and_time_is_packed_anew(tmp_path, cached):
    models = [random_model("llama", seed=seed, hidden_size=64, intermediate_size=96) for seed in (0, 1)]
    one, two = (write_gguf(tmp_path / f"{seed}.gguf", model, Type.Q8_0) for seed, model in enumerate(models))
    first = tokens(loaded(one, "keep"))
    replace_at_the_same_time(one, lambda: shutil.copy(two, one))
    assert tokens(loaded(one, "keep")) == tokens(loaded(two, "keep")) != first


def test_a_file_has_the_name_of_its_model(save, cached, tmp_path):
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("a" * 40)
    shutil.copytree(save(random_model("llama")), snapshot)
    loaded(snapshot)
    long = tmp_path / ("Model 2.5 é" + "x" * 200)
    shutil.copytree(snapshot, long)
    loaded(long)
    names = {re.sub("-[0-9a-f]{16}.weights", "", file.name) for file in cached.glob("*.weights")}
    assert names == {"models--some--model-int8", "Model_2.5__" + "x" * 69 + "-int8"}
    assert packed.label(snapshot / "sub" / "m-Q4_K_M.gguf") == "models--some--model--m-Q4_K_M"


# What is read


def bytes_read():
    """By this process so far, from files."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_a_fingerprint_costs_the_same_for_files_of_all_sizes(tmp_path):
    read = []
    for size in (1 << 20, 1 << 34):  # with holes: on the disk they are empty
        path = tmp_path / str(size)
        path.touch()
        os.truncate(path, size)
        before = bytes_read()
        fingerprint([(path, [Extent(0, size)])])
        read.append(bytes_read() - before)
    assert read[0] == read[1] < 1 << 17  # the figure of /proc itself is in it


def test_a_fingerprint_sees_both_ends_and_the_middle(tmp_path):
    path, digests = tmp_path / "file", set()
    for places in ([], [0], [30_000], [60_000], [89_999]):
        path.write_bytes(bytes(at in places for at in range(90_000)))
        digests.add(fingerprint([(path, [Extent(0, 90_000)])]))
    assert len(digests) == 5


def test_a_load_reads_little_of_a_packed_file(save, cached):
    """The rest is mapped, and comes into memory when a pass needs it."""
    folder = save(random_model("llama", hidden_size=256, intermediate_size=2048, num_hidden_layers=2))
    checkpoint = open_checkpoint(folder)
    weights.load_weights(checkpoint, "int8")
    file, before = the_file(cached), bytes_read()
    held = weights.load_weights(checkpoint, "int8")
    assert bytes_read() - before < file.stat().st_size / 2
    (resident,) = re.findall(rf"{file.name}\nSize:.*?\nRss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.DOTALL)
    assert int(resident) * 1024 < file.stat().st_size / 10
    assert held.parts


# Which files are kept


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_the_umask_says_who_may_read_a_file(folder, cached, umask, mode):
    before = os.umask(umask)
    try:
        loaded(folder)
    finally:
        os.umask(before)
    assert the_file(cached).stat().st_mode & 0o777 == mode


def test_the_least_recently_used_files_go_first(folders, cached, monkeypatch):
    def names():
        return [folder.name for folder in folders if [*cached.glob(f"{folder.name}-int8-*.weights")]]

    def use(folder, now):
        lm = loaded(folder)
        (file,) = cached.glob(f"{folder.name}-int8-*.weights")
        os.utime(file, (now, now))  # two loads may be within one tick of the clock
        return lm

    first = use(folders[0], 1)
    expected, second = tokens(first), use(folders[1], 2)
    sizes = sum(file.size for file in packed.files())
    limit(monkeypatch, sizes)
    loaded(folders[0])  # now folders[1] is the least recently used
    use(folders[2], 4)
    assert names() == [folders[0].name, folders[2].name]
    assert tokens(second)  # a model whose file is gone goes on
    limit(monkeypatch, 1)
    loaded(folders[1])
    assert names() == [folders[1].name]  # the file in use stays, however small the limit
    assert tokens(first) == expected


def test_models_packed_shows_the_files_and_clears_them(folders, cached, monkeypatch, capsys):
    assert main(["models", "packed"]) == 0
    assert capsys.readouterr().out == ""
    limit(monkeypatch, 5e9)
    lm = loaded(folders[0])
    expected = tokens(lm)
    loaded(folders[1])
    assert main(["models", "packed"]) == 0
    shown = capsys.readouterr()
    names = [line.rsplit("-", 4)[0].split("-int8")[0] for line in shown.out.splitlines()]
    assert names == [folders[1].name, folders[0].name]
    assert "of at most 5,000 MB in" in shown.err
    (cached / ".killed-int8-0123456789abcdef.new").write_bytes(b"half")
    assert main(["models", "packed", "--clear"]) == 0
    assert [*cached.iterdir()] == []
    assert tokens(lm) == expected
    assert tokens(loaded(folders[0])) == expected


def test_a_file_that_is_being_packed_is_not_cleared(folder, cached):
    loaded(folder)
    file = the_file(cached)
    with FileLock(file.with_suffix(".lock")):
        assert packed.clear() == 0
    assert file.exists()
    assert packed.clear() > 0
    assert not file.exists()


def test_a_file_of_a_killed_process_is_written_over(folder, cached):
    expected, file = tokens(loaded(folder)), the_file(cached)
    file.unlink()
    file.with_name(f".{file.stem}.new").write_bytes(b"half" * 1_000_000)
    assert tokens(loaded(folder)) == expected
    assert not [*cached.glob(".*.new")]


def test_several_threads_may_pack_and_remove_at_once(folders, cached, monkeypatch):
    expected = [tokens(loaded(folder)) for folder in folders]
    limit(monkeypatch, 1)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda i: (i % 3, tokens(loaded(folders[i % 3]))), range(12))
        assert all(got == expected[i] for i, got in found)


@pytest.mark.parametrize("value", ["many", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_named(monkeypatch, value):
    monkeypatch.setenv("SPECBEAM_PACKED_GB", value)
    with pytest.raises(SpecbeamError, match=f"SPECBEAM_PACKED_GB='{value}' is not allowed: give a number of gigabytes"):
        packed.limit()
