"""The KV cache as Ascend lays it out: geometry, specs, coordinator, managers."""
