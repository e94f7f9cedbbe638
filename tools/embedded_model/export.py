"""Writes the files of the embedded checkpoint from a training state, or the mean of several.

python -m tools.embedded_model.export --state DIR/STAGE.pt --out vllm/assets/deepseek-v4

The mean of two states, one of which went on from the other with new tasks, keeps what both can do.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tools.checkpoints.make_deepseek_v4 import CONFIG, CORPUS, write_texts
from tools.embedded_model.checkpoint import save_weights
from tools.embedded_model.forward import TrainModel
from tools.embedded_model.vocabulary import make_tokenizer


def read_weights(state: Path) -> dict[str, Tensor]:
    """Read a state's weights: the running average where there is one."""
    loaded = torch.load(state, weights_only=False)
    weights: dict[str, Tensor] = loaded["model"] | loaded.get("average", {})
    return weights


def mean_of(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average weights; tables of numbers are the first one's."""
    return {
        name: sum((s[name] for s in states[1:]), value) / len(states)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }


def export(states: Sequence[Path], out: Path) -> None:
    """Write config, tokenizer and weights into ``out``."""
    model = TrainModel(CONFIG)
    model.load_state_dict(mean_of([read_weights(state) for state in states]))
    out.mkdir(parents=True, exist_ok=True)
    write_texts(out, make_tokenizer(CORPUS.read_text(encoding="utf-8")).to_str())
    save_weights(model, out / "model.safetensors")


def main() -> None:
    """Export the state given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--state",
        type=Path,
        nargs="+",
        required=True,
        help="stages' .pt files; several: their mean",
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's folder")
    arguments = parser.parse_args()
    export(arguments.state, arguments.out)


if __name__ == "__main__":
    main()
