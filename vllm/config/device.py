"""The device the model runs on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceConfig:
    """A device type such as "cpu", "cuda" or "npu"; "auto" asks the platform."""

    device: str = "auto"

    @property
    def device_type(self) -> str:
        """The device's type."""
        return str(self.device)
