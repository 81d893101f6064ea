"""What `prepare` returns: the dataset, opened, with its report."""

from pathlib import Path
from typing import Self, TypeVar, final

from penstock.core.errors import ConfigError
from penstock.core.folders import is_url
from penstock.core.properties import cached_property
from penstock.core.urls import split_query
from penstock.data.reports.report import PrepareReport
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.remote.tables import ShardReplacedError

DatasetT = TypeVar("DatasetT", bound=Dataset)


@final
class PreparedDataset(Dataset):
    """The dataset that `prepare` made; with a share for validation, that of training.

    ```python
    train = ps.prepare("web/*.jsonl", tokenizer=tokenizer, output="data/web", validation=0.01)
    print(train.report)
    loader = ps.Loader(train, sequence_length=1024, rows_per_step=32)
    len(train.validation)
    ```

    Pickled, it is an ordinary `Dataset`.
    """

    _output: str | Path
    _report: PrepareReport

    @classmethod
    def of(cls, report: PrepareReport, output: str | Path) -> Self:
        """Open what a preparation made.

        Args:
            report: Its report.
            output: The folder or the full URL into which it prepared.

        Raises:
            CorruptionError: A file of the dataset is missing or damaged.
            StoreError: The store cannot be read.
        """
        prepared = _open_written(cls, _inside(output, next(iter(report.splits))))
        prepared._output, prepared._report = output, report
        return prepared

    @property
    def report(self) -> PrepareReport:
        """What went in, what came out, what was rejected and why: `print` shows it as text.

        It is of both datasets, if a share is for validation; see `PrepareReport.splits`.
        """
        return self._report

    @cached_property
    def validation(self) -> Dataset:
        """The dataset for validation.

        Raises:
            ConfigError: No share of the documents is for validation.
        """
        if "validation" not in self._report.splits:
            raise ConfigError(
                f"{self.url or self.path}: was prepared without a share for validation; "
                "ps.prepare(…, validation=0.01), into another output or with overwrite"
            )
        return _open_written(Dataset, _inside(self._output, "validation"))


def _open_written(kind: type[DatasetT], place: str | Path) -> DatasetT:
    """Open what was just written, also where an earlier upload of the same was opened before."""
    try:
        return kind.open(place)
    except ShardReplacedError as error:
        error.accept()
        return kind.open(place)


def _inside(output: str | Path, split: str) -> str | Path:
    """The folder or URL of one of the datasets of a preparation."""
    if not is_url(output):
        return Path(output) / split
    base, query = split_query(str(output))
    return f"{base}/{split}{query}" if split else output
