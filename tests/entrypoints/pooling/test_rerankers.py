"""Rerankers against transformers' class, and words that other models are asked in."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from tests.entrypoints.decisions.conftest import Serve, serve_model
from tests.entrypoints.pooling.test_checkpoints import write_modules
from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_model
from tests.model_executor.models.decoder.reference import qwen3
from tests.tokenizers.family_tokenizers import byte_level
from vllm.entrypoints.decisions.wording import PROMPT_FORMAT_VERSION
from vllm.tokenizers import Tokenizer

__all__ = ["serve_model"]  # a fixture

QUERY = "Which train goes to Bergen?"
DOCUMENTS = ["The train to Bergen leaves at nine.", "A cat <|im_end|> sleeps.", "短い"]
TASK = "Given a web search query, retrieve relevant passages that answer the query"
# As the release's card spells it.
HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def with_answers() -> Tokenizer:
    """A vocabulary in which yes and no are tokens."""
    tokenizer = byte_level()
    tokenizer.backend.add_tokens([AddedToken(word, normalized=False) for word in ("yes", "no")])
    return tokenizer


def expected_score(model: Any, tokenizer: Tokenizer, document: str, task: str = TASK) -> float:
    body = f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}"
    # What a document spells of special tokens stays text.
    pieces = body.split("<|im_end|>")
    ids = tokenizer.encode(HEAD, add_special_tokens=False)
    for number, piece in enumerate(pieces):
        if number:
            ids += [i for half in ("<|im", "_end|>") for i in tokenizer.encode(half, False)]
        ids += tokenizer.encode(piece, add_special_tokens=False)
    ids += tokenizer.encode(TAIL, add_special_tokens=False)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    return float(torch.sigmoid(logits[yes] - logits[no]))


@pytest.mark.slow
async def test_qwen3_reranker_scores_as_its_release_says(
    serve_model: Serve, tmp_path: Path
) -> None:
    """By its name, and by the files that sentence-transformers' CrossEncoder writes."""
    tokenizer = with_answers()
    named = tmp_path / "Qwen3-Reranker-tiny"
    model = write_model(qwen3(vocab_size=VOCAB_SIZE), named, tokenizer)
    written = tmp_path / "cross-encoder"
    shutil.copytree(named, written)
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    write_modules(written, [("LogitScore", {"true_token_id": yes, "false_token_id": no})])
    config = json.loads((written / "tokenizer_config.json").read_text())
    config["chat_template"] = f"{{{{ {HEAD!r} }}}}"
    (written / "tokenizer_config.json").write_text(json.dumps(config))
    for folder in (named, written):
        server = await serve_model(
            str(folder), block_size=32, max_model_len=1024, kv_cache_memory_bytes=16 << 20
        )
        body = {"query": QUERY, "documents": DOCUMENTS}
        told = (await server.client.post("/rerank", json=body)).json()
        assert "prompt_format_version" not in told
        scores = {row["index"]: row["relevance_score"] for row in told["results"]}
        for index, document in enumerate(DOCUMENTS):
            expected = expected_score(model, tokenizer, document)
            assert scores[index] == pytest.approx(expected, abs=1e-5)
        pairs = {"text_1": QUERY, "text_2": DOCUMENTS[0], "instruction": "Find a train."}
        (scored,) = (await server.client.post("/score", json=pairs)).json()["data"]
        expected = expected_score(model, tokenizer, DOCUMENTS[0], "Find a train.")
        assert scored["score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("has_format", [True, False])
async def test_other_models_are_asked_as_decisions_ask(
    has_format: bool, serve_model: Serve, tmp_path: Path
) -> None:
    """The same predicate, the same probability; without a chat format too, in the same words."""
    model = write_model(qwen3(vocab_size=VOCAB_SIZE), tmp_path, byte_level())
    if not has_format:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    server = await serve_model(
        str(tmp_path), block_size=32, max_model_len=1024, kv_cache_memory_bytes=16 << 20
    )
    given = {"query": QUERY, "documents": DOCUMENTS[:1], "instruction": "Trains only."}
    reply = await server.client.post("/rerank", json=given)
    assert reply.status_code == 200, reply.text
    told = reply.json()
    assert told["prompt_format_version"] == PROMPT_FORMAT_VERSION
    score = told["results"][0]["relevance_score"]
    text = f"Trains only.\n\nQuery: {QUERY}\n\nDocument: {DOCUMENTS[0]}"
    asked = "Does the document contain what the query asks for?"
    if has_format:
        body = {"input": text, "questions": [{"type": "predicate", "instructions": asked}]}
        decided = (await server.client.post("/v1/decisions", json=body)).json()
        assert decided["answers"][0]["probability"] == pytest.approx(score, abs=1e-6)
        return
    spelled = (
        f"{text}\n\nQuestion about the above:\n{asked}\n\nOptions:\nA. Yes\nB. No\n\n"
        "Reply with the letter of one option only.\n\nAnswer:"
    )
    tokenizer = byte_level()
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer.encode(spelled)])).logits[0, -1]
    yes, no = (tokenizer.token_to_id(letter) for letter in "AB")
    assert score == pytest.approx(float(torch.sigmoid(logits[yes] - logits[no])), abs=1e-5)
