"""Bar charts of a comparison."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from serving.compare import Run
from serving.report import firsts, ratios
from serving.workloads import SCENARIOS


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draws one chart per dtype: the speed of each engine relative to the first. Lines show the range.

    Args:
        runs: Runs of several engines.
        path: File of the picture; its suffix determines the format.
    """
    import matplotlib.pyplot as plt

    first_of = firsts(runs)
    dtypes = list(dict.fromkeys(run.dtype for run in runs))
    engines = list(dict.fromkeys(run.engine for run in runs))
    figure, axes = plt.subplots(
        len(dtypes), 1, figsize=(11, 3.6 * len(dtypes)), squeeze=False, layout="constrained"
    )
    for axis, dtype in zip(axes[:, 0], dtypes, strict=True):
        chosen = [run for run in runs if run.dtype == dtype and ratios(run, first_of[dtype, run.scenario])]
        names = list(dict.fromkeys(run.scenario for run in chosen))
        width = 0.8 / len(engines)
        for run in chosen:
            # `ratios` returns the speed of the first engine relative to this one; bars show the inverse.
            speeds = [1 / ratio for ratio in ratios(run, first_of[dtype, run.scenario])]
            middle = statistics.median(speeds)
            place = engines.index(run.engine)
            x = names.index(run.scenario) + (place - (len(engines) - 1) / 2) * width
            label = run.engine if run.scenario == names[0] else None
            axis.bar(x, middle, width * 0.92, color=f"C{place}", label=label)
            axis.vlines(x, min(speeds), max(speeds), color="black", linewidth=1)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xticks(
            range(len(names)), [SCENARIOS[n].title.replace(", ", ",\n", 1) for n in names], fontsize=8
        )
        axis.set_ylabel(f"speed, {engines[0]} = 1")
        axis.set_title(dtype, loc="left")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), ncols=len(engines), loc="outside upper right", fontsize=8
    )
    figure.savefig(path)
    plt.close(figure)
