"""Which LoRA adapter a request uses."""

import msgspec

from vllm.exceptions import UserInputError


class LoRARequest(msgspec.Struct, omit_defaults=True, array_like=True):
    """An adapter by name, number and place; equal by name.

    Attributes:
        lora_name: Unique name; enters the prefix hashes.
        lora_int_id: Unique number, at least 1.
        lora_path: Folder or hub id.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise UserInputError(f"lora_int_id must be at least 1, got {self.lora_int_id}.")

    @property
    def adapter_id(self) -> int:
        """The adapter's number."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Where the adapter is."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
