"""A tower's tensors: left in their files until the first picture."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from vllm.exceptions import CheckpointError
from vllm.logger import init_logger
from vllm.model_executor.model_loader.dummy import fill_with_dummy_weights
from vllm.model_executor.model_loader.mapped_file import MappedFile
from vllm.model_executor.model_loader.safetensors_header import StoredTensor

logger = init_logger(__name__)


class TowerWeights(Mapping[str, torch.Tensor]):
    """Tensors by the tower's own names, in one type; each is read when it is first asked for.

    Owns: what was asked for by name; what was taken is its taker's.

    Args:
        stored: The tensors by name; None: they are drawn.
        shapes: Of all tensors.
        dtype: Of the values.
        seed: Of drawn ones.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor] | None,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.dtype = dtype
        self._stored, self._shapes, self._seed = stored, shapes, seed
        self._known: dict[str, torch.Tensor] = {}
        self._files: dict[Path, MappedFile] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._read(name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that hold them; none: they are drawn."""
        return tuple(sorted({tensor.file for tensor in (self._stored or {}).values()}))

    @property
    def num_values(self) -> int:
        """Values of all tensors."""
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, which is not kept here.

        Raises:
            CheckpointError: Its file cannot be read.
        """
        return self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if self._stored is None:
            drawn = torch.empty(tuple(shape), dtype=self.dtype)
            fill_with_dummy_weights({name: drawn}, self._seed)
            return drawn
        stored = self._stored[name]
        try:
            file = self._files.get(stored.file)
            if file is None:
                file = self._files[stored.file] = MappedFile(stored.file)
            return file.read(stored).to(self.dtype)
        except OSError as error:
            raise CheckpointError(f"{stored.file} cannot be mapped: {error}.") from error
