"""A training set that is read while it is trained on: block after block, pass after pass, in bounded memory."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cookbook.data.ahead import Ahead
from cookbook.data.rows import BadRows, row_blocks
from cookbook.data.sources import local_files
from cookbook.data.tokens import TokenSet, take, tokenize, tokenizer_fingerprint
from cookbook.digests import sha256_of
from cookbook.files import RecipeError
from cookbook.objectives import Objective
from cookbook.recipe import DataSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Window(NamedTuple):
    """Of a training set, what one step goes through."""

    tokens: TokenSet
    samples: np.ndarray
    """int64 [W]: numbers in that set."""
    epoch: float
    digest: str | None = None
    """Of a stream: of all blocks of its pass, up to the one that the last sample is of."""


@dataclass
class Pass:
    """What was read of a pass, up to the block that is trained on."""

    num_samples: int = 0
    num_cut: int = 0
    num_dropped: Counter[str] = field(default_factory=Counter)
    """Bad rows by reason."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Samples in the order of the sources, permuted within blocks of `data.shuffle_rows` rows.

    Every process reads and tokenises all of it: lengths decide who gets which sample.
    """

    data: DataSection
    objective: Objective
    tokenizer: "PreTrainedTokenizerBase"
    first_pass: Pass = field(default_factory=Pass)
    """Later ones read the same rows again."""

    def fingerprint(self, cache: Path) -> str:
        """SHA-256 of sources, files and tokenizer. Local files are read to their end, once; of the Hub's sets, which
        are fetched as they are read, the name and the revision stand for what they hold.

        Args:
            cache: as for `sha256_of`.
        """
        files = [path for source in self.data.train for path in local_files(source)]
        digests = sha256_of(files, cache=cache)
        words = self.data.model_dump_json(exclude={"eval", "train", "chat_template", "packing"})
        sources = []
        for source in self.data.train:
            content = [digests[path] for path in local_files(source)]
            sources.append([content, source.model_dump(mode="json", exclude={"path"} if content else None)])
        text = json.dumps([words, sources, tokenizer_fingerprint(self.tokenizer)])
        return hashlib.sha256(text.encode()).hexdigest()

    def first_block(self, seed: int) -> tuple[TokenSet, np.ndarray]:
        """The samples that training begins with, and their order.

        Raises:
            RecipeError: as `windows`.
        """
        bad_rows = BadRows()
        block, num_dropped = next(self._blocks(bad_rows), (None, None))
        if block is None or num_dropped is None:
            raise RecipeError(["data.train: no row left to train on", *bad_rows.mistakes()])
        self._count(block, num_dropped)
        return block, _order(seed, 0, 0, len(block))

    def windows(
        self, *, seed: int, global_batch_size: int, num_samples_consumed: int, digest: str | None = None
    ) -> Iterator[Window]:
        """The steps, without end; their epoch is the number of passes completed before that of their last sample.

        To go on after `num_samples_consumed` samples, what comes before is read and tokenised again (one pass at
        most), since only then it is known how many samples it gives.

        Args:
            digest: of the window that ended there, to compare with what is read now.

        Raises:
            RecipeError: bad rows under on_bad_row "error", or a pass without a sample, in the midst of training; other
                rows than those of `digest`, by the first `next`.
        """
        samples = self._samples(seed, num_samples_consumed, digest)
        while True:
            window = list(islice(samples, global_batch_size))
            epoch, _, _, digest = window[-1]
            samples_of = [(block, i) for _, block, i, _ in window]
            yield Window(take(samples_of), np.arange(len(window)), float(epoch), digest)

    def _samples(self, seed: int, num_skipped: int, expected: str | None) -> Iterator[tuple[int, TokenSet, int, str]]:
        """Each as the number of its pass, its block, its number there, and the digest of the pass up to that block."""
        epoch, num_consumed = 0, num_skipped
        while True:
            num_samples, bad_rows, digest = 0, BadRows(), ""
            ends: list[tuple[int, str]] = []  # of each block
            with Ahead(self._blocks(bad_rows)) as blocks:
                for number, (block, num_dropped) in enumerate(blocks):
                    num_samples += len(block)
                    digest = hashlib.sha256((digest + block.fingerprint).encode()).hexdigest()
                    ends.append((num_samples, digest))
                    if expected is not None and num_consumed <= num_samples:
                        self._compare(ends, num_consumed, expected)
                        expected = None
                    if epoch == 0:
                        self._count(block, num_dropped)
                    if num_skipped >= len(block):
                        num_skipped -= len(block)
                        continue
                    for i in _order(seed, epoch, number, len(block))[num_skipped:]:
                        yield epoch, block, int(i), digest
                    num_skipped = 0
            if not num_samples:
                raise RecipeError(["data.train: no row left to train on", *bad_rows.mistakes()])
            if epoch == 0:
                self.first_pass.num_dropped = bad_rows.num_by_reason  # with those after the last block
            if expected is not None:
                self._compare(ends, (num_consumed - 1) % num_samples + 1, expected)
                expected = None
            # Every pass has as many samples, so whole ones need not be read to be skipped.
            num_passes, num_skipped = divmod(num_skipped, num_samples)
            epoch += 1 + num_passes

    def _compare(self, ends: list[tuple[int, str]], position: int, expected: str) -> None:
        """Raises if the blocks up to that of the sample before `position` of a pass are not those of `expected`."""
        found = next(digest for end, digest in ends if end >= position)
        if found != expected:
            raise RecipeError(
                [
                    "data.train: the stream is not what the checkpoint was made with: read again, the samples before"
                    f" number {position} of a pass are others. Go on with those rows, or begin anew (run.resume: never)"
                ]
            )

    def _count(self, block: TokenSet, num_dropped: Counter[str]) -> None:
        self.first_pass.num_samples += len(block)
        self.first_pass.num_cut += block.num_cut
        self.first_pass.num_dropped = num_dropped

    def _blocks(self, bad_rows: BadRows) -> Iterator[tuple[TokenSet, Counter[str]]]:
        """One pass over the sources: each block, and the rows dropped up to its end."""
        data = self.data
        for parts in row_blocks(data.train, data.shuffle_rows, data.on_bad_row, self.objective, bad_rows):
            block = tokenize(
                parts,
                self.tokenizer,
                max_length=data.max_length,
                objective=self.objective,
                bad_rows=bad_rows,
                num_processes=1,
            )
            bad_rows.stop_if(data.on_bad_row)
            if block is not None:
                yield block, bad_rows.num_by_reason.copy()


def _order(seed: int, epoch: int, number: int, size: int) -> np.ndarray:
    return np.random.RandomState([seed, epoch, number]).permutation(size)
