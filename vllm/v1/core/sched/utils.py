"""The name under which outsiders import the stop rules of ``stopping``."""

from vllm.v1.core.sched.stopping import check_sequence_repetition, check_stop

__all__ = ["check_sequence_repetition", "check_stop"]
