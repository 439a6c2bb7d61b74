"""The mesh of a strategy: which processes of a run share samples, tokens and parameters. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The processes of a run, replicate x shard x tensor; those of a tensor-parallel group are neighbours.

    Three numbers follow from it, and no more is asked of a mesh while it trains: `data_parallel_size`, by which batches
    are dealt; `token_parallel_size`, by which losses and gradients are summed; and `replicate`, by which what is held
    several times is counted once.
    """

    replicate: int = 1
    """Processes that hold the same shard, each with samples of its own."""
    shard: int = 1
    """Processes that parameters, gradients or optimizer state are sharded over, each with samples of its own."""
    tensor: int = 1
    """Processes that compute the same tokens together."""

    @property
    def num_processes(self) -> int:
        return self.data_parallel_size * self.tensor

    @property
    def data_parallel_size(self) -> int:
        """Groups of processes that see different samples."""
        return self.replicate * self.shard

    def data_parallel_rank(self, rank: int) -> int:
        """Which of these groups a process belongs to."""
        return rank // self.tensor

    @property
    def token_parallel_size(self) -> int:
        """Groups of processes that see different tokens. As many as see different samples: no sample is split."""
        return self.data_parallel_size
