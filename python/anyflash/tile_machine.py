"""The tile machine: a simulated processor of many tiles with small private memories. docs/tile-machine.md is its guide.

from anyflash import tile_machine as tm
report = tm.predict((1, 16, 4096, 128), rule=af.causal())
print(report)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike, fspath
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _core
from ._core import Rule, echoed
from ._frontend import truth, unexpected
from ._options import Scalars, check_names, constants, integer_of_64_bits, number, with_scalars

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Candidate",
    "Choice",
    "Machine",
    "Phase",
    "Report",
    "Step",
    "candidates",
    "machine",
    "machine_names",
    "parse_machine",
    "predict",
    "product_cycles",
    "read_machine",
    "step_cycles",
    "use",
]


_IN_NAMES = frozenset(ascii_letters + digits + " -_.()")


def _text(name: str, value: Any) -> str:
    """A text that C++ can have: surrogates are refused."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: type {echoed(type(value).__name__)}, expected str")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{name}: {echoed(repr(value))}, expected a text without surrogates")
    return value


def _check_members(given: Any) -> None:
    """Makes the members of a machine or a choice Python's own numbers. TypeError or ValueError names a member."""
    checks = {"str": _text, "int": integer_of_64_bits, "float": number, "bool": truth}
    for one in fields(given):
        object.__setattr__(given, one.name, checks[str(one.type)](one.name, getattr(given, one.name)))


@dataclass(frozen=True)
class Machine:
    """A machine of tiles; the defaults are those of an IPU Mk2. include/anyflash/tile_machine.h says what each number
    is. dataclasses.replace makes one that differs."""

    name: str = "ipu-mk2"
    tiles: int = 1472
    memory_per_tile: int = 624 * 1024
    reserved_per_tile: int = 0
    clock_hz: float = 1.33e9
    multiply_adds_float16: float = 64
    multiply_adds_float32: float = 16
    unit_rows: int = 1
    unit_columns: int = 16
    unit_depth: int = 16
    unit_load_cycles: float = 16
    unit_start_cycles: float = 0
    exp_per_cycle: float = 1
    vector_per_cycle: float = 4
    exp_per_cycle_float32: float = 1 / 3
    vector_per_cycle_float32: float = 2
    exchange_bytes_per_cycle: float = 4
    sync_cycles: float = 600
    workers: int = 6
    separate_vector: bool = False
    overlap: bool = False
    mesh_rows: int = 0
    mesh_columns: int = 0
    hop_cycles: float = 0
    memory_bytes_per_cycle: float = 0

    def __post_init__(self) -> None:
        _check_members(self)
        if not set(self.name) <= _IN_NAMES:
            raise ValueError(f"name: {echoed(repr(self.name))}, expected letters, digits, spaces and -_.()")

    def text(self) -> str:
        """The machine as a file of lines `key = value`."""

        def shown(value: Any) -> str:
            return str(value).lower() if isinstance(value, bool) else str(value)

        return "".join(f"{key} = {shown(value)}\n" for key, value in asdict(self).items())

    def peak(self, dtype: str = "float16") -> float:
        """Operations a second, two for each multiply-add."""
        rate = self.multiply_adds_float16 if dtype == "float16" else self.multiply_adds_float32
        return 2 * rate * self.tiles * self.clock_hz


@dataclass(frozen=True)
class Choice:
    """What a caller fixes of the mapping; 0: the planner chooses. num_chunks_q, num_chunks_kv and memory_budget are
    options of the call itself."""

    grid_rows: int = 0
    grid_columns: int = 0
    chunks_in_flight: int = 0

    def __post_init__(self) -> None:
        _check_members(self)


@dataclass(frozen=True)
class Phase:
    """One phase: exchange, then computation, then synchronization. Cycles are those of the slowest tile."""

    name: str
    compute_cycles: float
    exchange_cycles: float
    sync_cycles: float
    exchanged_bytes: int
    live_bytes_max: int
    live_bytes_mean: float

    @property
    def cycles(self) -> float:
        """Of all three, one after the other."""
        return self.compute_cycles + self.exchange_cycles + self.sync_cycles


@dataclass(frozen=True)
class Candidate:
    """A mapping that the planner considered.

    Attributes
    ----------
    num_chunks_q, num_chunks_kv : int
        The chunks of the queries and of the keys.
    grid_rows, grid_columns : int
        Tiles of one key head: rows share queries, columns share keys.
    chunks_in_flight : int
        The most key chunks that a tile receives in one phase.
    waves : int
        How many groups of heads are computed one after the other.
    compute_cycles, exchange_cycles, sync_cycles, cycles : float
        Cycles of the call's parts, and of the call.
    peak_bytes : int
        The most bytes that are live on a tile.
    fits : bool
        Whether no tile needs more than its memory.
    chosen : bool
        Whether the call takes this one.
    """

    num_chunks_q: int
    num_chunks_kv: int
    grid_rows: int
    grid_columns: int
    chunks_in_flight: int
    waves: int
    compute_cycles: float
    exchange_cycles: float
    sync_cycles: float
    cycles: float
    peak_bytes: int
    fits: bool
    chosen: bool

    @property
    def chunks(self) -> dict[str, int]:
        """Its numbers of chunks. The planner's own need not divide the sequences; those of a call must."""
        return dict(num_chunks_q=self.num_chunks_q, num_chunks_kv=self.num_chunks_kv)

    @property
    def choice(self) -> Choice:
        """What makes calls use this mapping, with `chunks` as options of the call."""
        return Choice(**{one.name: getattr(self, one.name) for one in fields(Choice)})


@dataclass(frozen=True)
class Report:
    """What a call does on the tile machine. include/anyflash/tile_machine.h says what each member is."""

    machine: Machine
    backward: bool
    dtype: str
    num_chunks_q: int
    num_chunks_kv: int
    grid_rows: int
    grid_columns: int
    chunks_in_flight: int
    head_groups_at_once: int
    waves: int
    cycles: float
    compute_cycles: float
    exchange_cycles: float
    sync_cycles: float
    seconds: float
    predicted_cycles: float
    exchanged_bytes: int
    peak_bytes: int
    peak_tile: int
    multiply_adds: float
    utilisation: float
    busy: float
    phases: tuple[Phase, ...]
    peak_bytes_of_tile: NDArray[np.int64]
    transfers: NDArray[np.int64]
    live_bytes: NDArray[np.int64]
    tile_compute_cycles: NDArray[np.float64]
    _made: Any = field(repr=False)

    def svg(self, picture: str = "all") -> str:
        """Pictures of the report as an SVG document: "all", "memory", "phases", "transfers" (after trace=True alone) or
        "live"."""
        drawn: str = self._made.svg(_text("picture", picture))
        return drawn

    def save(self, path: str | PathLike[str], picture: str = "all") -> None:
        """Writes them to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg(picture))

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.machine.name}, {self.machine.tiles} tiles, {self.dtype}",
                f"mapping      {self.num_chunks_q} chunks of queries, {self.num_chunks_kv} of keys; "
                f"{self.grid_rows} x {self.grid_columns} tiles a key head, {self.head_groups_at_once} at once, "
                f"{self.waves} waves",
                f"cycles       {self.cycles:,.0f} ({self.compute_cycles:,.0f} compute, {self.exchange_cycles:,.0f} "
                f"exchange, {self.sync_cycles:,.0f} synchronization)",
                f"time         {1e6 * self.seconds:,.1f} us, utilisation {self.utilisation:.1%}",
                f"exchanged    {self.exchanged_bytes:,} bytes in {len(self.phases):,} phases",
                f"memory       {self.peak_bytes:,} of {self.machine.memory_per_tile:,} bytes, on tile {self.peak_tile}",
            )
        )


def machine_names() -> list[str]:
    """The machines that come with the library."""
    return _core.tile_machine_names()


def machine(name: str = "ipu-mk2") -> Machine:
    """A machine that comes with the library, or that of a file. ValueError for other names."""
    return Machine(**_core.tile_machine(_text("name", name)))


def read_machine(path: str | PathLike[str]) -> Machine:
    """A machine from a file of lines `key = value`. ValueError names a key that is unknown, missing or absurd."""
    if not isinstance(path, (str, PathLike)):
        raise TypeError(f"path: type {echoed(type(path).__name__)}, expected a path")
    return Machine(**_core.read_tile_machine(_text("path", fspath(path))))


def parse_machine(text: str) -> Machine:
    """The same from text."""
    return Machine(**_core.parse_tile_machine(_text("text", text)))


def _machine(given: Machine | str) -> Machine:
    """Of a parameter `machine`."""
    if isinstance(given, Machine):
        return given
    if not isinstance(given, str):
        raise TypeError(f"machine: type {echoed(type(given).__name__)}, expected a Machine, a name or a file's path")
    return machine(_text("machine", given))


def _shape(name: str, given: Sequence[int]) -> list[int]:
    try:
        sizes = list(given)
    except Exception:
        raise TypeError(f"{name}: type {echoed(type(given).__name__)}, expected integers") from None
    if not 3 <= len(sizes) <= 6:
        raise ValueError(f"{name}: {len(sizes)} sizes, expected those of an array in the layout")
    return [integer_of_64_bits(name, size) for size in sizes]


def _numbers(choice: Choice) -> list[int]:
    if not isinstance(choice, Choice):
        raise TypeError(f"choice: type {echoed(type(choice).__name__)}, expected a Choice")
    return [getattr(choice, one.name) for one in fields(Choice)]


def _call(
    function: Any,
    scalars: Mapping[str, Any],
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None,
    d_v: int | None,
    dtype: str,
    backward: bool,
    machine: Machine | str,
    choice: Choice,
    trace: bool,
    return_lse: Any,
    dlse: bool,
    large_lse: bool,
    **options: Any,
) -> _core.TileCall:
    """options: the rule, and those that are arrays."""
    check_names(scalars, function)
    scalars = constants(scalars)
    keys = _shape("q_shape", q_shape) if k_shape is None else _shape("k_shape", k_shape)
    values = list(keys)
    if d_v is not None:
        transposed = scalars["layout"] == "bhds" and options["page_table"] is None
        values[2 if transposed else -1] = integer_of_64_bits("d_v", d_v)
    packed = scalars["layout"] == "qkv"
    return _core.TileCall(
        _machine(machine).text(),
        _numbers(choice),
        truth("trace", trace),
        _shape("q_shape", q_shape),
        None if packed and k_shape is None else keys,
        None if packed and d_v is None else values,
        _text("dtype", dtype),
        truth("backward", backward),
        return_lse,
        truth("dlse", dlse),
        truth("large_lse", large_lse),
        {name: value for name, value in {**options, **scalars}.items() if value is not None},
    )


@with_scalars
def predict(
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    *,
    d_v: int | None = None,
    dtype: str = "float16",
    backward: bool = False,
    machine: Machine | str = "ipu-mk2",
    choice: Choice = Choice(),
    trace: bool = False,
    return_lse: bool | Literal["lm"] = False,
    dlse: bool = False,
    large_lse: bool = False,
    rule: Rule | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_lengths: Any = None,
    page_table: Any = None,
    **scalars: Unpack[Scalars],
) -> Report:
    """What the planner expects of a call with arrays of these shapes, without computing it. The options are those of
    anyflash.attention. The report is within 5 % of the call's own if it is told all that the call is given.

    q_shape: (batch, heads, sequence..., channels), or that of another layout.
    k_shape: q_shape if not given; None with layout "qkv".
    d_v: channels of the values, those of the keys if not given.
    trace: fill `transfers` (from, to, bytes), `live_bytes` and `tile_compute_cycles` (phases, tiles) too.
    return_lse: what the call returns, as in anyflash.attention; "lm" needs more memory.
    dlse: whether the backward call is given a dlse.
    large_lse: whether the backward call's lse has a number of 32 or more, or -32 or less. The call then computes P once
    more, as it always does with deterministic. Only the forward call's result tells.
    memory_budget: the most bytes that are live on any tile.
    Raises ValueError as the call would: the least memory_budget that works. Raises MemoryError if nothing fits the
    machine: it names tile, phase and bytes.
    """
    call = _call(
        predict,
        scalars,
        q_shape,
        k_shape,
        d_v,
        dtype,
        backward,
        machine,
        choice,
        trace,
        return_lse,
        dlse,
        large_lse,
        rule=rule,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_lengths=key_lengths,
        page_table=page_table,
    )
    return _report(call.predicted())


def _report(found: dict[str, Any]) -> Report:
    found["machine"] = Machine(**found["machine"])
    found["phases"] = tuple(Phase(**one) for one in found["phases"])
    found["transfers"] = np.array(found["transfers"], dtype=np.int64).reshape(-1, 3)
    found["peak_bytes_of_tile"] = np.array(found["peak_bytes_of_tile"], dtype=np.int64)
    tiles = found["machine"].tiles
    found["live_bytes"] = np.array(found["live_bytes"], dtype=np.int64).reshape(-1, tiles)
    found["tile_compute_cycles"] = np.array(found["tile_compute_cycles"], dtype=np.float64).reshape(-1, tiles)
    return Report(**found)


@with_scalars
def candidates(
    q_shape: Sequence[int],
    k_shape: Sequence[int] | None = None,
    *,
    d_v: int | None = None,
    dtype: str = "float16",
    backward: bool = False,
    machine: Machine | str = "ipu-mk2",
    choice: Choice = Choice(),
    return_lse: bool | Literal["lm"] = False,
    dlse: bool = False,
    large_lse: bool = False,
    rule: Rule | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_lengths: Any = None,
    page_table: Any = None,
    **scalars: Unpack[Scalars],
) -> list[Candidate]:
    """All mappings that the planner considers for a call, best first, those that do not fit last. The arguments are
    those of predict."""
    call = _call(
        candidates,
        scalars,
        q_shape,
        k_shape,
        d_v,
        dtype,
        backward,
        machine,
        choice,
        False,
        return_lse,
        dlse,
        large_lse,
        rule=rule,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_lengths=key_lengths,
        page_table=page_table,
    )
    return [Candidate(**one) for one in call.candidates()]


class use:
    """Within this context the thread's calls with arrays on the CPU run on the tile machine.

        with tile_machine.use(tiles=16, memory_per_tile=256 * 1024) as used:
            out = af.attention(q, k, v)
        print(used.report)

    machine: a name, a file's path, or a Machine; `members` replace its own. choice: what is fixed of the mapping.
    trace: reports have `transfers`, `live_bytes` and `tile_compute_cycles` too. Each thread has its own machine.
    Contexts end in the opposite order of their beginning, in the thread that began them; RuntimeError otherwise.
    """

    def __init__(
        self, machine: Machine | str = "ipu-mk2", *, choice: Choice = Choice(), trace: bool = False, **members: Any
    ):
        for name in members:
            if name not in Machine.__dataclass_fields__:
                known = ["choice", "trace", *Machine.__dataclass_fields__]
                raise unexpected("use", name, known)
        self.machine = parse_machine(replace(_machine(machine), **members).text())
        self.choice = choice
        self._context = _core.TileContext(self.machine.text(), _numbers(choice), truth("trace", trace))
        self._thread: int | None = None  # in which it is open

    def __enter__(self) -> use:
        if self._thread is not None:
            raise RuntimeError("tile_machine.use: entered already, expected another context")
        self._context.forget()
        _core.run_on_tiles(self._context)
        self._thread = threading.get_ident()
        _opened().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        contexts = _opened()
        if self not in contexts:
            raise RuntimeError("tile_machine.use: not entered in this thread, or ended already")
        inner = contexts[contexts.index(self) + 1 :]
        for one in (self, *inner):
            contexts.remove(one)
            one._thread = None
        _core.run_on_tiles(contexts[-1]._context if contexts else None)
        if inner:
            raise RuntimeError("tile_machine.use: ended before a context inside it, which ended with it")

    @property
    def report(self) -> Report:
        """Of the last call inside this context. ValueError if there was none, or if it computed nothing."""
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError("tile_machine.use: open in another thread, expected its report after its end")
        return _report(self._context.report())


_of_thread = threading.local()


def _opened() -> list[use]:
    """The contexts that are open in this thread, from the outermost on."""
    found: list[use] = _of_thread.__dict__.setdefault("opened", [])
    return found


def product_cycles(machine: Machine | str, dtype: str, m: int, n: int, k: int) -> float:
    """Cycles of a tile for the product of (m, k) and (k, n) numbers, as planner and simulator count them.

    machine: a Machine or the name of one. dtype: "float16" or "float32". Raises ValueError or TypeError.
    """
    sizes = [integer_of_64_bits(name, size) for name, size in (("m", m), ("n", n), ("k", k))]
    return _core.tile_product_cycles(_machine(machine).text(), _text("dtype", dtype), *sizes)


class Step(NamedTuple):
    """Cycles of a tile for a step of the forward pass: its two products, and all of it."""

    products: float
    total: float


def step_cycles(machine: Machine | str, dtype: str, rows: int, keys: int, d_qk: int, d_v: int) -> Step:
    """Cycles of a tile for a step of the forward pass, in which `rows` queries meet `keys` keys, all of them visible.

    machine and dtype as in product_cycles. d_qk and d_v: channels of queries and keys, and of values. Raises ValueError
    or TypeError.
    """
    given = dict(rows=rows, keys=keys, d_qk=d_qk, d_v=d_v)
    sizes = [integer_of_64_bits(name, size) for name, size in given.items()]
    return Step(*_core.tile_step_cycles(_machine(machine).text(), _text("dtype", dtype), *sizes))
