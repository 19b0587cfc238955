"""Completes `omni-actors` in a shell: `omni-actors completion` prints a script for bash, which zsh can read, too.

omni-actors completion > ~/.local/share/bash-completion/completions/omni-actors      # bash
autoload -U bashcompinit && bashcompinit && source <(omni-actors completion)         # zsh, in ~/.zshrc
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Sequence

from omni_actors import flags
from omni_actors.cli.main import SUBCOMMANDS
from omni_actors.config.loading import shipped
from omni_actors.host.processes import EXIT_OK
from omni_actors.protocol.messages import Operation

WORDS = {  # besides flags
    "launch": shipped(),
    "check": shipped(),
    "ctl": [operation.value for operation in Operation],
    "trace": ["last"],
}
SCRIPT = """\
# Completion of omni-actors. Where nothing of it fits, files are completed.
_omni_actors() {{
    local words
    case "$COMP_CWORD,${{COMP_WORDS[1]}}" in
        1,*) words="{commands}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -o bashdefault -F _omni_actors omni-actors
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script; returns the exit code."""
    parser().parse_args(arguments)
    print(script(), end="")
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    return flags.CommandParser(
        prog="omni-actors completion",
        usage="omni-actors completion",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def script() -> str:
    """The script, with the flags that the commands' own help names."""
    cases = []
    for name, (module, _) in SUBCOMMANDS.items():
        help_text = importlib.import_module(module).parser().format_help()
        found = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", help_text))
        cases.append(f'        *,{name}) words="{" ".join([*WORDS.get(name, []), *found])}" ;;')
    return SCRIPT.format(commands=" ".join(SUBCOMMANDS), cases="\n".join(cases))
