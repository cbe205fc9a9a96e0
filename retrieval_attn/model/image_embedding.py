"""Images in the forwards of a model: embeddings by its own vision tower, once for each image, and their positions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retrieval_attn.errors import InputDataError, MemoryPlanError
from retrieval_attn.memory.reclaim import idle_device_bytes, reclaim
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.images import FIRST_ID, LAST_ID, Image, ImageReader, PlacedImage
from retrieval_attn.model.weights import WeightState, weight_state

CACHE_BYTES = 256 << 20
"""Embeddings of recent images in host memory."""


@dataclass(frozen=True, eq=False)
class ImageEmbedding:
    """Output of the vision tower for one image, in host memory.

    rows: (tokens, hidden), in place of the token embeddings. deep: further rows of that shape, added to the hidden
    states after the first layers (Qwen3-VL).
    """

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(one.nbytes for one in (self.rows, *self.deep))


class EmbeddedPixels:
    """Stands for `pixel_values` in a forward whose images are embedded already. output: of `get_image_features`."""

    def __init__(self, output: Any) -> None:
        self.output = output


class EmbeddingFeatures:
    """Method `get_image_features` of a module of transformers that also takes `EmbeddedPixels`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, pixel_values: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output in `EmbeddedPixels`, or compute it as the module's class does."""
        if isinstance(pixel_values, EmbeddedPixels):
            return pixel_values.output
        kind: Any = type(self._module)
        return kind.get_image_features(self._module, pixel_values, *args, **kwargs)


class _Pauses(threading.local):
    """Function that this thread's forward of a vision tower calls before each layer; None: it does not pause."""

    on_layer: Callable[[], object] | None = None


_pauses = _Pauses()


def _pause() -> None:
    if _pauses.on_layer is not None:
        _pauses.on_layer()


class PausingForward:
    """Forward of a layer of a vision tower that pauses first. No hook of the module: hooks prevent graph capture."""

    def __init__(self, layer: nn.Module) -> None:
        self._forward = layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward."""
        _pause()
        return self._forward(*args, **kwargs)


def tower_layers(module: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of the vision tower of `module`, a model with its text decoder."""
    tower = next(part for name, part in module.named_children() if name in ("vision_tower", "visual"))
    return max((list(part) for part in tower.modules() if isinstance(part, nn.ModuleList)), key=len)


class ImageEncoder:
    """Embeds the images of one model's prompts and caches the embeddings of recent ones. Thread-safe."""

    def __init__(self, model: nn.Module, reader: ImageReader) -> None:
        """Make the model's forwards accept `EmbeddedPixels`."""
        self.model, self.reader = model, reader
        self._is_gemma = unwrapped(model).config.model_type == "gemma3"
        self._module: Any = unwrapped(model).model
        self._module.get_image_features = EmbeddingFeatures(self._module)
        layers: Sequence[Any] = tower_layers(self._module)
        for layer in layers:
            if not isinstance(layer.forward, PausingForward):
                layer.forward = PausingForward(layer)
        self.chunks = 1 + len(layers)
        """Calls of `on_layer` for one image: for its decoding, and for each layer."""
        self._cache: OrderedDict[tuple[WeightState, str | None, bytes], ImageEmbedding] = OrderedDict()
        self._lock = threading.Lock()
        self.computed = 0
        """Images that the vision tower has embedded."""

    def is_cached(self, image: Image, namespace: str | None) -> bool:
        """Return whether `embed` would compute nothing."""
        with self._lock:
            return (weight_state(self.model), namespace, image.digest) in self._cache

    def embed(
        self, image: Image, namespace: str | None, on_layer: Callable[[], object] | None = None
    ) -> ImageEmbedding:
        """Return the embedding of an image, cached within a namespace.

        on_layer: called before the image is decoded and before each layer of the tower. Raises as
        `ImageReader.pixels`, MemoryPlanError, and what `on_layer` raises.
        """
        key = weight_state(self.model), namespace, image.digest
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
        _pauses.on_layer = on_layer
        try:
            _pause()
            found = self._computed(image)
        finally:
            _pauses.on_layer = None
        with self._lock:
            self._cache[key] = found
            size = sum(one.nbytes for one in self._cache.values())
            while size > CACHE_BYTES and len(self._cache) > 1:
                size -= self._cache.popitem(last=False)[1].nbytes
        return found

    @torch.no_grad()
    def _computed(self, image: Image) -> ImageEmbedding:
        device = self.model.device
        given = {name: tensor.to(device) for name, tensor in self.reader.pixels(image).items()}
        is_alone = image.line == 1 and image.tokens == 2  # transformers splits no features of one part
        if is_alone:
            given = {name: torch.cat([tensor, tensor]) for name, tensor in given.items()}
        try:
            output = self._module.get_image_features(**given, return_dict=True)
        except torch.OutOfMemoryError:
            output = None  # the activations in the error's frames are free once it is handled
        if output is None:
            reclaim(device=idle_device_bytes())
            output = self._again(given, image)
        self.computed += 1
        rows, deep = output.pooler_output, getattr(output, "deepstack_features", None) or ()
        rows = rows[0] if len(rows) == 1 or is_alone else torch.cat(list(rows))
        if image.line:
            rows = self._with_breaks(rows, image)
        if rows.shape[0] != image.tokens:
            raise InputDataError(
                f"The model's vision tower makes {rows.shape[0]} rows of an image with {image.tokens} tokens; its "
                "preprocessor_config.json belongs to another model."
            )
        return ImageEmbedding(rows.cpu(), tuple(one.cpu() for one in deep))

    def _with_breaks(self, rows: Tensor, image: Image) -> Tensor:
        """Return the rows of parts with those of the tokens that end lines, which are token embeddings."""
        ids = torch.tensor(self.reader.plain(image.ids), device=rows.device)
        model: Any = self.model
        found: Tensor = model.get_input_embeddings()(ids).to(rows.dtype)
        parts = ids == self.reader.token
        if int(parts.sum()) == rows.shape[0]:
            found[parts] = rows
            return found
        return rows

    def _again(self, given: dict[str, Any], image: Image) -> Any:
        try:
            return self._module.get_image_features(**given, return_dict=True)
        except torch.OutOfMemoryError as error:
            raise MemoryPlanError(
                f"The GPU has no memory to embed an image of {image.tokens:,} tokens. Send a smaller image, or set a "
                "smaller size in preprocessor_config.json."
            ) from error

    def arguments(self, images: Sequence[ImageEmbedding], inside: Tensor) -> dict[str, Any]:
        """Return the arguments of a forward with these rows. inside: bool (1, tokens), True for parts of images."""
        rows = torch.cat([one.rows for one in images]).to(inside.device)
        if self._is_gemma:
            output = SimpleNamespace(pooler_output=rows[None])
            return {"pixel_values": EmbeddedPixels(output), "token_type_ids": inside.long()}
        deep = [torch.cat(layer).to(inside.device) for layer in zip(*(one.deep for one in images), strict=True)]
        return {"pixel_values": EmbeddedPixels(SimpleNamespace(pooler_output=[rows], deepstack_features=deep))}


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of one sequence.

    Attributes:
        encoder: encoder of the model.
        placed: images with their columns, ascending.
        namespace: namespace within which embeddings are cached.
    """

    encoder: ImageEncoder
    placed: tuple[PlacedImage, ...]
    namespace: str | None = ""

    @property
    def shift(self) -> int:
        """Position of a token after all images, less its column."""
        return sum(one.image.positions - one.image.tokens for one in self.placed)

    def within(self, start: int, stop: int) -> list[PlacedImage]:
        """Return the images with a token among columns [start, stop)."""
        return [one for one in self.placed if max(start, one.start) < min(stop, one.stop)]

    def most_tokens(self, start: int, stop: int) -> int:
        """Return the tokens of the largest image that a forward of columns [start, stop) would embed; 0: none."""
        new = [one.image for one in self.within(start, stop) if not self.encoder.is_cached(one.image, self.namespace)]
        return max((image.tokens for image in new), default=0)

    def chunks(self, start: int, stop: int) -> int:
        """Return the calls of `on_layer` in a forward of columns [start, stop)."""
        new = {
            one.image.digest
            for one in self.within(start, stop)
            if not self.encoder.is_cached(one.image, self.namespace)
        }
        return len(new) * self.encoder.chunks

    def inputs(
        self, ids: Tensor, place: Tensor, start: int, on_layer: Callable[[], object] | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the model's ids, positions and further arguments of a forward of columns from `start` on.

        ids: (batch, columns). place: positions (batch, columns) that count tokens. The returned positions are of that
        shape, or (3, 1, columns) if parts of an image with a grid are among them. Raises as `ImageEncoder.embed`.
        """
        stop, images = start + ids.shape[1], []
        for first, image in self.within(start, stop):
            low, high = max(start, first), min(stop, first + image.tokens)
            whole, span = self.encoder.embed(image, self.namespace, on_layer), slice(low - first, high - first)
            images.append(ImageEmbedding(whole.rows[span], tuple(one[span] for one in whole.deep)))
        if not images:
            return ids, place + self._shift_at(start), {}
        inside = (ids >= FIRST_ID) & (ids <= LAST_ID)
        arguments = self.encoder.arguments(images, inside)
        return ids.masked_fill(inside, self.encoder.reader.token), self.positions(start, stop).to(place), arguments

    def positions(self, start: int, stop: int) -> Tensor:
        """Return the positions of columns [start, stop), int64: (1, columns), or (3, 1, columns) if a part of an image
        with a grid is among them.
        """
        place, shift, has_grid = np.tile(np.arange(start, stop), (3, 1)) + self._shift_at(start), 0, False
        for first, image in self.placed:
            last = first + image.tokens
            if image.grid is not None and first < stop and last > start:
                inner = np.stack((np.zeros(image.tokens, np.int64), *np.divmod(np.arange(image.tokens), image.grid[1])))
                low, high = max(first, start), min(last, stop)
                place[:, low - start : high - start] = inner[:, low - first : high - first] + first + shift
                place[:, high - start :] = np.arange(high, stop) + shift + image.positions - image.tokens
                has_grid = True
            shift += image.positions - image.tokens
        return torch.from_numpy(place[:, None] if has_grid else place[:1])

    def _shift_at(self, column: int) -> int:
        """Position of a column, less the column, after the images that end there or before."""
        return sum(one.image.positions - one.image.tokens for one in self.placed if one.stop <= column)

    def without_data(self) -> PromptImages:
        """Return the same images without their files, for positions of later tokens."""
        placed = tuple(PlacedImage(one.start, one.image.without_data()) for one in self.placed)
        return PromptImages(self.encoder, placed, self.namespace)
