"""Writes docs/server-options.md, the table of the options of `jax-paged serve`: run `make options`.

The rows come from the parser that prints --help.
"""

import argparse
import re
from pathlib import Path

from jax_paged.server.launch.cli import make_parser

DOCUMENT = Path(__file__).resolve().parent / "server-options.md"

_HEADER = """\
<!-- Written by docs/options.py (make options) from the options in the code. Do not edit. -->
# Options of the server

    jax-paged serve MODEL [options]

`jax-paged serve --help` prints the complete descriptions, and [server.md](server.md) explains how to use the
options. A switch with the default `True` is turned off by `--no-...`, such as `--no-ui`. The default `None`
means that the option is not set; *empty* stands for an empty list or text. A dict is written as JSON, such as
`--speculative-config '{"method": "ngram"}'`.
"""
_TEXTS = {
    "server": "These options control the HTTP server.",
    "engine": "These are also options of `jax-paged run-batch`, and arguments of `LLM` and `EngineArgs`, "
    "written as `max_model_len`.",
}


def document() -> str:
    """Returns the content of docs/server-options.md."""
    parts = [_HEADER]
    for group in make_parser()._action_groups:
        if group.title in _TEXTS:
            parts.append(f"## {group.title.capitalize()}\n\n{_TEXTS[group.title]}\n\n{_table(group)}\n")
    return "\n".join(parts)


def _table(group: argparse._ArgumentGroup) -> str:
    rows = [_row(action) for action in group._group_actions]
    return "\n".join(["| option | default | description |", "|---|---|---|", *rows])


def _row(action: argparse.Action) -> str:
    """Returns the row of an option: its name, its default value, and the first sentence of its help.

    Sentences that start with a quoted value are kept too, because they describe the value.
    """
    name = action.option_strings[0]  # without the --no-... of a switch
    found = re.fullmatch(r"(.*) \(default: (.*)\)", (action.help or "").replace("%%", "%"))
    assert found, f"the help of {name} must end with the default value"
    text = re.split(r"(?<=\.) (?=[A-Z])", found[1])[0]
    values = list(action.choices or ())
    if not all(f'"{value}"' in text for value in values):
        text += f" Values: {', '.join(f'`{value}`' for value in values)}."
    text = re.sub(r"[|*<]", r"\\\g<0>", text)
    text = re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)
    default = "*empty*" if found[2] == "none" else f"`{found[2]}`"
    return f"| `{name}` | {default} | {text} |"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
