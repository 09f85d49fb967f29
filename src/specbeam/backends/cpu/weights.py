"""Weights in the layouts of the kernels: packed from a checkpoint once, then mapped from a file on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.cpu.library import library
from specbeam.backends.cpu.model import bytes_of_slot
from specbeam.checkpoints.checkpoint import NUMBERS, Checkpoint, Piece, Table, read_all
from specbeam.checkpoints.files import Extent, fingerprint
from specbeam.checkpoints.parameters import not_finite, parameters, shares_read
from specbeam.checkpoints.sources import packed
from specbeam.errors import SpecbeamError
from specbeam.system.machine import keep_in_memory, usable_memory, usable_processors

logger = logging.getLogger("specbeam")

LAYOUT_VERSION = 5
"""Of the packed files. A file of another version is packed again: before 5, its header had no digest."""
NOT_FINITE = -2
"""As in native/api.cpp."""
FILE_MAGIC, PAGE_BYTES, ALIGNMENT_BYTES = b"specbeam", 4096, 64
PIECE_ELEMENTS = 1 << 22
"""The elements that a thread quantizes at once."""
MIN_FILE_BYTES = 1 << 25
"""Smaller weights are packed at each load: a file would save too little time."""
USUAL_CONTEXT = 4096
"""The tokens of context that the memory of a model is stated for."""
MODES = ("keep", "int8", "int4", "float32")


@dataclass(frozen=True)
class Part:
    """One matrix in its format, or one vector of float32, with 1 row.

    Attributes:
        name: the parameter it belongs to. The parts of a parameter are stacked along their rows.
        source: the name of the checkpoint's tensor.
        raw: whether the blocks of the GGUF file keep their values.
        offset, size: of its bytes in the packed data.
        matrices: how many of this size there are, one after the other: one for each expert.
    """

    name: str
    source: str
    format: int
    rows: int
    columns: int
    raw: bool
    offset: int
    size: int
    matrices: int = 1

    @property
    def is_vector(self) -> bool:
        """A matrix has whole blocks of 16 rows, even if there is only one row."""
        return self.size == 4 * self.columns

    @property
    def stated(self) -> dict[str, Any]:
        """Its fields as the header of a packed file has them: without ``matrices`` where there is one."""
        return {name: value for name, value in asdict(self).items() if name != "matrices" or value != 1}


class Weights:
    """All parameters of a model, packed.

    Args:
        tables: the parameters that stay in the checkpoint's files, by their names.
        digest: of the packed bytes and the tables, if an earlier load has computed it.

    Attributes:
        parts: the parts of each parameter, by its name.
        tables: as given, each with its bytes, mapped.
        digest: of the bytes and the shapes of all parts and tables. Equal models have the same one, however their files
            differ.
    """

    def __init__(
        self, parts: list[Part], tables: Mapping[str, Table], data: NDArray[np.uint8], digest: str | None = None
    ) -> None:
        self._data = data
        self.tables = {name: (table, table.mapped()) for name, table in tables.items()}
        self.digest = _digest(parts, tables, data) if digest is None else digest
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self.parts: dict[str, list[Part]] = {}
        for part in parts:
            self.parts.setdefault(part.name, []).append(part)

    def digest_of(self, prefix: str) -> str:
        """A digest of the parameters whose names begin so. In how many tensors a file has them does not matter."""

        def hashed(name: str) -> str:
            parts, content = self.parts[name], hashlib.sha256()
            for part in parts:
                content.update(self._data[part.offset : part.offset + part.size].data)
            weights = sum(part.rows * part.columns for part in parts)
            return f"{name} {sorted({part.format for part in parts})} {weights} {content.hexdigest()}\n"

        with ThreadPoolExecutor(usable_processors()) as threads:
            about = threads.map(hashed, sorted(name for name in self.parts if name.startswith(prefix)))
            return hashlib.sha256("".join(about).encode()).hexdigest()

    def address(self, part: Part) -> int:
        """The address of a part's bytes, valid while this object lives."""
        return int(self._data.ctypes.data) + part.offset

    def vector(self, name: str) -> NDArray[np.float32]:
        """A float32 parameter [n]. The array lives as long as this object."""
        parts = [self._data[p.offset : p.offset + p.size].view(np.float32) for p in self.parts[name]]
        return self._vectors.setdefault(name, parts[0] if len(parts) == 1 else np.concatenate(parts))


def load_weights(checkpoint: Checkpoint, mode: str) -> Weights:
    """A checkpoint's parameters, packed. They come from the file of an earlier load, if it exists and is not damaged.

    Args:
        mode: "keep", "int8", "int4" or "float32". "keep" takes the blocks of a quantized GGUF file with the same
            values, and other tensors in float32. Blocks without a format here, such as Q3_K, become int8. "int8" is
            groups of 32 with a scale. "int4" is groups of 32 with a scale and a minimum, but int8 for embedding and
            head. In both, MXFP4 keeps its values.

    Raises:
        SpecbeamError: a tensor is missing or unknown, the configuration asks for another shape, weights are not finite,
            or all of them are larger than the memory.
    """
    tables = _tables(checkpoint)
    plan, size = _plan(checkpoint, mode)
    if size > (memory := usable_memory().total):
        raise SpecbeamError(
            f"{checkpoint.path}: the weights take {size / 1e9:.3g} GB with quantize={mode!r}, and this process may use "
            f"{memory / 1e9:.3g} GB of memory: load it in fewer bits, or give a smaller model",
            option="quantize",
        )
    if mode == "float32" or size < MIN_FILE_BYTES:  # float32 weights would copy the checkpoint
        return Weights(plan, tables, _pack(checkpoint, plan, _room(size)))
    path = _path(checkpoint, mode)
    found = _read(path, plan, tables, size)
    return found if found is not None else _write(path, checkpoint, plan, tables, size)


def _digest(parts: list[Part], tables: Mapping[str, Table], data: NDArray[np.uint8]) -> str:
    """SHA-256 over the parts and the tables. They are hashed on all cores, one at a time each."""

    def hashed(part: Part) -> str:
        content = hashlib.sha256(data[part.offset : part.offset + part.size].data).hexdigest()
        return f"{part.name} {part.format} {part.matrices * part.rows} {part.columns} {content}\n"

    with ThreadPoolExecutor(usable_processors()) as threads:
        of_tables = threads.map(lambda name: f"{name} {tables[name].digest()}\n", sorted(tables))
        return hashlib.sha256("".join([*threads.map(hashed, parts), *of_tables]).encode()).hexdigest()


def _tables(checkpoint: Checkpoint) -> dict[str, Table]:
    """The parameters that stay in the checkpoint's files. Types that no kernel reads are packed, like other weights."""
    found = {}
    for name in (name for name, one in parameters(checkpoint.config).items() if one.mapped):
        for source in checkpoint.sources(name):
            table = checkpoint.table(source) if source in checkpoint.shapes else None
            if table is not None and (table.kind in NUMBERS.values() or library().specbeam_format_of(table.kind) >= 0):
                found[name] = table
    return found


def packed_bytes(checkpoint: Checkpoint, mode: str) -> int:
    """The memory that :func:`load_weights` will take, in bytes, without tables in files. Only headers are read."""
    return _plan(checkpoint, mode)[1]


def memory_bytes(checkpoint: Checkpoint, mode: str, tokens: int = USUAL_CONTEXT) -> int:
    """The packed weights, and the keys and values of one text of this many tokens, in bytes.

    Python and the tokenizer come on top: 60 to 200 MB. Nothing is read but headers.

    Raises:
        SpecbeamError: the checkpoint cannot be run on the cpu backend.
    """
    config = checkpoint.config
    slot_bytes = bytes_of_slot(library(), config, integer_cache=mode != "float32")
    source = 0 if config.encoder is None else config.encoder.context_length
    return packed_bytes(checkpoint, mode) + (min(tokens, config.context_length) + source) * slot_bytes


def bytes_per_token(checkpoint: Checkpoint, mode: str) -> int:
    """The weights that a decode step of one sequence reads, in bytes. Nothing is read but headers."""
    shares = shares_read(checkpoint.config)
    return round(sum(shares[part.name] * part.size for part in _plan(checkpoint, mode)[0]))


def _plan(checkpoint: Checkpoint, mode: str) -> tuple[list[Part], int]:
    """The parts of all parameters, and their size in bytes."""
    described = parameters(checkpoint.config)
    checkpoint.check_tensors(described)
    formats = library().enums["Format"]
    f32, q8, q4, mxfp4 = (formats[name] for name in ("f32_rows", "q8", "q4_min", "mxfp4"))
    parts, offset, tables = [], 0, _tables(checkpoint)
    for name, parameter in described.items():
        if name in tables:
            continue
        shape, min_bits = parameter.shape, parameter.min_bits
        for source in checkpoint.sources(name):
            *matrices, rows = checkpoint.shape(source)[: max(1, len(shape) - 1)]
            if len(shape) == 1:
                parts.append(Part(name, source, f32, 1, rows, False, offset, 4 * rows))
            else:
                kind = checkpoint.blocks(source)
                own = -1 if kind is None else library().specbeam_format_of(kind)
                kept = own >= 0 if mode == "keep" else own == mxfp4 and mode != "float32"
                raw = kept and min_bits < 32
                other = q8 if kind is not None else f32  # a quantized file is too large in float32
                chosen = own if raw else {"keep": other, "int8": q8, "int4": q4 if min_bits < 8 else q8}.get(mode, f32)
                chosen = f32 if min_bits == 32 else chosen
                count = prod(matrices)
                size = count * library().specbeam_matrix_bytes(chosen, rows, shape[-1])
                parts.append(Part(name, source, chosen, rows, shape[-1], raw, offset, size, count))
            offset += -(-parts[-1].size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return parts, offset


def _room(size: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)


def _pack(checkpoint: Checkpoint, plan: list[Part], data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack all parts into ``data``."""
    parts = ((part, data[part.offset : part.offset + part.size]) for part in plan)
    read_all([piece for part, out in parts for piece in _pieces(checkpoint, part, out)], "packing weights")
    return data


def _pieces(checkpoint: Checkpoint, part: Part, out: NDArray[np.uint8]) -> Iterator[Piece]:
    """Jobs that pack a part. Each job fills some rows of a matrix, or a whole vector."""
    if part.is_vector:

        def vector() -> None:
            values = _floats(checkpoint, part.source, 0, part.columns)
            if not np.isfinite(values).all():
                raise not_finite(*checkpoint.place(part.source))
            out[:] = values.view(np.uint8)

        yield part.columns, vector
        return
    matrix_size = part.size // part.matrices
    block_size = matrix_size // -(-part.rows // 16)
    step = max(1, PIECE_ELEMENTS // (16 * part.columns)) * 16  # whole blocks
    for number, start in product(range(part.matrices), range(0, part.rows, step)):
        stop = min(start + step, part.rows)

        def fill(number: int = number, start: int = start, stop: int = stop) -> None:
            own = out[number * matrix_size : (number + 1) * matrix_size]
            first, to = number * part.rows, own[start // 16 * block_size :]
            if part.raw and (order := checkpoint.order(part.source)) is not None:
                data = checkpoint.raw(part.source, 0, part.rows)
                status = library().specbeam_pack(
                    checkpoint.blocks(part.source),
                    data.ctypes.data,
                    data.size,
                    part.rows,
                    part.columns,
                    order.ctypes.data,
                    start // 16,
                    -(-stop // 16),
                    own.ctypes.data,
                )
            elif part.raw:
                data, rows = checkpoint.raw(part.source, first + start, first + stop), stop - start
                kind, blocks = checkpoint.blocks(part.source), -(-rows // 16)
                status = library().specbeam_pack(
                    kind, data.ctypes.data, data.size, rows, part.columns, None, 0, blocks, to.ctypes.data
                )
            else:
                values = _floats(checkpoint, part.source, first + start, first + stop)
                status = library().specbeam_quantize(
                    part.format, values.ctypes.data, stop - start, part.columns, to.ctypes.data
                )
            if status == NOT_FINITE:
                if part.raw or not np.isfinite(values).all():
                    raise not_finite(*checkpoint.place(part.source))
                maximum = np.abs(values).max()
                raise SpecbeamError(
                    f"{checkpoint.path}: tensor {part.source} has weights of up to {maximum:.3g}, too large for int8 "
                    "and int4: load it with dtype='float32'",
                    option="dtype",
                )
            if status:
                raise SpecbeamError(f"{checkpoint.path}: tensor {part.source} cannot be packed: its size is wrong")

        yield (stop - start) * part.columns, fill


def _floats(checkpoint: Checkpoint, source: str, start: int, stop: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(checkpoint.read(source, start, stop))


def _path(checkpoint: Checkpoint, mode: str) -> Path:
    """The file of packed weights for the current content of a checkpoint's files."""
    extents = checkpoint.extents
    files = [(str(file.resolve()), file.stat().st_mtime_ns) for file, _ in extents]
    facts = (LAYOUT_VERSION, mode, files, fingerprint(extents), checkpoint.config)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return packed.folder() / f"{packed.label(checkpoint.path)}-{mode}-{key}{packed.SUFFIX}"


def _read(path: Path, plan: list[Part], tables: Mapping[str, Table], size: int) -> Weights | None:
    """The packed weights in a file, mapped. None if the file is missing or damaged.

    Only sampled blocks are read here: the weights of a large model come from the disk as passes need them.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
            length = int.from_bytes(head[8:], "little")
            if head[:8] != FILE_MAGIC or length > 1 << 26:
                raise ValueError("its header is wrong")
            header, start = json.loads(file.read(length)), _data_start(length)
            if header["parts"] != [part.stated for part in plan]:
                raise ValueError("it holds other tensors")
            if os.fstat(file.fileno()).st_size != start + size:
                raise ValueError("its size is wrong")
            if header["fingerprint"] != _fingerprint(path, plan, start):
                raise ValueError("its content is wrong")
            digest = str(header["digest"])
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("%s is damaged (%s) and is packed again", path, error)
        return None
    packed.note_use(path)
    keep_in_memory(mapping, path)
    return Weights(plan, tables, np.frombuffer(mapping, np.uint8)[start:], digest)


def _write(path: Path, checkpoint: Checkpoint, plan: list[Part], tables: Mapping[str, Table], size: int) -> Weights:
    """Pack into a file, which gets its name when it is complete. Without a writable folder, pack into memory."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with packed.lock(path):
            found = _read(path, plan, tables, size)  # another process may have packed it meanwhile
            if found is None:
                found = _write_alone(path, checkpoint, plan, tables, size)
        packed.evict(keep=path)
        return found
    except OSError as error:
        problem = "packed weights cannot be kept in %s (%s): set SPECBEAM_HOME to a writable folder"
        logger.warning(problem, path.parent, error.strerror)
        return Weights(plan, tables, _pack(checkpoint, plan, _room(size)))


def _write_alone(
    path: Path, checkpoint: Checkpoint, plan: list[Part], tables: Mapping[str, Table], size: int
) -> Weights:
    """Pack into a file and map it. The caller holds the lock."""
    new, start = packed.unfinished(path), _data_start(len(_header(plan, "", "")))
    try:
        with new.open("w+b") as file:
            # A full disk is an error here. Later, a write to the mapping would kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, start + size)
            else:
                file.truncate(start + size)
            mapped = mmap.mmap(file.fileno(), start + size)
            data = _pack(checkpoint, plan, np.frombuffer(mapped, np.uint8)[start:])
            header = _header(plan, _fingerprint(new, plan, start), _digest(plan, tables, data))
            mapped[: 16 + len(header)] = FILE_MAGIC + len(header).to_bytes(8, "little") + header
            # After a power failure it must not be there under its name without its content.
            mapped.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    found = _read(path, plan, tables, size)
    if found is None:
        raise SpecbeamError(f"{path} was damaged while it was written: check the disk")
    return found


def _data_start(header: int) -> int:
    return -(-(16 + header) // PAGE_BYTES) * PAGE_BYTES


def _header(parts: list[Part], fingerprint: str, digest: str) -> bytes:
    """The header, whose length does not depend on the digests. The fingerprint is of samples, the digest of all."""
    digests = {"fingerprint": f"{fingerprint:32}", "digest": f"{digest:64}"}
    return json.dumps({**digests, "parts": [part.stated for part in parts]}).encode()


def _fingerprint(path: Path, parts: list[Part], start: int) -> str:
    return fingerprint([(path, [Extent(start + part.offset, part.size) for part in parts])])
