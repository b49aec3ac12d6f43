"""A copy of the repository in which one feature does not exist.

The files of the feature are deleted from every layer, and so are the lines that name them in the modules that
may: the composition modules.
"""

import ast
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LAYERS = ("core", "engine", "worker", "models")
# The layers above the engine open features by name; a copy goes without them.
_NOT_COPIED = ("jax_paged/server/", "jax_paged/lab/", "docs/", "notebooks/", "benchmarks/", "deploy/")


def copy_without(feature: str, copy: Path) -> list[str]:
    """Copies the repository without a feature.

    Args:
        feature: Name of its file or folder below `features` of the layers.
        copy: Folder that the copy is written to; it must not exist.

    Returns:
        The layers that had a part of it.
    """
    _copy(copy)
    layers = [layer for layer in LAYERS if _delete_files(copy / _folder(layer) / "features", feature)]
    assert layers, f"no layer has a feature {feature}"
    for module in _modules(copy):
        tree = ast.parse(module.read_text())
        names = _imported_names(tree, feature)
        if names:
            changed = ast.fix_missing_locations(_WithoutNames(names).visit(tree))
            module.write_text(ast.unparse(changed) + "\n")
    return layers


def importers_of(feature: str) -> list[str]:
    """Returns the modules of the layers that import a feature at run time and are no part of it."""
    return [
        module.relative_to(REPOSITORY).as_posix()
        for module in _modules(REPOSITORY)
        if not _is_of(module, feature) and _imported_names(ast.parse(module.read_text()), feature)
    ]


def _folder(layer: str) -> str:
    return layer if layer == "models" else f"jax_paged/{layer}"


def _copy(copy: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = REPOSITORY / name, copy / name
        if name.startswith(_NOT_COPIED) or not source.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            shutil.copy2(source, target)
    for library in (REPOSITORY / "pallas_kernels/native").glob("*.so"):
        shutil.copy2(library, copy / "pallas_kernels/native" / library.name)


def _modules(repository: Path) -> Iterator[Path]:
    for layer in LAYERS:
        yield from sorted((repository / _folder(layer)).rglob("*.py"))


def _is_of(module: Path, feature: str) -> bool:
    parts = module.with_suffix("").parts
    return "features" in parts and parts[parts.index("features") + 1 :][:1] == (feature,)


def _delete_files(features: Path, feature: str) -> bool:
    folder, file = features / feature, features / f"{feature}.py"
    if folder.is_dir():
        shutil.rmtree(folder)
        return True
    if file.exists():
        file.unlink()
        return True
    return False


def _imported_names(tree: ast.Module, feature: str) -> set[str]:
    """Returns the names that a module imports from a feature at run time."""
    names: set[str] = set()
    for node in _at_run_time(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in _deleted_aliases(node, feature)}
    return names


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not is_types:
            yield child
            yield from _at_run_time(child)


def _deleted_aliases(node: ast.ImportFrom, feature: str) -> list[ast.alias]:
    parts = (node.module or "").split(".")
    if "features" not in parts:
        return []
    behind = parts[parts.index("features") + 1 :]
    if behind:
        return node.names if behind[0] == feature else []
    return [alias for alias in node.names if alias.name == feature]


class _WithoutNames(ast.NodeTransformer):
    """Deletes what names are used for; where a value is needed, None takes their place."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def _uses(self, node: ast.AST | None) -> bool:
        walked = ast.walk(node) if node is not None else ()
        return any(isinstance(x, ast.Name) and x.id in self._names for x in walked)

    def visit_If(self, node: ast.If) -> ast.AST | Sequence[ast.AST]:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return node
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | Sequence[ast.AST]:
        deleted = [x.asname or x.name for x in node.names if (x.asname or x.name) in self._names]
        node.names = [x for x in node.names if (x.asname or x.name) not in self._names]
        nothing = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in deleted]
        return [*([node] if node.names else []), *nothing]

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if self._uses(node) else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if self._uses(node.annotation):
            node.annotation = ast.Name("object", ast.Load())
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        if self._uses(node.annotation):
            node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self._uses(node.returns):
            node.returns = None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.bases = [base for base in node.bases if not self._uses(base)]
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        node.elts = [x for x in node.elts if not self._uses(x)]
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        kept = [(k, v) for k, v in zip(node.keys, node.values, strict=True) if not self._uses(v)]
        node.keys, node.values = [k for k, _ in kept], [v for _, v in kept]
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        for side, other in ((node.left, node.right), (node.right, node.left)):
            if self._uses(side) and not self._uses(other):
                return self.visit(other)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._uses(node.func):
            return ast.Constant(None)
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance" and self._uses(node.args[1]):
            return ast.Constant(False)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Constant(None) if self._uses(node) else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_read = isinstance(node.ctx, ast.Load)
        return ast.Constant(None) if is_read and node.id in self._names else node
