"""Images of prompts: decoded within limits, counted in tokens, and named by their content in the prompt's ids.

A model has one id for all parts of all images. In the ids of a prompt each part has a negative id instead, made from a
digest of the image's file: prompts share a cached prefix with an image if, and only if, it is the same image.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from retrieval_attn.errors import InputDataError, UnsupportedModelError

MAX_IMAGES, MAX_IMAGE_BYTES, MAX_PIXELS = 32, 20 << 20, 1 << 25
"""Images of a request; bytes of the file, and pixels, of one image."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FIRST_ID = -(2**31)
LAST_ID = -(2**30) - 2**29 - 1
"""Ids of images are in [FIRST_ID, LAST_ID]; other negative ids are marks of the prefix cache."""
BREAK, END = 1, 2
"""Lowest two bits of the ids of tokens that end a line of an image, and the image; 0: of its parts."""
BREAK_WORD, END_WORD = "[IMG_BREAK]", "[IMG_END]"
_DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


@dataclass(frozen=True)
class Image:
    """One image of a prompt.

    Attributes:
        data: the image's file, such as a PNG. Empty if only ids and positions are needed.
        tokens: number of ids that stand for it.
        grid: rows and columns of its parts, for models whose positions have three axes. None: other models.
        digest: SHA-256 of the file.
        line: parts of a line, after each of which one more token ends the line (Mistral 3). 0: tokens are parts.
    """

    data: bytes = field(repr=False)
    tokens: int
    grid: tuple[int, int] | None = None
    digest: bytes = field(default=b"", repr=False)
    line: int = 0

    def __post_init__(self) -> None:
        if self.data or not self.digest:
            object.__setattr__(self, "digest", hashlib.sha256(self.data).digest())

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Ids of its tokens in a prompt, equal for equal files alone."""
        words = np.frombuffer(hashlib.shake_256(self.digest).digest(4 * self.tokens), "<u4")
        found = words.astype(np.int64) % (LAST_ID - FIRST_ID + 1) + FIRST_ID
        if self.line:
            found &= ~3
            found[self.line :: self.line + 1] |= BREAK
            found[-1] ^= BREAK ^ END
        return tuple(found.tolist())

    @property
    def positions(self) -> int:
        """Positions that it takes in a prompt."""
        return self.tokens if self.grid is None else max(self.grid)

    def without_data(self) -> Image:
        """Return the image without its file."""
        return Image(b"", self.tokens, self.grid, self.digest, self.line)


class PlacedImage(NamedTuple):
    """An image of a prompt, and the index of its first token there."""

    start: int
    image: Image

    @property
    def stop(self) -> int:
        """Index after its last token."""
        return self.start + self.image.tokens


def is_image_id(token: int) -> bool:
    """Return whether an id of a prompt stands for a part of an image."""
    return FIRST_ID <= token <= LAST_ID


def image_spans(ids: np.ndarray) -> list[tuple[int, int]]:
    """Return [start, stop) of each run of image ids."""
    inside = np.concatenate(([False], (ids >= FIRST_ID) & (ids <= LAST_ID), [False]))
    edges = np.flatnonzero(inside[1:] != inside[:-1]).reshape(-1, 2)
    return [(int(start), int(stop)) for start, stop in edges]


def placed_images(ids: Sequence[int], images: Sequence[Image]) -> tuple[PlacedImage, ...]:
    """Return the images with their places among a prompt's ids.

    Raises InputDataError if the ids of images among them are not those of these images, in this order.
    """
    found, left = [], list(images)
    for start, stop in image_spans(np.asarray(ids, np.int64)):
        while start < stop and left:
            found.append(PlacedImage(start, left.pop(0)))
            start = found[-1].stop
        if start != stop:
            left = []
            break
    placed = tuple(found)
    if left or len(placed) != len(images) or any(tuple(ids[one.start : one.stop]) != one.image.ids for one in placed):
        raise InputDataError(
            f"The prompt's ids of images are not those of its {len(images)} images; put Image.ids where the image "
            "stands, in the order of the images."
        )
    return placed


class ImageReader:
    """Reads the images of one checkpoint's prompts as its processor of transformers does."""

    def __init__(self, config: Any, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """config: of the model. processor: its image processor. Raises UnsupportedModelError."""
        self._processor, self._config = processor, config
        kind = config.model_type
        if kind not in ("gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
            raise UnsupportedModelError(
                f"Prompts with images are served for Gemma-3, Mistral 3, Qwen2-VL, Qwen2.5-VL and Qwen3-VL, not for "
                f"{kind!r}."
            )
        self.token: int = config.image_token_id
        """Id of the model for any part of an image."""
        self.word = _word(tokenizer, self.token)
        self._is_gemma, self._is_mistral = kind == "gemma3", kind == "mistral3"
        self.kinds = (self.token,) * 4
        """Ids of the model for the tokens of an image, by the lowest two bits of their ids in a prompt."""
        self._marker, self._text = self.word, self.word
        if self._is_gemma:
            self._marker, end = (_word(tokenizer, one) for one in (config.boi_token_index, config.eoi_token_index))
            self._text = self.text = f"\n\n{self._marker}{self.word}{end}\n\n"
        elif self._is_mistral:
            line_end, image_end = (_number(tokenizer, one) for one in (BREAK_WORD, END_WORD))
            self.text, self.kinds = self.word, (self.token, line_end, image_end, self.token)
        else:
            ends = [_word(tokenizer, one) for one in (config.vision_start_token_id, config.vision_end_token_id)]
            self.text = self.word.join(ends)

    def expand(self, text: str) -> str:
        """Return a rendered prompt with `word` once in place of each image that the chat template wrote."""
        return text if self._text == self._marker else text.replace(self._marker, self._text)

    def placed(self, parts: Sequence[Sequence[int]], images: Sequence[Image]) -> tuple[tuple[int, ...], ...]:
        """Return the parts of a prompt with the ids of the next image in place of each `token`.

        Raises InputDataError unless there is one for each image.
        """
        count = sum(part.count(self.token) for part in parts)
        if count != len(images):
            raise InputDataError(
                f"The model's chat template wrote {count} of {len(images)} images; use one that writes the images of a "
                "message."
            )
        if not images:
            return tuple(map(tuple, parts))
        left, found = iter(images), []
        for part in parts:
            ids = [next(left).ids if token == self.token else (token,) for token in part]
            found.append(tuple(itertools.chain.from_iterable(ids)))
        return tuple(found)

    def plain(self, ids: Sequence[int]) -> list[int]:
        """Return ids as the model's tokenizer knows them: `token` for every part of an image."""
        return [self.kinds[token & 3] if is_image_id(token) else token for token in ids]

    def of_url(self, url: str) -> Image:
        """Read the image in a data URL. Raises InputDataError, also for other URLs: nothing is fetched."""
        head = _DATA.match(url)
        if head is None:
            raise InputDataError(
                f"An image must be in the request, as data:image/png;base64,...; got {url[:60]!r}. This server fetches "
                "no URLs."
            )
        try:
            data = base64.b64decode(url[head.end() :], validate=True)
        except ValueError as error:  # binascii.Error, or another for text that is not ASCII
            raise InputDataError(f"An image is not valid base64 ({error}); encode its file, without spaces.") from error
        return self.of_file(data)

    def of_file(self, data: bytes) -> Image:
        """Read an image's file. Raises InputDataError for one that is damaged, too large or of an unknown format."""
        if len(data) > MAX_IMAGE_BYTES:
            raise InputDataError(f"An image has {len(data):,} bytes, at most {MAX_IMAGE_BYTES:,} are read; shrink it.")
        picture = _decoded(data)
        if self._is_gemma:
            return Image(data, int(self._config.mm_tokens_per_image))
        if self._is_mistral:
            rows, columns = self._mistral_grid(picture.height, picture.width)
            return Image(data, rows * (columns + 1), line=columns)
        rows, columns = self._grid(picture.height, picture.width)
        return Image(data, rows * columns, (rows, columns))

    def pixels(self, image: Image) -> Mapping[str, Any]:
        """Return the model's inputs of an image, as tensors. Raises as `of_file`."""
        options: dict[str, Any] = {"do_pan_and_scan": False} if self._is_gemma else {}
        if self._is_mistral:
            options = {"patch_size": {"height": self._cell, "width": self._cell}}
        given = self._processor(images=[_decoded(image.data)], return_tensors="pt", **options)
        names = ("pixel_values", "image_grid_thw", "image_sizes")
        return {name: given[name] for name in names if name in given}

    @property
    def _cell(self) -> int:
        """Pixels of a side of a part (Mistral 3)."""
        return int(self._config.vision_config.patch_size * self._config.spatial_merge_size)

    def _mistral_grid(self, height: int, width: int) -> tuple[int, int]:
        from transformers.image_utils import ChannelDimension
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        size, cell = self._processor.size, self._cell
        most = (size.get("longest_edge") or size["height"], size.get("longest_edge") or size["width"])
        shaped = np.broadcast_to(np.zeros((), np.uint8), (3, height, width))  # only its shape is read
        rows, columns = get_resize_output_image_size(shaped, most, (cell, cell), ChannelDimension.FIRST)
        if not rows or not columns:
            raise InputDataError(
                f"An image of {width} x {height} pixels is not read: nothing is left of its shorter side once it is "
                "resized; cut it."
            )
        return rows // cell, columns // cell

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size, cell = self._processor.size, self._processor.patch_size * self._processor.merge_size
        try:
            rows, columns = smart_resize(
                height, width, cell, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"]
            )
        except ValueError as error:
            raise InputDataError(f"An image of {width} x {height} pixels is not read: {error}.") from error
        return rows // cell, columns // cell


def _word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    word = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(word, str):
        raise UnsupportedModelError(f"The tokenizer has no token {token}, which the model's config names for images.")
    return word


def _number(tokenizer: PreTrainedTokenizerBase, word: str) -> int:
    token = tokenizer.convert_tokens_to_ids(word)
    if not isinstance(token, int) or token == tokenizer.unk_token_id:
        raise UnsupportedModelError(f"The tokenizer has no token {word!r}, which ends lines of images.")
    return token


def _decoded(data: bytes) -> Any:
    """Return the RGB picture in a file, turned as its EXIF data says. Raises InputDataError."""
    import PIL.Image
    import PIL.ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images, refused below
            picture = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
            if picture.width * picture.height > MAX_PIXELS:
                raise InputDataError(
                    f"An image has {picture.width} x {picture.height} pixels, at most {MAX_PIXELS:,} are read; shrink "
                    "it."
                )
            return PIL.ImageOps.exif_transpose(picture).convert("RGB")
    except InputDataError:
        raise
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise InputDataError(
            f"An image cannot be decoded ({type(error).__name__}); send a whole file in {', '.join(FORMATS)}."
        ) from error
