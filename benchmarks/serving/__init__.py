"""Comparison of LLM engines on a CPU: `python -m serving` (`make bench`), described in benchmarks/README.md.

`workloads` defines the scenarios, and `engines` the engines. Each engine runs in its own process (`process`),
where a module `run_*` reads scenarios and returns tokens with their times (`runner`). `compare` runs the
rounds, `metrics` calculates the metrics of a run, and `report` and `picture` write the results. `http_share`
compares the server with `LLM.generate`. The scripts in benchmarks/ use some of these modules, too.
"""
