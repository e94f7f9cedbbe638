"""``--help=TOPIC``: all flags, one group, or one flag.

``--help=all`` also lists the flags that have no effect and those that are refused,
``--help=groups`` the groups; any other topic is the name of a group (vLLM's names are understood
too) or of a flag, or a part of flags' names.
"""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

# vLLM's names of groups -> ours.
_GROUP_ALIASES = {
    "frontend": "server",
    "modelconfig": "model",
    "loadconfig": "model",
    "cacheconfig": "kv cache",
    "schedulerconfig": "scheduling",
    "speculativeconfig": "scheduling",
    "observabilityconfig": "observability",
}
_GROUPS_TOPICS = ("groups", "listgroup")


@dataclass(frozen=True, slots=True)
class FlagNote:
    """What there is to say about a flag that is known and not served.

    Attributes:
        names: Its spellings, the long one first.
        fate: What happens to it, as a heading.
        why: The reason, or what to do instead.
    """

    names: tuple[str, ...]
    fate: str
    why: str


def print_help_about(
    parser: argparse.ArgumentParser, topic: str, notes: Sequence[FlagNote]
) -> None:
    """Print help about a topic; one that nothing matches ends the program."""
    wanted = topic.strip().lower()
    if wanted in ("", "all", "page"):
        parser.print_help()
        print(_list_notes(notes))
        return
    if wanted in _GROUPS_TOPICS:
        print("\n".join(title for title in _groups(parser)))
        return
    flag = wanted.lstrip("-").replace("_", "-")
    name = _GROUP_ALIASES.get(wanted.replace("_", "").replace("-", ""), wanted)
    groups = {title.lower(): actions for title, actions in _groups(parser).items()}
    if name in groups:
        print(_format(parser, name, groups[name]))
    elif not (_print_flags(parser, flag) or _print_notes(notes, flag)):
        parser.error(
            f"--help={topic}: there is no such flag or group. Groups: {', '.join(groups)}; "
            "--help=all shows everything"
        )


def _groups(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    return {
        group.title or "": [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        for group in parser._action_groups
        if group._group_actions
    }


def _format(parser: argparse.ArgumentParser, title: str, actions: list[argparse.Action]) -> str:
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help().rstrip()


def _print_flags(parser: argparse.ArgumentParser, flag: str) -> bool:
    """Print the flag of that name, else those whose names contain it."""
    shown = [action for actions in _groups(parser).values() for action in actions]
    exact = [a for a in shown if f"--{flag}" in a.option_strings]
    found = exact or [a for a in shown if any(flag in name for name in a.option_strings)]
    if found:
        print(_format(parser, f"flags that match {flag!r}", found))
    return bool(found)


def _print_notes(notes: Sequence[FlagNote], flag: str) -> bool:
    """Say what is known about a flag that is not served."""
    found = [note for note in notes if f"--{flag}" in note.names]
    for note in found:
        print(f"{', '.join(note.names)}: {note.fate}: {note.why}.")
    return bool(found)


def _list_notes(notes: Sequence[FlagNote]) -> str:
    parts = []
    for fate in dict.fromkeys(note.fate for note in notes):
        names = ", ".join(note.names[0] for note in notes if note.fate == fate)
        body = textwrap.fill(
            names, 96, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        parts.append(f"\n{fate} (--help=NAME says why):\n{body}")
    return "\n".join(parts)
