"""MkDocs hooks that build the site from documents all over the repository.

Every page keeps its path in the repository as its source path, so the relative links that work on GitHub
also work on the site. Links may lead to Markdown files, notebooks, other text files and folders; each of them
becomes a page.
"""

import html
import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Pages in the navigation. mkdocs.yml must list all of them.
DOCUMENTS = (
    "*.md",
    "docs/**/*.md",
    "benchmarks/*.md",
    "deploy/*.md",
    "models/pagelet/*.md",
    "notebooks",
    "notebooks/*.ipynb",
)
# Pages that only other pages link to, in addition to all files and folders with links to them.
DETAILS = ("benchmarks/results/*.md",)
COPIED = {".css", ".js", ".json", ".png", ".svg"}
LANGUAGES = {".py": "python", ".json": "json", ".service": "ini", ".yaml": "yaml", ".yml": "yaml"}
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
IMAGE_TYPES = ("image/svg+xml", "image/png")


class Document(File):
    """File of the repository that becomes a page, whatever its name ends with."""

    def is_documentation_page(self) -> bool:
        """Returns True, for files that are not Markdown too."""
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by all documents, with the files that they link to."""
    theme = [file for file in files if not str(file.abs_src_path).startswith(config.docs_dir + os.sep)]
    documents = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}
    others = {path for pattern in (*DETAILS, "docs/site/*.css") for path in ROOT.glob(pattern)}
    linked = {target for path in sorted(documents | others) for target in link_targets(path)}
    pages = [make_file(path, config, InclusionLevel.INCLUDED) for path in sorted(documents)]
    rest = sorted((others | linked) - documents)
    return Files([*theme, *pages, *(make_file(path, config, InclusionLevel.NOT_IN_NAV) for path in rest)])


def link_targets(document: Path) -> Iterator[Path]:
    """Yields the files and folders of the repository that a document links to."""
    for target in LINK.findall(read_markdown(document)):
        path = Path(os.path.normpath(document.parent / target))
        if path.exists() and path.is_relative_to(ROOT):
            yield path


def make_file(path: Path, config: MkDocsConfig, inclusion: InclusionLevel) -> File:
    """Returns the file for a path; pages below docs/ have addresses without "docs"."""
    source = path.relative_to(ROOT).as_posix()
    if path.suffix in COPIED:
        file = File.generated(config, source, abs_src_path=str(path), inclusion=inclusion)
        file.dest_uri = source.removeprefix("docs/")
        return file
    file = Document.generated(config, source, abs_src_path=str(path), inclusion=inclusion)
    if path.is_dir():
        file.name = "index"  # of its section in the navigation
    if path.suffix in {".md", ".ipynb"}:
        name = posixpath.splitext(source)[0]
    else:
        name = source
    parent, _, last = name.removeprefix("docs/").lstrip(".").rpartition("/")
    file.dest_uri = posixpath.join(parent, "" if last in {"README", "index"} else last, "index.html")
    return file


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """Returns the Markdown of a page that is not a Markdown file."""
    path = ROOT / page.file.src_uri
    return None if path.suffix == ".md" else read_markdown(path)


def read_markdown(path: Path) -> str:
    """Returns a file as Markdown: a notebook by its cells, other files as code, and a folder by its files."""
    if path.is_dir():
        return "\n\n".join(folder_lines(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n\n".join(cell_markdown(i, cell) for i, cell in enumerate(json.loads(text)["cells"]))
    if path.suffix == ".md":
        return text
    return f"# {path.name}\n\n{fenced(text, LANGUAGES.get(path.suffix, 'text'))}"


def folder_lines(folder: Path) -> Iterator[str]:
    """Yields the Markdown of a folder: links to its notebooks, or its files as code."""
    yield f"# {folder.name.replace('_', ' ').capitalize()}"
    for path in sorted(folder.glob("*.ipynb")):
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        title, _, text = "".join(first["source"]).partition("\n")
        summary = text.strip().partition("\n\n")[0]
        yield f"## [{path.stem[:2]} {title.lstrip('# ')}]({folder.name}/{path.name})\n\n{summary}"
    if any(folder.glob("*.ipynb")):
        return
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            code = fenced(path.read_text(encoding="utf-8"), LANGUAGES.get(path.suffix, "text"))
            yield f"## {path.relative_to(folder).as_posix()}\n\n{code}"


def fenced(text: str, language: str) -> str:
    """Returns a code block. Its fence is longer than any in the text."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall(r"`{3,}", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def cell_markdown(index: int, cell: dict[str, Any]) -> str:
    """Returns a cell of a notebook as Markdown. The outputs are filled in by on_page_content."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    return f'{fenced(source, "python")}\n\n<div data-cell="{index}"></div>'


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in the outputs of a notebook, after Markdown has been rendered."""
    if not page.file.src_uri.endswith(".ipynb"):
        return content
    cells = json.loads((ROOT / page.file.src_uri).read_text(encoding="utf-8"))["cells"]

    def outputs(match: re.Match[str]) -> str:
        return "".join(map(output_html, joined(cells[int(match[1])]["outputs"])))

    return re.sub(r'<div data-cell="(\d+)"></div>', outputs, content)


def joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns outputs with the parts of the same stream as one output."""
    result: list[dict[str, Any]] = []
    for output in outputs:
        if result and output.get("name") and output["name"] == result[-1].get("name"):
            text = [*result[-1]["text"], *output["text"]]
            result[-1] = result[-1] | {"text": text}
        else:
            result.append(output)
    return result


def output_html(output: dict[str, Any]) -> str:
    """Returns an output of a cell as HTML: its HTML, picture or text, whichever comes first."""
    data = output.get("data", {"text/plain": output.get("text", [])})
    text = {kind: "".join(value) for kind, value in data.items()}
    if "text/html" in text:
        return f'<div class="output">{text["text/html"]}</div>'
    if "image/svg+xml" in text:
        return f'<div class="output">{text["image/svg+xml"]}</div>'
    if "image/png" in text:
        png = text["image/png"].replace("\n", "")
        return f'<div class="output"><img alt="Output of the cell" src="data:image/png;base64,{png}"></div>'
    return f'<div class="output"><pre>{html.escape(text["text/plain"].rstrip())}</pre></div>'
