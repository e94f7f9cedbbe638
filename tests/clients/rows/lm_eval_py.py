"""lm-eval: texts scored (as MMLU does), written (as HumanEval does) and rolled (perplexity).

Its own tasks fetch their data; these are of the same kinds, with data beside them.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from client import MODEL, SAID, URL, URL_WORKER, WORKER, WORKER_KEY, Row, run
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

DOCS = [{"q": f"{i} + {i} =", "choices": [" 1", f" {2 * i}", " é🏔"], "gold": 1} for i in range(4)]
_DATA = """
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
metadata: {version: 1}
"""
TASKS = {
    "scored": """
task: scored
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolled": """
task: rolled
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}{{choices[1]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "written": """
task: written
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: SAID
generation_kwargs:
  until: ["\\nclass", "\\ndef", "\\n#", "\\nif", "\\nprint", "<<"]
  max_gen_toks: 40
metric_list: [{metric: exact_match}]
filter_list:
  - name: strip
    filter: [{function: regex, regex_pattern: "(.*)"}, {function: take_first}]
""",
}


def _evaluate(names: list[str], kind: str, **flags: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        data = folder / "docs.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS), "utf-8")
        for name, task in TASKS.items():
            text = (task + _DATA).replace("DATA", str(data)).replace("SAID", json.dumps(SAID))
            (folder / f"{name}.yaml").write_text(text, "utf-8")
        arguments = ",".join(f"{key}={value}" for key, value in flags.items())
        found = simple_evaluate(
            model=kind,
            model_args=arguments,
            tasks=names,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            apply_chat_template=kind == "local-chat-completions",
            bootstrap_iters=0,
        )
    results: dict[str, Any] = found["results"]
    return results


def _completions(row: Row, **flags: Any) -> None:
    found = _evaluate(
        ["scored", "rolled", "written"],
        "local-completions",
        model=MODEL,
        base_url=f"{URL}/v1/completions",
        **flags,
    )
    assert 0 <= found["scored"]["acc,none"] <= 1
    assert found["rolled"]["bits_per_byte,none"] > 0
    row.shown = f"bits per byte {found['rolled']['bits_per_byte,none']:.2f}"


def remote(row: Row) -> None:
    _completions(row, tokenizer_backend="remote", num_concurrent=2)


def own_tokenizer(row: Row) -> None:
    folder = os.environ["CLIENTS_TOKENIZER"]
    _completions(row, tokenizer_backend="huggingface", tokenizer=folder)


def chat(row: Row) -> None:
    os.environ["OPENAI_API_KEY"] = WORKER_KEY
    found = _evaluate(
        ["written"],
        "local-chat-completions",
        model=WORKER,
        base_url=f"{URL_WORKER}/v1/chat/completions",
        num_concurrent=1,
    )
    assert found["written"]["exact_match,strip"] == 1.0, found
    row.shown = "exact match 1.0"


run(
    {"completions, remote tokenizer": remote, "completions": own_tokenizer, "chat": chat},
    "lm-eval",
)
