import pytest

from vllm.exceptions import UserInputError
from vllm.lora.request import LoRARequest


def test_fields():
    lora = LoRARequest("name", 3, "/path")
    assert (lora.name, lora.adapter_id, lora.path) == ("name", 3, "/path")
    assert (lora.lora_name, lora.lora_int_id, lora.lora_path) == ("name", 3, "/path")


def test_equal_by_name():
    assert LoRARequest("a", 1, "/x") == LoRARequest("a", 2, "/y")
    assert LoRARequest("a", 1) != LoRARequest("b", 1)
    assert LoRARequest("a", 1) != "a"
    assert len({LoRARequest("a", 1, "/x"), LoRARequest("a", 1, "/y")}) == 1


@pytest.mark.parametrize("number", [0, -1])
def test_number(number):
    with pytest.raises(UserInputError, match=f"at least 1, got {number}"):
        LoRARequest("a", number, "/x")
