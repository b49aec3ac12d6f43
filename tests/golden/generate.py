"""Writes the golden baseline, or compares with it: `python -m golden.generate [--check] [names]`.

The repository and its folder tests/ must be on the path. Without names all scenarios run.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
from golden.corpus import BASELINE, NUM_DEVICES, differences, key, load_scenarios, run_scenario


def write_baseline(baseline: dict[str, Any]) -> None:
    """Writes a line per request and recording, so that differences can be read."""
    lines = ["{", f'"key": {json.dumps(baseline["key"])},', '"scenarios": {']
    for i, (name, results) in enumerate(baseline["scenarios"].items()):
        parts = []
        for part, entries in results.items():
            listed = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
            parts.append(f"{json.dumps(part)}: {{\n{listed}\n}}")
        lines.append(f"{',' * (i > 0)}{json.dumps(name)}: {{{', '.join(parts)}}}")
    BASELINE.write_text("\n".join([*lines, "}", "}"]) + "\n")


def use_test_settings() -> None:
    """Sets as many devices as the tests have, and their compilation cache."""
    folder = Path(__file__).parents[2] / ".pytest_cache" / "compiled"
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main() -> None:
    """Runs scenarios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scenarios; all of them by default")
    parser.add_argument("--check", action="store_true", help="compare with the baseline and write nothing")
    args = parser.parse_args()
    use_test_settings()
    stored = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"key": None, "scenarios": {}}
    exact, known = key() == stored["key"], stored["scenarios"]
    if args.names and not args.check and known and not exact:
        raise SystemExit("the baseline is of another machine or JAX; regenerate all scenarios, without names")
    results, found = {}, []
    for name, scenario in load_scenarios(args.names or None).items():
        start = time.perf_counter()
        results[name] = run_scenario(scenario)
        print(
            f"{name}: {len(results[name]['outputs'])} outputs, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        found += differences(known.get(name), results[name], exact=exact, path=name)
        if args.names and not args.check:
            save(known | results)
    print(f"{sum(len(result['outputs']) for result in results.values())} outputs")
    if args.check:
        raise SystemExit("\n".join(found) or None)
    if not args.names:
        save(results)


def save(scenarios: dict[str, Any]) -> None:
    """Writes the results of scenarios in the order of the table."""
    order = [name for name in load_scenarios() if name in scenarios]
    write_baseline({"key": key(), "scenarios": {name: scenarios[name] for name in order}})


if __name__ == "__main__":
    main()
