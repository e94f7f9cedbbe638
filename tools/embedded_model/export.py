"""Writes the files of the embedded checkpoint from a training state.

python -m tools.embedded_model.export --state DIR/STAGE.pt --out vllm/assets/deepseek-v4
"""

import argparse
from pathlib import Path

import torch

from tools.embedded_model.checkpoint import save_weights
from tools.embedded_model.forward import TrainModel
from tools.embedded_model.vocabulary import make_tokenizer
from vllm.assets.make_deepseek_v4 import CONFIG, CORPUS, write_texts


def export(state: Path, out: Path) -> None:
    """Write config, tokenizer and weights into ``out``."""
    model = TrainModel(CONFIG)
    loaded = torch.load(state, weights_only=False)
    model.load_state_dict(loaded["model"] | loaded.get("average", {}))
    out.mkdir(parents=True, exist_ok=True)
    write_texts(out, make_tokenizer(CORPUS.read_text(encoding="utf-8")).to_str())
    save_weights(model, out / "model.safetensors")


def main() -> None:
    """Export the state given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="a stage's .pt file")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's folder")
    arguments = parser.parse_args()
    export(arguments.state, arguments.out)


if __name__ == "__main__":
    main()
