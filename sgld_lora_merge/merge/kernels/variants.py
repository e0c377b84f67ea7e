"""Which kernel a merge is compiled to: what the targets of one launch have in common, and the tile measured best."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from sgld_lora_merge.merge.kernels import reference

OLDEST_CAPABILITY = (8, 0)  # has bfloat16 in its tensor cores

# Where the kernel adds up as eager torch does, so that fp16 mode is bit for bit the same; tests/gpu holds it to that.
# cuBLAS chooses its order by shape, and where the rows of A, B and W are whole 16 bytes it is the kernel's: of 31,000
# random merges with 85 G elements (H200, torch 2.11, CUDA 13.0, 2026-11-29) only some of ranks 2 to 6 differed.
EXACT_CAPABILITIES = frozenset({(9, 0)})
EXACT_RANKS = frozenset((1, *range(8, 513, 8)))

ALIGNMENT = reference.READABLE  # elements: 16 bytes of a 16-bit dtype, 32 of float32
LONGEST_STRIDE = 2**24  # elements; offsets inside a tile are 32-bit
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class TileConfig:
    """Tile of W0 per step of a program, its warps, and the depth of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


# By whether anything is float32, and by ranks, padded; the last of each kind is for passes over A: several terms, or
# more ranks than the table has. Times are multiples of the copy floor in fp32 / fp16 mode, with the statistics: 3.4 B
# bfloat16 parameters in Qwen-Image's shapes, H200, 2026-11-29, benchmarks/results/tune.md.
TILE_CONFIGS = {
    (False, 16): TileConfig(64, 128, 4, 4),  # 1.03 / 1.04
    (False, 32): TileConfig(64, 128, 4, 4),  # 1.03 / 1.03
    (False, 64): TileConfig(64, 128, 4, 4),  # 1.04 / 1.06; with 3 stages 1.05 / 1.07, 64 columns 1.09 / 1.09
    (False, 128): TileConfig(128, 128, 8, 3),  # 1.20 / 1.30; 64 x 64 1.28 / 1.36
    (False, 256): TileConfig(64, 128, 4, 3),  # 1.89 / 2.07
    (False, None): TileConfig(64, 128, 4, 3),
    (True, 16): TileConfig(64, 128, 4, 3),  # 1.06; 64 columns 1.12
    (True, 32): TileConfig(64, 128, 4, 3),  # 1.14; 64 columns 1.24
    (True, 64): TileConfig(64, 128, 4, 2),  # 1.73; 64 columns 2.04
    (True, 128): TileConfig(64, 64, 4, 2),  # 3.19; 128 x 64 3.68
    (True, None): TileConfig(64, 64, 4, 2),
}
NARROW = TileConfig(64, 64, 4, 4)  # weights of 320 columns: 1.19 / 1.26 at rank 32, where 128 columns take 1.31 / 1.41
NARROW_COLUMNS = 512
ROW_TILES = 12  # a program's walk at most; 24: 0 to 2 % slower at these shapes, 10 % at 1000 x 1544
CHUNK_RANKS = 64  # ranks of one pass over A
STREAMED_BYTES = 64 * 2**20  # of W0 from the host per launch; 16 to 128 MiB took 0.96 to 0.99 of the link (H200)


@dataclass(frozen=True)
class KernelVariant:
    """What all targets of one launch have in common. ``aligned``: every row starts at 16 bytes, and so does its end."""

    rows: int
    columns: int
    weight: torch.dtype
    a: torch.dtype
    b: torch.dtype
    ranks: tuple[int, ...]
    aligned: bool
    sequential: bool

    @property
    def split(self) -> bool:
        """Whether A and B are multiplied as float32, in three bfloat16 each; 16 bits are multiplied as they are.

        Closer to float64 than Triton's tf32x3 (1.8e-5 of bfloat16 elements differ at rank 64, 4.5e-5 there) and faster,
        since the groups of A are made once: 1.73 and 3.19 times the floor at ranks 64 and 128. Without statistics
        tf32x3 took 1.95 and 5.03, bf16x6 1.93 and 5.27, ieee 3.25 and 27.
        """
        return not self.sequential and (self.a is not self.b or self.a is torch.float32)

    @property
    def resident_ranks(self) -> int | None:
        """Ranks of the tile of A that stays, padded; None where A comes in passes."""
        padded: int = max(16, triton.next_power_of_2(self.ranks[0]))
        return padded if len(self.ranks) == 1 and (self.wide, padded) in TILE_CONFIGS else None

    @property
    def wide(self) -> bool:
        """Whether tiles take the shared memory, or the registers, of float32."""
        return self.split or torch.float32 in (self.weight, self.a, self.b)

    @property
    def launch(self) -> TileConfig:
        launch = TILE_CONFIGS[self.wide, self.resident_ranks]
        narrow = self.columns < NARROW_COLUMNS and self.columns % launch.columns and not self.wide
        return NARROW if narrow else launch

    @property
    def walk(self) -> int:
        """Row tiles of one program."""
        tiles = blocks_of(self.rows, self.launch.rows)
        return blocks_of(tiles, blocks_of(tiles, ROW_TILES))

    @functools.cached_property
    def programs(self) -> int:
        """Programs of one target."""
        walks = blocks_of(blocks_of(self.rows, self.launch.rows), self.walk)
        return walks * blocks_of(self.columns, self.launch.columns)

    @functools.cached_property
    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled for."""
        launch, resident = self.launch, self.resident_ranks
        ranks = resident or CHUNK_RANKS
        even = self.rows % launch.rows == 0 and self.columns % launch.columns == 0
        return {
            "W": TRITON_DTYPES[self.weight],
            "A": TRITON_DTYPES[self.a],
            "B": TRITON_DTYPES[self.b],
            "DOT": TRITON_DTYPES[self.weight if self.sequential else self.a],
            "TERMS": len(self.ranks),
            "RANKS": ranks,
            "RESIDENT": resident is not None,
            "SEQUENTIAL": self.sequential,
            "SPLIT": self.split,
            "ALIGNED": self.aligned,
            "EVEN": even and all(rank % ranks == 0 for rank in self.ranks),
            "ROWS": launch.rows,
            "COLUMNS": launch.columns,
            "STAGES": launch.stages,
            "emulated": triton.knobs.runtime.interpret,
            "num_warps": launch.warps,
        }


def blocks_of(elements: int, block: int) -> int:
    """Return how many blocks cover so many elements."""
    return -(-elements // block)


_variant_of = functools.cache(KernelVariant)
