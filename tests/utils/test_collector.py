import gc

import pytest

from vllm.utils.collector import lasting_imports


@pytest.fixture(autouse=True)
def collector():
    """As it was, for other tests."""
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_what_is_imported_is_looked_through_no_more(is_on):
    (gc.enable if is_on else gc.disable)()
    with lasting_imports():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled() is is_on
    assert gc.get_freeze_count() > len(kept)
    # What is made later is.
    later = []
    assert any(one is later for one in gc.get_objects())
    assert not any(one is kept for one in gc.get_objects())


def test_an_import_that_fails_leaves_it_on():
    with pytest.raises(ImportError), lasting_imports():
        raise ImportError
    assert gc.isenabled()
