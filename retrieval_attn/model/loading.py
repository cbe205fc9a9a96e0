"""Load a model, tokenizer or config by name, and choose where and in what precision it runs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError
from retrieval_attn.gpu.memory import expand_segments
from retrieval_attn.model.bundled import model_path
from retrieval_attn.model.checkpoint import reason, require_reachable, require_sizes
from retrieval_attn.model.expert_loading import READ, can_hold_floats, float_options, reads_floats
from retrieval_attn.model.experts import use_packed_experts
from retrieval_attn.model.fused.host import run_programs
from retrieval_attn.model.gguf.checkpoint import METHOD, TILES, config_of, settled, unpacked_formats, weights_of
from retrieval_attn.model.gguf.file import GgufFile, read, resolve
from retrieval_attn.model.gguf.tokenizer import tokenizer_of
from retrieval_attn.model.grouped_loading import grouped_options, kernel_format, whole_model
from retrieval_attn.model.image_embedding import ImageEncoder
from retrieval_attn.model.images import ImageReader
from retrieval_attn.model.multimodal import model_class
from retrieval_attn.model.placement import is_hooked
from retrieval_attn.model.quantization import (
    PACKAGE,
    chosen_dtype,
    held_bytes,
    loading_config,
    missing_package,
    options_in,
    own_method,
    quantization_of,
    require_package,
)
from retrieval_attn.model.rope import length_rope, with_yarn
from retrieval_attn.model.stored import StoredWeight

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The torch device for "auto", "cpu", "cuda" or "cuda:N"; raises ConfigError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a torch device; use auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} was asked for, but torch {torch.__version__} sees no CUDA device; use cpu.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype argument of from_pretrained: "auto" is float32 on the CPU, the checkpoint's own elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}.")
    return DTYPES[name]


def loaded_dtype(model_config: Any, name: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype that `choose_dtype` gives for a checkpoint with this config; None if only the weights tell."""
    chosen = choose_dtype(name, device)
    if chosen == "auto":
        chosen = getattr(model_config.get_text_config(decoder=True), "dtype", None) or model_config.dtype
    return chosen if isinstance(chosen, torch.dtype) else None


def load(factory: Any, name_or_path: str | Path, **options: Any) -> Any:
    """Return factory.from_pretrained(...), with errors of one line. Never run a folder's own code.

    name_or_path: a folder, a hub name, a GGUF file (see `gguf.file.resolve`) or "bundled". A hub that cannot be reached
    is asked once.
    Raises InputDataError for a folder that is missing, incomplete or damaged; what a machine lacks, such as memory or a
    package, is raised as it is.
    """
    name_or_path = model_path(name_or_path)
    try:
        gguf = resolve(name_or_path, download=True)
        if gguf is None:
            require_reachable(name_or_path)
            found = factory.from_pretrained(str(name_or_path), **{"trust_remote_code": False, **options})
        else:
            found = _from_gguf(factory, read(gguf), **options)
            _trim_heap()
    except (RetrievalAttentionError, ImportError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # damaged files make transformers and its readers raise nearly everything
        if "trust_remote_code" in str(error):
            raise InputDataError(
                f"{str(name_or_path)!r} needs Python code of its own (auto_map in its files), which is never run here: "
                "there is no option such as trust_remote_code. Use a checkpoint of a model type that transformers has. "
                "If you trust the code, load model and tokenizer with transformers' from_pretrained(..., "
                "trust_remote_code=True) and give them to retrieval_attn.Context(model, tokenizer)."
            ) from error
        raise InputDataError(
            f"No model could be loaded from {str(name_or_path)!r} ({reason(error)}). Give a folder with config.json, "
            "weights and tokenizer, a GGUF file, or a hub name that is downloaded or reachable."
        ) from error
    if isinstance(found, PreTrainedConfig):
        require_sizes(found, name_or_path)
    return found


def _trim_heap() -> None:
    """Return freed memory to the system: vocabularies are many small objects, which glibc keeps in its heap."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _from_gguf(factory: Any, file: GgufFile, **options: Any) -> Any:
    """Return the config, the tokenizer or the model of a GGUF file, by the Auto class of transformers."""
    from transformers import AutoConfig, AutoTokenizer

    if factory is AutoTokenizer:
        return tokenizer_of(file)
    config = options.pop("config", None) or config_of(file)
    if factory is AutoConfig:
        return config
    dtype, place = options.pop("dtype", "auto"), options.get("device_map")
    dtype = config.dtype if dtype == "auto" else dtype
    # blocks are unpacked where the weights will be, unless those are spread over devices
    device = place[""] if isinstance(place, dict) and list(place) == [""] else torch.device("cpu")
    form = config.quantization_config["form"] if own_method(config) == METHOD else None
    host_experts = 0 if form is None else config.quantization_config.get("host_experts", 0)
    weights = weights_of(file, config, dtype, torch.device(device), form=form, host_experts=host_experts)
    if form is not None:
        del config.quantization_config  # transformers has a loader of its own by this name
    if form == TILES:
        config.quantization_config = {"quant_method": READ}
    made: Any = factory._model_mapping[type(config)]
    model, told = made.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, **options
    )
    if missing := sorted(told["missing_keys"]):
        raise InputDataError(f"{file.path} has no tensors for {len(missing)} weights, such as {missing[0]}.")
    if form == TILES:
        del model.config.quantization_config
    model.config.name_or_path = file.path
    names = unpacked_formats(file, form)
    if names and "quantization_config" not in options:
        log.warning(
            "%s: weights stored as %s are unpacked to %s; all weights take %.2f GiB.",
            file.path, ", ".join(names), str(dtype).removeprefix("torch."), held_bytes(model) / (1 << 30),
        )  # fmt: skip
    return model


def checkpoint_config(name_or_path: str | Path, yarn: float | None = None) -> Any:
    """A model's config; with yarn times the positions. Raises InputDataError as `load`, ConfigError as `with_yarn`."""
    from transformers import AutoConfig

    return with_yarn(load(AutoConfig, name_or_path), yarn)


def load_image_reader(name_or_path: str | Path, tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """Return the reader of a checkpoint's images; None for a checkpoint without a vision tower.

    Raises UnsupportedModelError if the images of its kind are not served, ConfigError without Pillow, InputDataError if
    it has no image processor.
    """
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # the public name needs torchvision

    config = checkpoint_config(name_or_path)
    if getattr(config, "vision_config", None) is None:
        return None
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("Images need Pillow: pip install 'retrieval-attn[images]'.")
    return ImageReader(config, load(AutoImageProcessor, name_or_path), tokenizer)


def load_image_encoder(model: Any, tokenizer: PreTrainedTokenizerBase) -> ImageEncoder:
    """Return an encoder of a loaded model's images. Raises InputDataError for a model that reads none, and as
    `load_image_reader`.
    """
    reader = load_image_reader(model.config.name_or_path, tokenizer)
    if reader is None or length_rope(model) is not None:
        raise InputDataError("The model reads no images: it has no vision tower, or dynamic positions.")
    return ImageEncoder(model, reader)


def load_model(
    name_or_path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    tensor_parallel: bool = False,
    quantization: str | None = None,
    yarn: float | None = None,
    host_experts: int = 0,
    **options: Any,
) -> Any:
    """A causal language model, of text or of text and images, in evaluation mode: on one device, or over several.

    device, dtype: see `choose_device` and `choose_dtype`. device_map: whole layers on several devices, as transformers
    takes it ("auto", "balanced", or a device for each module; needs accelerate). tensor_parallel: the heads shared by
    the processes of a torchrun, each on the GPU of its LOCAL_RANK. quantization: of the linear layers' weights, a name
    of `model.quantization.FORMATS`; None: as the checkpoint has them. yarn: see `rope.with_yarn`. host_experts: of
    each layer, in host memory if they are in 4 bits and the device is a GPU. options: more for from_pretrained.
    Raises InputDataError (no such model), ConfigError (no such device, both ways at once, no torchrun, a package that
    is not installed).
    """
    alone = device_map is None and not tensor_parallel
    place = choose_device(device if alone else "auto")
    model_config = settled(checkpoint_config(name_or_path, yarn), place, dtype, quantization, alone=alone)
    gguf = resolve(model_path(name_or_path), download=True) is not None
    if yarn is not None or gguf:
        options["config"] = model_config
    if gguf and host_experts:
        model_config.quantization_config["host_experts"] = host_experts
    expand_segments(place)
    held_in = kernel_format(model_config, quantization)
    floats = not tensor_parallel and reads_floats(own_method(model_config)) and can_hold_floats(place)
    chosen = choose_dtype(chosen_dtype("int4" if floats else held_in, dtype, place), place)
    grouped = held_in != quantization and not tensor_parallel
    if grouped:
        options |= grouped_options(model_config, place, host_experts)
    if floats and quantization is None:
        options |= float_options(model_config, options_in(quantization_of(model_config)), place, host_experts)
    if quantization is not None:
        if tensor_parallel:
            raise ConfigError(
                f"quantization={quantization!r} does not work with tensor_parallel; use device_map, or leave it out."
            )
        options["quantization_config"] = loading_config(quantization, model_config, place, host_experts)
    if not alone:
        options |= _spread(device, device_map, tensor_parallel)
    if gguf and tensor_parallel:
        raise ConfigError("tensor_parallel does not work with a GGUF file; use device_map, or leave it out.")
    method = METHOD if gguf else own_method(model_config) or (None if quantization is None else PACKAGE)
    quantised = method is not None and (place.type == "cuda" or method == "bitsandbytes")
    if alone and quantised:
        require_package("Loading quantised weights there", "accelerate")
    if alone and (quantised or (place.type == "cuda" and importlib.util.find_spec("accelerate") is not None)):
        # from the files to the device without a copy of the model in host memory; they do not move later
        options["device_map"] = {"": place}
    try:
        model = load(model_class(model_config), name_or_path, dtype=chosen, **options)
        if grouped:
            model = whole_model(*model)
    except ImportError as error:
        raise missing_package(error, model_config) from error
    if alone:
        model = model.to(place) if method is None and "device_map" not in options else _without_hooks(model)
    use_packed_experts(model)
    if alone and place.type == "cpu" and any(isinstance(one, StoredWeight) for one in model.parameters()):
        run_programs(model)
    return model.eval()


def _without_hooks(model: Any) -> Any:
    """A model on one device without the hooks by which accelerate moves tensors to it: they are there already."""
    if is_hooked(model):
        from accelerate.hooks import remove_hook_from_module

        remove_hook_from_module(model, recurse=True)
    return model


def _spread(device: str, device_map: str | Mapping[str, Any] | None, tensor_parallel: bool) -> dict[str, Any]:
    """Return the options of from_pretrained that split a model over devices, see `load_model`."""
    if device_map is not None and tensor_parallel:
        raise ConfigError(
            "device_map and tensor_parallel were both given, but only one can split a model; leave one out."
        )
    if device != "auto":
        raise ConfigError(
            f"device={device!r} names one device, but device_map or tensor_parallel uses several; leave device out."
        )
    if tensor_parallel:
        return {"distributed_config": _tensor_parallel()}
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("device_map needs the package accelerate, which is not installed; `pip install accelerate`.")
    return {"device_map": device_map if isinstance(device_map, str) else dict(device_map or {})}


def _tensor_parallel() -> Any:
    from transformers.distributed import DistributedConfig

    processes = launched_processes()
    if processes < 2:
        raise ConfigError(
            "tensor_parallel needs one process for each GPU; start this program with "
            "`torchrun --nproc-per-node N program.py` (N: number of GPUs), or give device_map for a single process."
        )
    return DistributedConfig(tp_plan="auto")


def launched_processes() -> int:
    """How many processes a launcher such as torchrun has started for this program; 1 without one."""
    given = os.environ.get("WORLD_SIZE", "1")
    return int(given) if given.isdigit() and "RANK" in os.environ else 1
