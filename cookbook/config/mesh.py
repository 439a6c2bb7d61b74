"""The device mesh of a strategy: which processes share samples, tokens and parameters. No torch."""

import math
from dataclasses import dataclass

PLANNED_LENGTHS = 64
"""Row lengths under tensor parallel are multiples of it: DTensor plans each operation for each new shape, in 15 ms."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The processes of a run as pipeline x replicate x shard x expert x sequence x tensor; the last has consecutive
    ranks.

    Training uses three numbers of it: `data_parallel_size` to distribute batches, `token_parallel_size` to sum losses
    and gradients, and `replicate` to count replicated state once.
    """

    replicate: int = 1
    """Processes that hold the same shard and see different samples."""
    shard: int = 1
    """Processes that share parameters, gradients or optimizer state and see different samples."""
    expert: int = 1
    """Processes that hold different experts, see different samples, and send their tokens to where the experts are.
    Each expert is shared by `shard` processes only, every other parameter by these as well."""
    sequence: int = 1
    """Processes that see different tokens of the same samples. They hold what processes with other samples hold."""
    tensor: int = 1
    """Processes that compute the same tokens together."""
    pipeline: int = 1
    """Stages: groups of processes that hold different layers. The same samples pass through all of them."""
    chunks: int = 1
    """Ranges of layers of each stage. The samples pass through the first of all stages, then through the second of all,
    and so on; torch calls each a stage."""

    @property
    def num_processes(self) -> int:
        return self.stage_size * self.pipeline

    @property
    def stage_size(self) -> int:
        """Number of processes that hold the same layers, or parts of them."""
        return self.token_parallel_size * self.tensor

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of processes that see different samples."""
        return self.replicate * self.shard * self.expert

    @property
    def num_shards(self) -> int:
        """Number of processes that share a parameter of a layer which is no expert's."""
        return self.shard * self.expert * self.sequence

    @property
    def token_parallel_size(self) -> int:
        """Number of groups of processes that see different tokens."""
        return self.data_parallel_size * self.sequence

    def token_parallel_rank(self, rank: int) -> int:
        """The group of a rank among those that see different tokens."""
        return rank % self.stage_size // self.tensor

    def stage(self, rank: int) -> int:
        """The stage of a rank, from 0; the last computes the loss."""
        return rank // self.stage_size

    def copies(self) -> list[range]:
        """The ranks that hold the same part of the same layers and see other samples, or share that part further; in
        groups, which all processes must make.
        """
        starts = range(0, self.num_processes, self.stage_size)
        return [range(s + i, s + self.stage_size, self.tensor) for s in starts for i in range(self.tensor)]

    def data_parallel_rank(self, rank: int) -> int:
        """The group of a rank among those that see different samples."""
        return self.token_parallel_rank(rank) // self.sequence

    def sequence_rank(self, rank: int) -> int:
        """Which part of each row a rank sees."""
        return self.token_parallel_rank(rank) % self.sequence

    def tensor_rank(self, rank: int) -> int:
        """Which part of each matrix a rank has."""
        return rank % self.tensor

    def length_multiple(self, max_length: int) -> int:
        """The number of tokens that the length of each row is a multiple of."""
        planned = math.gcd(PLANNED_LENGTHS, max_length) if self.tensor > 1 else 1  # no row passes max_length
        return math.lcm(planned, self.sequence)
