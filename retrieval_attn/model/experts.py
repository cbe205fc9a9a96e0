"""Weights of a layer's experts in 4 bits: quantized while a model is loaded, multiplied as they are stored.

transformers has the experts of a layer as two parameters with three axes, and a function that multiplies them, chosen
by the config (`experts_implementation`). A parameter becomes an `ExpertWeights`, and PACKED the function, so that
models keep their own routers, activations and biases.

On a GPU the numbers are in the layout of `gpu/packed_experts.py`, on a CPU in that of `cpu/matrix.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from retrieval_attn.errors import ConfigError
from retrieval_attn.gpu.expert_blocks import LayerBuffer, PlacedExperts
from retrieval_attn.gpu.packed import PackedWeights
from retrieval_attn.gpu.packed_experts import ExpertMatrices, ExpertShape, PackedExperts, can_pack
from retrieval_attn.model.grouped import GroupedMatrix
from retrieval_attn.model.layers import BATCHED, GROUPED, expert_counts, modules_of
from retrieval_attn.model.placed_experts import join_layers, pack_placed
from retrieval_attn.model.stored import ALIASES, Storage, StoredWeight

PACKED = "retrieval_attn_packed"
"""Name of the function that multiplies packed experts, among transformers' `experts_implementation`."""
NAMES = ("gate_up_proj", "up_proj"), "down_proj"
"""Parameters of an experts module: one of the first two, and the last."""
GROUP = 64
"""Weights that share a scale on a GPU, as those of linear layers do (`model/quantization.py`)."""
STORAGE = Storage(4, half=True, moved=True)
"""How a CPU stores quantized experts: a float16 scale and offset for 32 weights."""
FLOAT_STORAGE = Storage(4, floats=True)
"""How a CPU stores experts of MXFP4."""
GROUPED_STORAGE = Storage(4, moved=True)
"""How a CPU stores experts of AWQ's and GPTQ's checkpoints."""
KERNEL_TOKENS = 64
"""Tokens up to which one product with all experts is used on a GPU: captured steps and short questions."""
HOST_TOKENS = 16
"""Tokens up to which a CPU multiplies by weights as they are stored."""


class StoredExperts(ExpertMatrices):
    """Matrices on a CPU."""

    weights: StoredWeight

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that hold the numbers, by name."""
        names, _ = self.weights.__tensor_flatten__()
        return {name: getattr(self.weights, name) for name in names}

    def products(self, numbers: Tensor, chosen: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply as `PackedExperts.products`."""
        flat = chosen.reshape(-1).long().contiguous()
        given = numbers.float().contiguous()
        out = torch.empty(len(flat), self.shape[1])
        if len(flat):
            if int(flat.min()) < 0 or int(flat.max()) >= self.experts:
                raise IndexError(f"an expert is not in 0 .. {self.experts - 1}")
            self.weights.matrix.multiply_parts(
                given.data_ptr(), len(given), flat.data_ptr(), len(flat), self.shape[1], out.data_ptr()
            )
        found = out.to(numbers.dtype)
        return found if bias is None else found + bias[flat]

    def matrices(self, first: int, count: int) -> Tensor:
        """Return a copy of the matrices of experts [first, first + count), float32 (count, out, in)."""
        _, out, columns = self.shape
        found = torch.empty(count, out, columns)
        self.weights.matrix.widen(first * out, count * out, found.data_ptr())
        return found


Experts = PackedExperts | PlacedExperts | StoredExperts


class ExpertWeights(Tensor):
    """The matrices of a layer's experts as a parameter, (experts, out, in), or (experts, in, out) if transposed.

    held: the numbers. dtype: of the module's inputs and outputs. PACKED multiplies the numbers; other operations get
    copies in this dtype, an index of the first axis a copy of one matrix.
    """

    held: Experts
    transposed: bool

    @staticmethod
    def __new__(cls: type[ExpertWeights], held: Experts, *, dtype: torch.dtype, transposed: bool) -> ExpertWeights:
        experts, out, columns = held.shape
        shape = (experts, columns, out) if transposed else (experts, out, columns)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=held.device)
        made.held, made.transposed = held, transposed
        for name, tensor in held.tensors.items():
            setattr(made, name, tensor)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Return the names of the tensors that hold the numbers, and the rest of what makes the weights."""
        experts, _, columns = self.held.shape
        kind = self.held if isinstance(self.held, PlacedExperts) else type(self.held)
        made = kind, self.dtype, self.transposed, experts, columns, self.held.weights.floats
        return list(self.held.tensors), made

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], made: Any, *_: Any) -> ExpertWeights:
        kind, dtype, transposed, experts, columns, floats = made
        if isinstance(kind, PlacedExperts):
            held: Experts = kind
        elif kind is PackedExperts:
            weights = PackedWeights(parts["words"], parts["scales"], columns, floats=floats)
            held = PackedExperts(weights, experts)
        else:
            own = parts["numbers"], parts.get("scales"), parts.get("offsets")
            held = StoredExperts(StoredWeight(*own, dtype=dtype, floats=floats), experts)
        return ExpertWeights(held, dtype=dtype, transposed=transposed)

    @property
    def fixed_tensors(self) -> dict[str, Tensor] | None:
        """The tensors that tell these weights from others if `held.tensors` change with the place of experts."""
        sample = self.held.weights.sample if isinstance(self.held, PlacedExperts) else None
        return None if sample is None else {"sample": sample}

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape and how the numbers are stored."""
        return f"ExpertWeights({tuple(self.shape)}, {type(self.held).__name__}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run an operation with copies of the matrices; copies and aliases of all share what is stored."""
        first, given = args[0] if args else None, kwargs or {}
        if isinstance(first, cls):
            if func in ALIASES:
                return ExpertWeights(first.held, dtype=first.dtype, transposed=first.transposed)
            if func is torch.ops.aten._to_copy.default:
                return first._copied(given.get("device"), given.get("dtype"))
            if func is torch.ops.aten.select.int and args[1] == 0:
                return first.copies(args[2] % len(first), 1)[0]
        args, given = torch.utils._pytree.tree_map_only(cls, lambda one: one.copies(0, len(one)), (args, given))
        return func(*args, **given)

    def copies(self, first: int, count: int) -> Tensor:
        """Return copies of the matrices of some experts, in the dtype and the order of axes of the parameter."""
        found = self.held.matrices(first, count).to(self.dtype)
        return found.transpose(1, 2) if self.transposed else found

    def _copied(self, device: torch.device | str | None, dtype: torch.dtype | None) -> ExpertWeights:
        place, held = torch.device(device or self.held.device), self.held
        if isinstance(held, PackedExperts):
            held = held.to(place)
        elif place.type != held.device.type:
            raise ConfigError(
                f"These experts are packed for {held.device} and cannot be moved to {place}; load the model with "
                f"device={str(place)!r}."
            )
        return ExpertWeights(held, dtype=dtype or self.dtype, transposed=self.transposed)


def expert_parameters(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the two parameters of a module of experts that can be packed; None for other modules.

    The module's class is one that transformers' `use_experts_implementation` marks; see `can_pack` for sizes.
    """
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "config")):
        return None
    up, down = NAMES[0][0 if module.has_gate else 1], NAMES[1]
    for name in (up, down):
        weight = module._parameters.get(name)
        if weight is None or weight.ndim != 3:
            return None
        _, out, columns = matrix_shape(module, name)
        if not (can_pack(out, columns, GROUP) and STORAGE.can_store(out, columns)):
            return None
    return up, down


def matrix_shape(module: nn.Module, name: str) -> ExpertShape:
    """Return the sizes of a parameter of a module of experts."""
    experts, out, columns = module._parameters[name].shape  # type: ignore[union-attr]
    return ExpertShape(experts, columns, out) if module.is_transposed else ExpertShape(experts, out, columns)


def copied_bytes(module: nn.Module, width: int) -> int:
    """Return the bytes of the largest copy of a module's packed matrices in a prefill chunk; 0 if it has none.

    width: bytes of a number of the copy.
    """
    shapes = (matrix_shape(module, name) for name in expert_parameters(module) or ())
    return max((width * shape.out * shape.columns * shape.copied for shape in shapes), default=0)


def quantized_matrix(weight: Tensor, group: int, dtype: torch.dtype) -> GroupedMatrix:
    """Return a matrix (out, in) in 4 bits, rounded to the nearest, with scales and offsets that are exact in `dtype`.

    The last group of a row may be part of one.
    """
    rows, columns = weight.shape
    groups = -(-columns // group)
    filled = functional.pad(weight.float(), (0, groups * group - columns)).view(rows, groups, group)
    low, high = filled.amin(-1), filled.amax(-1)
    scales = ((high - low) / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype).float()
    # of a GPU's form the number 8 is what is exact, of a CPU's both are within a rounding
    offsets = (low + 8 * scales).to(dtype).float() - 8 * scales
    numbers = ((filled - offsets[..., None]) / scales[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return GroupedMatrix(numbers.flatten(1)[:, :columns].contiguous(), scales, offsets)


def quantized_experts(weight: Tensor, *, transposed: bool, device: torch.device, on_host: int = 0) -> ExpertWeights:
    """Return experts (experts, out, in), or (experts, in, out) if transposed, in 4 bits for a device.

    on_host: the last ones, which a GPU reads in host memory.
    """
    if device.type != "cpu":
        return tiled_experts(weight, transposed=transposed, device=device, on_host=on_host)
    matrices, shape = _matrices(weight, transposed=transposed)
    found = stored_experts((quantized_matrix(one, 32, torch.float16) for one in matrices), shape, STORAGE)
    return ExpertWeights(found, dtype=weight.dtype, transposed=transposed)


def tiled_experts(weight: Tensor, *, transposed: bool, device: torch.device, on_host: int = 0) -> ExpertWeights:
    """Return experts as `quantized_experts` for a GPU. One expert at a time is copied to the device."""
    matrices, shape = _matrices(weight, transposed=transposed)
    found = (quantized_matrix(one.to(device), GROUP, torch.bfloat16) for one in matrices)
    held = pack_placed(found, shape, GROUP, device, on_host, floats=False)
    return ExpertWeights(held, dtype=weight.dtype, transposed=transposed)


def _matrices(weight: Tensor, *, transposed: bool) -> tuple[Iterator[Tensor], ExpertShape]:
    """Return the matrices (out, in) of experts, and their sizes."""
    whole = weight.transpose(1, 2) if transposed else weight
    return iter(whole), ExpertShape(*whole.shape)


def float_experts(
    blocks: Tensor, scales: Tensor, *, dtype: torch.dtype, transposed: bool, device: torch.device, on_host: int = 0
) -> ExpertWeights:
    """Return experts of MXFP4 for a device, without a loss.

    blocks: uint8 (experts, out, groups, 16), a byte has two numbers of E2M1, the first one in its lower half. scales:
    uint8 (experts, out, groups), the exponents of powers of two, plus 127 (Open Compute Project, "Microscaling
    Formats", 5.2). dtype, transposed: see `ExpertWeights`. on_host: see `quantized_experts`.
    """
    if device.type != "cpu":
        return ExpertWeights(float_tiles(blocks, scales, device, on_host), dtype=dtype, transposed=transposed)
    found = stored_experts(map(_float_matrix, blocks, scales), _float_shape(blocks), FLOAT_STORAGE)
    return ExpertWeights(found, dtype=dtype, transposed=transposed)


def float_tiles(
    blocks: Tensor, scales: Tensor, device: torch.device, on_host: int = 0
) -> PackedExperts | PlacedExperts:
    """Return experts of MXFP4 as a GPU multiplies them. One expert at a time is copied to the device."""
    parts = zip(blocks, scales, strict=True)
    matrices = (_float_matrix(own.to(device), powers.to(device)) for own, powers in parts)
    return pack_placed(matrices, _float_shape(blocks), 2 * blocks.shape[-1], device, on_host, floats=True)


def grouped_experts(
    matrices: Iterator[GroupedMatrix],
    shape: ExpertShape,
    group: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_host: int = 0,
) -> ExpertWeights:
    """Return experts of a checkpoint in 4 bits with `group` weights a scale, for a device.

    A CPU stores each scale for 32 weights: group is a multiple. on_host: see `quantized_experts`.
    """
    if device.type != "cpu":
        held: Experts = pack_placed(matrices, shape, group, device, on_host, floats=False)
    else:
        times = group // GROUPED_STORAGE.group
        split = (
            one._replace(scales=one.scales.repeat_interleave(times, 1), offsets=one.offsets.repeat_interleave(times, 1))
            for one in matrices
        )
        held = stored_experts(split, shape, GROUPED_STORAGE)
    return ExpertWeights(held, dtype=dtype, transposed=False)


def _float_matrix(blocks: Tensor, powers: Tensor) -> GroupedMatrix:
    """Return the four bits of an expert's numbers, scales for twice their values, and no offsets."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    halved = torch.exp2(powers.float() - 128)
    return GroupedMatrix(codes, halved, torch.zeros_like(halved))


def _float_shape(blocks: Tensor) -> ExpertShape:
    experts, out, groups, half = blocks.shape
    return ExpertShape(experts, out, groups * half * 2)


def stored_experts(matrices: Iterator[GroupedMatrix], shape: ExpertShape, storage: Storage) -> StoredExperts:
    """Return experts as a CPU stores them, of their matrices one at a time."""
    return StoredExperts(storage.weight(matrices, shape.experts * shape.out, torch.float32), shape.experts)


def use_packed_experts(model: Any) -> None:
    """Let a model multiply its packed experts as they are stored; nothing changes without such experts."""
    modules = list(filter(has_packed_experts, model.modules()))
    placed = []
    for module in modules:
        module.config._experts_implementation = PACKED
        layer = _Layer.of(module)
        if layer is not None and isinstance(layer.up, PlacedExperts) and isinstance(layer.down, PlacedExperts):
            placed.append((module, (layer.up.weights, layer.down.weights)))
    buffer = join_layers(model, [blocks for _, blocks in placed])
    for module, blocks in placed if buffer is not None else ():
        setattr(module, _SHARED, (buffer, blocks))


_SHARED = "_retrieval_attn_expert_buffer"
"""Attribute of a module of experts in host memory: the model's buffer for copies, and the module's blocks."""


def has_packed_experts(module: nn.Module) -> bool:
    """Return True if a module has packed weights of experts among its own parameters."""
    return any(type(own) is ExpertWeights for own in module._parameters.values())


def load_expert_kernels(root: nn.Module, rows: int) -> None:
    """Compile and load what `rows` tokens launch for the packed experts in a module, by multiplying zeros."""
    for module in filter(has_packed_experts, modules_of(root)):
        layer, visited = _Layer.of(module), expert_counts(module.config)[0]  # type: ignore[arg-type]
        if layer is None or not visited or isinstance(layer.up, StoredExperts):
            continue
        if layer.up.has_kernel:
            chosen = torch.arange(visited, device=layer.up.device).repeat(rows, 1)
            layer.multiplied(torch.zeros(rows, layer.up.shape[2], dtype=torch.bfloat16, device=chosen.device), chosen)


def packed_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the sum of what each token's experts make of it, (tokens, in), as transformers' own functions do.

    top_k_index, top_k_weights: (tokens, visited). Weights that are not packed, and what autograd follows, go through
    transformers' grouped product with copies of all matrices.
    """
    layer = _Layer.of(module)
    if layer is None or layer.is_followed(hidden_states, top_k_weights):
        way = BATCHED if _is_captured(hidden_states) else GROUPED
        found: Tensor = ALL_EXPERTS_FUNCTIONS[way](module, hidden_states, top_k_index, top_k_weights)
        return found
    if layer.at_once(hidden_states):
        pairs = layer.multiplied(hidden_states, top_k_index) * top_k_weights.reshape(-1, 1)
    else:
        pairs = layer.multiplied_in_turn(hidden_states, top_k_index, top_k_weights)
    return pairs.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)


def _is_captured(tensor: Tensor) -> bool:
    """Return True if a graph is being captured."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class _Layer(NamedTuple):
    """The packed experts of a layer, their biases (experts, out), and the module, which has the activation."""

    module: Any
    up: Experts
    down: Experts
    up_bias: Tensor | None
    down_bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> _Layer | None:
        """Return the experts of a module; None if they are not packed."""
        names = NAMES[0][0 if module.has_gate else 1], NAMES[1]
        weights = [getattr(module, name) for name in names]
        if any(type(own) is not ExpertWeights for own in weights):
            return None
        biases = [getattr(module, f"{name}_bias") if module.has_bias else None for name in names]
        return cls(module, *(own.held for own in weights), *biases)

    def is_followed(self, *inputs: Tensor) -> bool:
        """Return True if autograd follows inputs or biases."""
        given = [*inputs, *(one for one in (self.up_bias, self.down_bias) if one is not None)]
        return torch.is_grad_enabled() and any(one.requires_grad for one in given)

    def at_once(self, hidden: Tensor) -> bool:
        """Return True if one product has all tokens: there are few, or a graph is being captured."""
        if isinstance(self.up, StoredExperts):
            return len(hidden) <= HOST_TOKENS
        return len(hidden) <= KERNEL_TOKENS or _is_captured(hidden)

    def activated(self, numbers: Tensor) -> Tensor:
        """Return the input of the second product."""
        module = self.module
        found: Tensor = module._apply_gate(numbers) if module.has_gate else module.act_fn(numbers)
        return found

    def multiplied(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Return what each of a token's experts makes of it, (tokens * visited, in), by shapes of the inputs alone."""
        if isinstance(self.up, PlacedExperts):
            inner = self.up.products(hidden, chosen, self.up_bias, counted=True)
        else:
            inner = self.up.products(hidden, chosen, self.up_bias)
        return self.down.products(self.activated(inner), chosen, self.down_bias)

    def multiplied_in_turn(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Multiply many tokens by copies of a few experts at a time, and by weights (tokens, visited).

        The host reads once how many tokens each expert has.
        """
        flat, visited = chosen.reshape(-1), chosen.shape[1]
        order = flat.argsort(stable=True)
        experts, step, place = self.up.experts, self.up.shape.copied, 0
        visits = torch.bincount(flat, minlength=experts)
        counts = visits.tolist()
        found = hidden.new_empty(len(flat), self.down.shape[1])
        if isinstance(self.up, PlacedExperts):
            self.up.count(visits)
        with self._buffered(counts) as buffer:
            if buffer is None and isinstance(self.up, PlacedExperts):
                return self._multiplied_in_place(hidden, chosen, weights)
            for first in range(0, experts, step):
                own = counts[first : first + step]
                if not any(own):
                    continue
                pairs = order[place : place + sum(own)]
                picked, place = flat[pairs], place + sum(own)
                inner = _each_expert(hidden[pairs // visited], self.up, first, own, buffer)
                inner = self.activated(inner if self.up_bias is None else inner + self.up_bias[picked])
                product = _each_expert(inner, self.down, first, own, buffer)
                product = product if self.down_bias is None else product + self.down_bias[picked]
                found[pairs] = (product * weights.reshape(-1, 1)[pairs]).to(found.dtype)
        return found

    def _multiplied_in_place(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Multiply as `multiplied_in_turn` by the kernel of a few tokens, KERNEL_TOKENS at a time."""
        given = zip(hidden.split(KERNEL_TOKENS), chosen.split(KERNEL_TOKENS), strict=True)
        return torch.cat([self.multiplied(*part) for part in given]) * weights.reshape(-1, 1)

    @contextmanager
    def _buffered(self, counts: list[int]) -> Iterator[LayerBuffer | None]:
        """Copy the visited experts in host memory to the model's buffer; None: none is there, or they are moved."""
        buffer, layer = vars(self.module).get(_SHARED, (None, ()))
        if buffer is None:
            yield None
            return
        with buffer.filled(layer, (expert for expert, count in enumerate(counts) if count)):
            yield buffer


def _each_expert(
    numbers: Tensor, experts: Experts, first: int, counts: list[int], buffer: LayerBuffer | None
) -> Tensor:
    """Multiply numbers (n, in), those of an expert together, by experts from `first` on. counts: rows of each."""
    out = numbers.new_empty(len(numbers), experts.shape[1])
    ends = list(itertools.accumulate(counts))
    if not isinstance(experts, PackedExperts):  # experts that no token visits are not widened
        placed = (buffer,) if isinstance(experts, PlacedExperts) else ()
        for number, (count, end) in enumerate(zip(counts, ends, strict=True)):
            if count:
                matrix = experts.matrices(first + number, 1, *placed)[0].to(numbers.dtype)
                torch.mm(numbers[end - count : end], matrix.t(), out=out[end - count : end])
        return out
    matrices = experts.matrices(first, len(counts)).to(numbers.dtype)
    for matrix, count, end in zip(matrices, counts, ends, strict=True):
        if count:
            torch.mm(numbers[end - count : end], matrix.t(), out=out[end - count : end])
    return out


ALL_EXPERTS_FUNCTIONS.register(PACKED, packed_forward)
