"""Whether and how a served model is shown pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.exceptions import UnsupportedFeatureError, UserInputError

if TYPE_CHECKING:
    from vllm.multimodal.families import ImageFamily
    from vllm.multimodal.reader import GivenImage, ImageReader, ReadImage


@dataclass(frozen=True, slots=True)
class ImageInput:
    """What a request's pictures go through.

    Attributes:
        family: How the model sees pictures; None: it is shown none.
        reader: Reads them; None likewise.
        max_images: Of one request.
        why_none: Why it is shown none, in words.
    """

    family: ImageFamily | None = None
    reader: ImageReader | None = None
    max_images: int = 0
    why_none: str = "the model has no tower for pictures"

    def check(self, given: Sequence[GivenImage], param: str = "messages") -> None:
        """Refuse pictures where there may be none, or fewer.

        Raises:
            UnsupportedFeatureError: The model is shown none.
            UserInputError: There are too many.
        """
        if not given:
            return
        if self.reader is None:
            raise UnsupportedFeatureError(
                f"{given[0].where} is a picture, and only text is served: {self.why_none}.", param
            )
        if len(given) > self.max_images:
            raise UserInputError(
                f"The request has {len(given)} pictures; at most {self.max_images} are taken "
                "(--limit-mm-per-prompt).",
                param,
            )

    async def read(
        self, given: Sequence[GivenImage], settings: Mapping[str, Any] | None, scope: str
    ) -> list[ReadImage]:
        """Return a request's pictures, read; see ``ImageReader.read``.

        Raises:
            UserInputError: One is wrong, or there are too many.
        """
        self.check(given)
        if not given or self.reader is None:
            return []
        return await self.reader.read(given, settings or {}, scope)

    def read_now(
        self,
        given: Sequence[GivenImage],
        settings: Mapping[str, Any] | None = None,
        scope: str = "",
    ) -> list[ReadImage]:
        """Return pictures, read, and wait for them; see ``read``."""
        self.check(given)
        if not given or self.reader is None:
            return []
        return self.reader.read_now(given, settings or {}, scope)


NO_IMAGES = ImageInput()
