"""Muon for matrices, AdamW for the rest: few steps have to do."""

import torch
from torch import Tensor, nn

from tools.embedded_model.forward import TrainModel


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of [..., R, C] near 1 by Newton-Schulz iterations."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrix / (matrix.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalised; stacks [E, R, C] matrix by matrix."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                moving = state.setdefault("momentum", torch.zeros_like(p))
                moving.lerp_(p.grad, 1 - group["momentum"])
                direction = p.grad.lerp(moving, group["momentum"])
                by_shape.setdefault(tuple(p.shape[-2:]), []).append((p, direction))
            for (rows, columns), found in by_shape.items():
                stack = torch.cat([d.view(-1, rows, columns) for _, d in found])
                stack = orthogonalise(stack) * max(1.0, rows / columns) ** 0.5
                for p, part in zip(
                    [p for p, _ in found],
                    stack.split([d.numel() // (rows * columns) for _, d in found]),
                    strict=True,
                ):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(part.view_as(p), alpha=-group["lr"])


def make_optimizers(
    model: TrainModel, muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, head, gates, norms and mixes."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        is_matrix = p.dim() >= 2 and not name.startswith(("embed", "head"))
        special = name.endswith((".fn", ".ape", ".gate", "index_weights"))
        (matrices if is_matrix and not special else others).append(p)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, muon_lr), adam]
