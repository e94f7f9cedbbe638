"""A block that drafts reads pictures: its rows are those of transformers' layer over theirs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.towers.checkpoints import draw_picture, reference_logits, write_checkpoint
from tests.model_executor.towers.engine import PictureEngine, Prompt

pytestmark = pytest.mark.slow

_LAYER = 3
_WIDTH = 48


class Drafting:
    """A Qwen 3.5 that sees and drafts, and its block out of transformers' parts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, write_checkpoint("qwen35", folder)
        generator = torch.Generator().manual_seed(0)
        self._fc = torch.randn(_WIDTH, 2 * _WIDTH, generator=generator) * 0.15
        self._norms = 0.1 * torch.randn(3, _WIDTH, generator=generator)
        tensors = load_file(folder / "model.safetensors")
        prefix = f"model.language_model.layers.{_LAYER}."
        block = {
            name.replace(prefix, "mtp.layers.0."): value.clone()
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        block |= {f"mtp.{n}.weight": v.clone() for n, v in zip(norms, self._norms, strict=True)}
        save_file({**tensors, **block, "mtp.fc.weight": self._fc}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))

    def expect(self, prompt: Prompt) -> torch.Tensor:
        """Return the block's rows [T - 1, D] of a prompt, all at once."""
        seen: dict[str, Any] = {}

        def note(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            seen.update(kwargs, hidden=output.last_hidden_state[0])

        text = self.model.model.language_model
        handle = text.register_forward_hook(note, with_kwargs=True)
        ids, _ = prompt.lay_out()
        reference_logits("qwen35", self.model, ids, prompt.pictures)
        handle.remove()
        embedded, hidden = seen["inputs_embeds"][0, 1:], seen["hidden"][:-1]
        parts = [_norm(embedded, self._norms[0]), _norm(hidden, self._norms[1])]
        x = (torch.cat(parts, -1) @ self._fc.T).unsqueeze(0)
        places = seen["position_ids"][-3:, :, :-1]
        count = x.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1).view(1, 1, count, count)
        with torch.inference_mode():
            turned = text.rotary_emb(x, places)
            found = text.layers[_LAYER](x, position_embeddings=turned, attention_mask=mask)
        found = found[0] if isinstance(found, tuple) else found
        return _norm(found.view(count, _WIDTH), self._norms[2])


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


class Rows:
    """Watches what the block of an engine makes of a prompt's rows."""

    def __init__(self, engine: PictureEngine) -> None:
        proposer = engine.core.executor._worker._runner._proposer
        self._inner, proposer._model = proposer._model, self
        self.rows: dict[int, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward_mtp(
        self, streams: Any, ids: Any, positions: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        output = self._inner.forward_mtp(streams, ids, positions, *rest, **more)
        for place, row in zip(positions.tolist(), output, strict=True):
            self.rows.setdefault(place, row.clone())
        return output


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    return Drafting(tmp_path_factory.mktemp("drafting"))


@pytest.mark.parametrize("native", ["1", "0"])
def test_rows_of_the_block_are_the_references(
    native: str, drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step and in chunks, which end inside a picture and in front of one."""
    monkeypatch.setenv("VLLM_NATIVE", native)
    draws = np.random.default_rng(1)
    words = [draws.integers(3, 256, count).tolist() for count in (19, 11, 26)]
    pictures = [
        (draw_picture("qwen35", *grid, seed=i), grid) for i, grid in enumerate(((5, 7), (8, 4)))
    ]
    prompt = Prompt([words[0], pictures[0], words[1], pictures[1], words[2]])
    expected = drafting.expect(prompt)
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    answers, found = [], []
    for chunk in (0, 7):
        engine = PictureEngine(drafting.folder, chunk, speculative_config=drafts)
        watched = Rows(engine)
        try:
            (answer,) = engine.run(prompt)
            answers.append(answer.tokens)
            found.append(torch.stack([watched.rows[i] for i in range(len(expected))]))
            # Behind a hit, where the block's rows before it were kept.
            (again,) = engine.run(prompt)
            assert again.num_cached > 0
            assert again.tokens == answer.tokens
        finally:
            engine.close()
    torch.testing.assert_close(found[0], expected, atol=2e-3, rtol=0)
    if native == "1":
        assert torch.equal(found[1], found[0])
    torch.testing.assert_close(found[1], expected, atol=2e-3, rtol=0)
    plain = PictureEngine(drafting.folder)
    try:
        assert answers == [plain.run(prompt)[0].tokens] * 2
    finally:
        plain.close()
