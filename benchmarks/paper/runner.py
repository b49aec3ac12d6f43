"""Computation of missing points in several processes, with a progress bar."""

import concurrent.futures
import multiprocessing
import signal
from collections.abc import Iterable

from tqdm import tqdm

from paper.points import ALONE, Point, compute
from paper.store import Store


def complete(points: Iterable[Point], store: Store, num_processes: int = 2) -> None:
    """Computes all points that the store does not contain.

    Points that measure elapsed time are computed first, one at a time. The others are simulated in separate
    processes, which Ctrl-C ends immediately.

    Args:
        points: The required points.
        store: Receives each value as soon as it is computed.
        num_processes: Number of processes for the simulations.
    """
    missing = [point for point in dict.fromkeys(points) if point not in store]
    alone = [point for point in missing if point.kind in ALONE]
    others = [point for point in missing if point.kind not in ALONE]
    with tqdm(total=len(missing), unit="point", disable=not missing) as bar:
        for point in alone:
            bar.set_postfix_str(point.kind)
            store[point] = compute(point)
            bar.update()
        if not others:
            return
        # A forked process would inherit the threads of JAX.
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(num_processes, context, _ignore_interrupts)
        try:
            waiting = {pool.submit(compute, point): point for point in others}
            for done in concurrent.futures.as_completed(waiting):
                store[waiting[done]] = done.result()
                bar.set_postfix_str(waiting[done].kind)
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        pool.shutdown()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
