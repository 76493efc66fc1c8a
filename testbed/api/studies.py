"""Many runs: a sweep from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.api.running import data_root, read
from testbed.run import up

if TYPE_CHECKING:
    import pandas as pd

    from analysis.load import Run as Result


@dataclass(frozen=True, slots=True)
class SweepResult:
    folder: Path
    """Of the run directories, and the index by which the next call finds what is done."""
    runs: tuple[Result, ...]
    """Those that are done, as tables, in the order of the sweep."""
    failed: int
    """How many are not."""
    target: float | None
    """The accuracy whose cost `table` gives, as the sweep names it; None: it names none."""

    def table(self, target: float | None = None) -> pd.DataFrame:
        """What an accuracy of `target` (None: the sweep's, else the highest that all runs reached) cost
        each configuration, over its seeds: what `testbed compare` prints, as numbers."""
        import pandas as pd

        from analysis import comparison

        chosen = target or self.target or comparison.common_target(self.runs)
        return pd.DataFrame(comparison.compare(self.runs, chosen))


def sweep(
    study: str | Path | Mapping[str, Any],
    *,
    runtime: str | None = None,
    jobs: int | None = None,
    data: str | Path | None = None,
    oversubscribe: bool = False,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
    name: str | None = None,
) -> SweepResult:
    """Run a sweep, a file or a mapping with its keys, and wait for its end; what is done already is not
    run again.

    `topology` in a mapping is a path from the working directory. `name` (None: the file's; a mapping's
    is `sweep`) is that of the folder in `runs`. In virtual time `jobs` runs go side by side (None: one
    per core), emulated ones one after the other. `on_progress` is called with a line for each. A run
    that fails does not stop the others. Ctrl-C in the main thread ends the runs that go on, and keeps
    what is done. Raises BadInputError.
    """
    from testbed import sweeps
    from testbed.sweeps import sweeping

    options = up.Options(runtime, oversubscribe, data_root(data))
    if isinstance(study, Mapping):
        name, told = name or "sweep", name or "sweep"
        planned = sweeps.of(study, name, Path(), options)
    else:
        told = str(study)
        planned = sweeps.load(Path(study), options)
    folder = Path(runs) / (name or planned.name)
    on_progress(f"{told}: {len(planned.cells)} runs, into {folder}")
    done = sweeping.run(planned, options, folder, jobs, on_progress)
    failed = len({cell.fingerprint for cell in planned.cells}) - len(done)
    return SweepResult(folder, tuple(read(one.path) for one in done), failed, planned.target)
