"""Runs one plain greedy request and writes, as JSON, what it entered and executed: `python core_path.py`.

A request of the built-in model is run twice; the second, after everything is compiled, is the core path.
"""

import json
import os
import sys
import time
from collections import defaultdict
from types import CodeType

EVENTS = sys.monitoring.events


class Recorder:
    """Notes the functions that begin and the lines that run, while it is on.

    Args:
        folder: Only files below it are noted.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder) + os.sep
        self.functions: dict[str, set[int]] = defaultdict(set)
        self.lines: dict[str, set[int]] = defaultdict(set)

    def __enter__(self) -> None:
        tool = sys.monitoring.PROFILER_ID
        sys.monitoring.use_tool_id(tool, "core path")
        sys.monitoring.register_callback(tool, EVENTS.PY_START, self._start)
        sys.monitoring.register_callback(tool, EVENTS.LINE, self._line)
        sys.monitoring.set_events(tool, EVENTS.PY_START | EVENTS.LINE)

    def __exit__(self, *_: object) -> None:
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)

    def _file(self, code: CodeType) -> str | None:
        path = os.path.realpath(code.co_filename)
        return path.removeprefix(self.folder) if path.startswith(self.folder) else None

    def _start(self, code: CodeType, _: int) -> object:
        file = self._file(code)
        if file is not None:
            self.functions[file].add(code.co_firstlineno)
        return sys.monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> object:
        file = self._file(code)
        if file is not None:
            self.lines[file].add(line)
        return sys.monitoring.DISABLE


def main() -> None:
    from jax_paged import LLM, SamplingParams

    recorder, params = Recorder(os.getcwd()), SamplingParams(temperature=0, max_tokens=24)
    with LLM(max_model_len=256, max_num_seqs=4, num_scheduler_steps=1) as llm:
        llm.generate(["A block table is"], params, use_tqdm=False)
        while any(program.state == "waiting" for program in llm.llm_engine.compile_report()):
            time.sleep(0.2)
        with recorder:
            llm.generate(["A block table is"], params, use_tqdm=False)
    noted = {
        file: {"functions": sorted(starts), "lines": sorted(recorder.lines[file])}
        for file, starts in recorder.functions.items()
        if not file.startswith((".venv", "tests"))
    }
    print(json.dumps(noted))


if __name__ == "__main__":
    main()
