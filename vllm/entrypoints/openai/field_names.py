"""Errors of the layers below, in the names of the fields that a client sent."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from vllm.exceptions import UserInputError
from vllm.sampling_params import STRUCTURED_KINDS

NO_NAMES: Mapping[str, str] = MappingProxyType({})
# Requests ask for a grammar in fields of other names, which do not say its kind.
_KIND = rf"(?:\.(?:{'|'.join(STRUCTURED_KINDS)}))?"


def name_fields(error: Exception, names: Mapping[str, str]) -> Exception:
    """Return an error that speaks of a request's own fields.

    Args:
        error: As the code below raised it; another than the user's is returned as it is.
        names: From the name below to the request's, or to several of them: "a and b".
    """
    below = error.param if isinstance(error, UserInputError) else None
    own = names.get(below or "")
    if below is None or own is None or own == below:
        return error
    message = re.sub(rf"^{re.escape(below)}{_KIND}\b", lambda _: own, str(error))
    return type(error)(message, own.split()[0])


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors speak of a request's own fields where the code below has other names for them.

    Args:
        names: As for ``name_fields``.

    Raises:
        UserInputError: As the block raised it, renamed.
    """
    try:
        yield
    except UserInputError as error:
        named = name_fields(error, names)
        if named is error:
            raise
        raise named from error
