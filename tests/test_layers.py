"""The import-linter contracts in pyproject.toml cover every module, and imports have no cycle."""

import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("jax_paged", exclude_type_checking_imports=True, cache_dir=None)


def test_every_module_has_its_layer(graph: grimp.ImportGraph) -> None:
    for contract in CONTRACTS:
        if contract["type"] != "layers":
            continue
        (container,) = contract["containers"]
        layers = {f"{container}.{name}" for line in contract["layers"] for name in line.split(" | ")}
        packages = {f"{container}.{name}" for name in contract.get("exhaustive_ignores", ())}
        for module in graph.modules:
            if module in packages or not any(module.startswith(f"{name}.") for name in packages):
                continue
            is_listed = any(module == layer or module.startswith(f"{layer}.") for layer in layers)
            is_package = any(layer.startswith(f"{module}.") for layer in layers)
            assert is_listed or is_package, f"{module} has no layer in the contract {contract['name']!r}"


def test_imports_have_no_cycle() -> None:
    """Imports for types alone count."""
    graph = grimp.build_graph("jax_paged", exclude_type_checking_imports=False, cache_dir=None)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    del left["jax_paged"]
    while done := [module for module, imports in left.items() if not imports & left.keys()]:
        for module in done:
            del left[module]
    assert not left, f"these modules import each other, directly or not: {sorted(left)}"


def test_only_composition_imports_features_of_the_engine() -> None:
    """The contract lists the modules of the engine by name; this finds a new one."""
    graph = grimp.build_graph("jax_paged", exclude_type_checking_imports=True, cache_dir=None)
    features = graph.find_descendants("jax_paged.engine.features")
    for module in graph.find_descendants("jax_paged.engine") - features - {"jax_paged.engine.composition"}:
        found = graph.find_modules_directly_imported_by(module) & features
        assert not found, f"{module} imports {sorted(found)}; only jax_paged.engine.composition may"
