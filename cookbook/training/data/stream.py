"""A training set that is read during training: block after block, pass after pass, in bounded memory."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cookbook.config.objectives import Objective
from cookbook.config.sections import DataSection
from cookbook.system.digests import sha256_of
from cookbook.system.files import RecipeError, refuse
from cookbook.training.data.ahead import Prefetcher
from cookbook.training.data.encode import TextKeys
from cookbook.training.data.passes import Passes, Stamps, stamps_of
from cookbook.training.data.rows import BadRows
from cookbook.training.data.sources import local_files
from cookbook.training.data.tokens import Remark, TokenSet, ids_beyond, take, tokenize, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Window(NamedTuple):
    """The samples of one optimizer step."""

    tokens: TokenSet
    samples: np.ndarray
    """int64 [W]: indices in that set."""
    epoch: float
    digest: str | None = None
    """For a stream: over all blocks of the pass, up to that of the last sample."""


@dataclass
class PassCounts:
    """Counts over a pass, up to the current block."""

    num_rows: int = 0
    num_long: int = 0
    remarks: dict[str, Remark] = field(default_factory=dict)
    num_dropped: Counter[str] = field(default_factory=Counter)
    """Bad rows by reason."""
    reading: dict[str, list[str]] = field(default_factory=dict)
    """Source -> notes on how it is read."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Samples in the order of the sources, permuted within blocks of `data.shuffle_rows` rows.

    Every rank reads and tokenizes everything, since lengths decide which rank gets which sample.
    """

    data: DataSection
    objective: Objective
    tokenizer: "PreTrainedTokenizerBase"
    num_embeddings: int | None = None
    """Rows of the model's embedding; tokens beyond them are refused."""
    first_pass: PassCounts = field(default_factory=PassCounts)
    """Later passes read the same rows again."""

    @cached_property
    def _stamps(self) -> Stamps:
        """Stamps of the files when the first block was read."""
        return stamps_of(self.data)

    def fingerprint(self, cache: Path) -> str:
        """SHA-256 of sources, files and tokenizer. Local files are read to their end, once (see `sha256_of` for
        `cache`); Hub datasets, which are downloaded during training, count by name and revision.
        """
        files = [path for source in self.data.train for path in local_files(source)]
        digests = sha256_of(files, cache=cache)
        words = self.data.model_dump_json(exclude={"eval", "train", "columns", "chat_template", "packing"})
        sources = []
        for source in self.data.train:
            content = [digests[path] for path in local_files(source)]
            left_out = {"path"} if content else set()
            left_out |= {"rows_per_epoch"} if source.rows_per_epoch is None else set()
            sources.append([content, source.model_dump(mode="json", exclude=left_out)])
        text = json.dumps([words, sources, tokenizer_fingerprint(self.tokenizer)])
        return hashlib.sha256(text.encode()).hexdigest()

    def first_block(self, seed: int) -> tuple[TokenSet, np.ndarray]:
        """The first samples of the training, and their order.

        Raises:
            RecipeError: as `windows`.
        """
        bad_rows = BadRows()
        passes = Passes(self.data, self.objective, self._stamps)
        block, num_dropped = next(self._blocks(passes, bad_rows, self.first_pass), (None, None))
        if block is None or num_dropped is None:
            raise RecipeError(["data.train: no row left to train on", *bad_rows.mistakes()])
        self._count(block, num_dropped)
        return block, _order(seed, 0, 0, len(block))

    def windows(
        self, *, seed: int, global_batch_size: int, num_samples_consumed: int, digest: str | None = None
    ) -> Iterator[Window]:
        """The steps, without end; their epoch is the number of passes completed before that of their last sample.

        To resume after `num_samples_consumed` samples, the rows before are read and tokenized again (one pass at most;
        of a mixture all passes), since the number of samples in them is not known otherwise.

        Args:
            digest: of the window that ended there, to detect changed rows.

        Raises:
            RecipeError: during training, bad rows under on_bad_row "error", or a pass without a sample; by the first
                `next`, rows that differ from those of `digest`.
        """
        samples = self._samples(seed, num_samples_consumed, digest)
        while True:
            window = list(islice(samples, global_batch_size))
            epoch, _, _, digest = window[-1]
            samples_of = [(block, i) for _, block, i, _ in window]
            yield Window(take(samples_of), np.arange(len(window)), float(epoch), digest)

    def _samples(self, seed: int, num_skipped: int, expected: str | None) -> Iterator[tuple[int, TokenSet, int, str]]:
        """Samples as (pass, block, index in the block, digest of the pass up to that block)."""
        epoch, num_consumed = 0, num_skipped
        of_first_pass: list[tuple[int, str]] = []
        passes = Passes(self.data, self.objective, self._stamps)
        while True:
            num_samples, bad_rows, digest = 0, BadRows(), ""
            ends: list[tuple[int, str]] = []  # samples and digest up to the end of each block
            with Prefetcher(self._blocks(passes, bad_rows, self.first_pass if epoch == 0 else PassCounts())) as blocks:
                for number, (block, num_dropped) in enumerate(blocks):
                    num_samples += len(block)
                    digest = hashlib.sha256((digest + block.fingerprint).encode()).hexdigest()
                    ends.append((num_samples, digest))
                    if of_first_pass and ends != of_first_pass[: number + 1]:
                        raise _other_rows(epoch, number)
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
                self.first_pass.num_dropped = bad_rows.num_by_reason  # with bad rows after the last block
            if self.data.is_streamed_mixture:  # of which no pass has the rows of another
                num_consumed, epoch = num_consumed - num_samples, epoch + 1
                continue
            if expected is not None:
                self._compare(ends, (num_consumed - 1) % num_samples + 1, expected)
                expected = None
            of_first_pass = of_first_pass or ends
            if ends != of_first_pass:
                raise _other_rows(epoch, len(ends))
            # Passes are equally long, so whole ones are skipped without reading.
            num_passes, num_skipped = divmod(num_skipped, num_samples)
            epoch += 1 + num_passes

    def _compare(self, ends: list[tuple[int, str]], position: int, expected: str) -> None:
        """Raise if the blocks up to sample `position` of a pass are not those of `expected`."""
        if next(digest for end, digest in ends if end >= position) != expected:
            raise RecipeError(
                "data.train: the stream is not what the checkpoint was made with: the samples before number"
                f" {position} of a pass differ. Resume with the same rows, or start over (run.resume: never)"
            )

    def _count(self, block: TokenSet, num_dropped: Counter[str]) -> None:
        assert block.row_lengths is not None
        self.first_pass.num_rows += len(block.row_lengths)
        self.first_pass.num_long += int(np.count_nonzero(block.row_lengths > self.data.max_length))
        self.first_pass.num_dropped = num_dropped
        for remark in block.remarks:
            before = self.first_pass.remarks.get(remark.words, remark._replace(num_rows=0))
            self.first_pass.remarks[remark.words] = before._replace(num_rows=before.num_rows + remark.num_rows)

    def _blocks(self, passes: Passes, bad_rows: BadRows, counts: PassCounts) -> Iterator[tuple[TokenSet, Counter[str]]]:
        """The next pass over the sources: blocks, and the rows dropped up to the end of each."""
        data = self.data
        for parts in passes.blocks(bad_rows):
            counts.reading |= {part.place: part.notes for part in parts}
            block = tokenize(
                parts,
                self.tokenizer,
                max_length=data.max_length,
                too_long=data.too_long,
                keys=TextKeys.of(data),
                objective=self.objective,
                bad_rows=bad_rows,
                num_processes=1,
            )
            bad_rows.stop_if(data.on_bad_row)
            if block is not None:
                refuse(ids_beyond(block, self.num_embeddings, self.tokenizer, "data.train"))
                yield block, bad_rows.num_by_reason.copy()


def _other_rows(epoch: int, number: int) -> RecipeError:
    return RecipeError(
        f"data.train: pass {epoch + 1} has other rows than the first, from block {number + 1} of data.shuffle_rows on;"
        " name a data set's revision, or rows that do not change while the run reads them"
    )


def _order(seed: int, epoch: int, number: int, size: int) -> np.ndarray:
    # Not a shuffle buffer, whose order depends on its whole past: a run could not find its position again.
    return np.random.RandomState([seed, epoch, number]).permutation(size)
