"""Loading a model from a name, a folder or a file, and recognising one that is already loaded.

A transformers model is wrapped in TransformerLens' bridge. Wrapping can change the function that a model computes (with
Falcon's ALiBi it does), so the logits of a few tokens are compared before and after; a difference is mended where we
know how, and refused otherwise. Nothing is decided by version numbers, so a fault mended upstream is simply no longer
found.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import logging
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from posattn.errors import InputError, PosattnError, PosattnWarning, UnsupportedModelError
from posattn.models._numbers import refuse_no_numbers
from posattn.models.base import Batch, Model

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
)
#: ways of seeing a model, by the names that `load_model` takes
ADAPTERS = ("bridge", "hooked", "plain", "auto")
_KEPT = "_posattn_model"  # a transformers model can be wrapped only once: it remembers its wrapper


def load_model(
    source: str | os.PathLike[str] | Any,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    adapter: str = "bridge",
    device_map: str | dict[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> Model:
    """Load a model.

    Args:
        source: `"bundled:NAME"`, a folder that transformers can read (a tokenizer is not needed), a `.gguf` file, a
            name on the Hugging Face hub, or a live model (see `as_model`).
        device: where to put it; default: CUDA where there is one, else the CPU.
        dtype: `torch.float32`, `"bfloat16"` … or `"auto"` for the checkpoint's own; default: float32 on the CPU, the
            checkpoint's own elsewhere.
        adapter: `"bridge"` wraps the model in TransformerLens' bridge, which writes every attention pattern down;
            `"plain"` leaves it as it is, with its fast attention (see `posattn.models.plain`), for long contexts;
            `"hooked"` loads a `HookedTransformer` by TransformerLens' name for it, without folding or centring, where
            there still is one (before 4); `"auto"` is the bridge, or `"hooked"` where there is none.
        device_map: accelerate's: `"auto"`, or a device for each part, `"cpu"` and `"disk"` included, for models that
            one device cannot hold. Takes the plain adapter.
        offload_folder: where parts on `"disk"` are kept.

    Raises:
        InputError: the file or folder is missing, or device or dtype is given for a live model.
        UnsupportedModelError: the model is unknown or unreachable, its configuration is out of range, it has no
            attention, is not a causal decoder, or TransformerLens would compute another function than the checkpoint.
    """
    if adapter not in ADAPTERS:
        raise InputError(f"adapter is one of {', '.join(ADAPTERS)}, not {adapter!r}")
    if adapter == "auto":
        adapter = "bridge" if importlib.util.find_spec("transformer_lens.model_bridge") else "hooked"
    if device_map is not None and (adapter != "plain" or device is not None):
        raise InputError('device_map goes with adapter="plain", and instead of device')
    if not isinstance(source, (str, os.PathLike)):
        if device is not None or dtype is not None or device_map is not None:
            raise InputError("device and dtype are for loading: move a live model yourself before handing it over")
        return as_plain(source) if adapter == "plain" else as_model(source)
    name = os.fspath(source)
    check_name(name)
    place, number = placement(device, dtype)
    how = _How(place, number, adapter, device_map, offload_folder)
    if adapter == "hooked":
        return _hooked(name, how)
    if name.startswith("bundled:"):
        return _bundled(name, how)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        return _gguf(path, how)
    if path.is_dir():
        return _folder(path, name, how)
    if path.exists():
        raise InputError(f"{name} is a file: give the model's folder, or a .gguf file")
    if _looks_like_a_path(name):
        raise InputError(f"no such file or folder: {name}")
    return _hub(name, how)


def check_name(name: str) -> None:
    """Refuse what names nothing.

    Raises:
        InputError: `name` is empty.
    """
    if not name.strip():
        raise InputError("no model is named: give a hub name, a folder, a .gguf file, or bundled:NAME")


@dataclasses.dataclass(frozen=True)
class _How:
    """The part of a request to load that does not depend on where the model comes from."""

    device: torch.device
    dtype: torch.dtype | str
    adapter: str
    device_map: Any
    offload_folder: Any

    def see(self, hf_model: Any, **facts: Any) -> Model:
        """The loaded transformers model through the adapter that was asked for."""
        return wrap(hf_model, **facts) if self.adapter == "bridge" else as_plain(hf_model, **facts)


def as_plain(hf_model: Any, *, name: str | None = None, revision: str | None = None, tokenizer: Any = None) -> Model:
    """A live transformers model through the plain adapter, which neither wraps nor changes it.

    Raises:
        UnsupportedModelError: it is none, is wrapped already, or does not use transformers' attention interface.
    """
    from posattn.models.plain import PlainModel

    if isinstance(hf_model, PlainModel):
        return hf_model
    if "PreTrainedModel" not in {cls.__name__ for cls in type(hf_model).__mro__}:
        raise UnsupportedModelError(f"the plain adapter takes a transformers model, not {type(hf_model).__name__}")
    if isinstance(getattr(hf_model, _KEPT, None), Model):
        raise UnsupportedModelError("this model is wrapped by TransformerLens' bridge already: load it anew")
    hf_model.eval()
    name = str(name or getattr(hf_model.config, "_name_or_path", None) or type(hf_model).__name__)
    _refuse_what_cannot_be(hf_model, name)
    with quiet():
        return PlainModel(hf_model, name=name, revision=revision, tokenizer=tokenizer)


def as_model(model: Any) -> Model:
    """The one face of whatever model the user holds.

    Accepts a `Model` (returned as it is), a TransformerLens `TransformerBridge` or `HookedTransformer`, or a
    transformers model. The last is wrapped in a bridge, in place: its own forward then runs through the bridge's parts.

    Raises:
        UnsupportedModelError: nothing of the kind, or the model cannot be measured.
    """
    if isinstance(model, Model):
        return model
    kinds = {cls.__name__ for cls in type(model).__mro__}
    if "TransformerBridge" in kinds:
        return _live_bridge(model)
    if "HookedTransformer" in kinds:
        from posattn.models.hooked import HookedModel

        return HookedModel(model)
    if "PreTrainedModel" in kinds:
        return wrap(model)
    if isinstance(model, (str, os.PathLike)):
        return load_model(model)
    raise UnsupportedModelError(
        f"{type(model).__name__} is not a model that can be measured: give a TransformerBridge, a HookedTransformer, a "
        "transformers model, or a name to load"
    )


def wrap(hf_model: Any, *, name: str | None = None, revision: str | None = None, tokenizer: Any = None) -> Model:
    """A transformers model, wrapped in TransformerLens' bridge and verified to compute what it computed before.

    The model is put into evaluation mode: with dropout on, no two passes agree and nothing can be measured.
    """
    from posattn.models.bridge import BridgeModel, set_attention

    kept = getattr(hf_model, _KEPT, None)
    if isinstance(kept, Model):
        return kept
    hf_model.eval()
    name = str(name or getattr(hf_model.config, "_name_or_path", None) or type(hf_model).__name__)
    _refuse_what_cannot_be(hf_model, name)
    build = _bridge_builder()
    tokens = _probe_tokens(hf_model.config)
    alibi = _is_falcon_alibi(hf_model)
    if alibi:
        set_attention(hf_model, "sdpa")  # the path that a checkpoint takes by default; its eager one is the faulty one
    with quiet():
        before = _logits(hf_model, tokens)
        refuse_no_numbers(before, hf_model, name)
        set_attention(hf_model, "eager")  # others do not return the attention pattern
        try:
            bridge = build(
                hf_model,
                type(hf_model).__name__,
                hf_config=hf_model.config,
                tokenizer=copy.deepcopy(tokenizer) if tokenizer is not None else None,
                model_name=name,
            )
            bridge.eval()
        except Exception as error:  # upstream raises whatever it meets
            raise UnsupportedModelError(_cannot_wrap(hf_model, name, error)) from error
    try:
        model = BridgeModel(bridge, name=name, revision=revision, tokenizer=tokenizer)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(_cannot_wrap(hf_model, name, error)) from error
    if alibi and _counts_alibi_twice(model):
        _count_alibi_once(bridge)
        model.processing["alibi"] = "counted once"
        if _counts_alibi_twice(model):
            raise UnsupportedModelError(f"{name}: {_TWICE}, and it could not be mended here")
    try:
        with quiet():
            after = _logits(hf_model, tokens)
    except Exception as error:
        raise UnsupportedModelError(_cannot_wrap(hf_model, name, error)) from error
    difference = float((after - before).abs().mean() / before.std().clamp_min(1e-12))
    allowed = 2e-3 if model.dtype in (torch.float32, torch.float64) else 1e-1
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"{name}: wrapped by TransformerLens, {type(hf_model).__name__} computes other logits than by itself (by "
            f"{difference:.2g} of their spread, where {allowed:.0e} is allowed): its figures would be another model's"
        )
    object.__setattr__(hf_model, _KEPT, model)
    return model


# ----------------------------------------------------------------------------------------------------- the four sources


def _bundled(name: str, how: _How) -> Model:
    from posattn.models import bundled

    return _folder(bundled.bundled_path(name), name, how)


def _folder(path: Path, name: str, how: _How) -> Model:
    if not (path / "config.json").is_file():
        raise InputError(f"{path} holds no config.json: it is not a model folder that transformers can read")
    try:
        json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path / 'config.json'} cannot be read: {_line(error)}") from error
    hf_model = _from_pretrained(str(path), name, how)
    tokenizer = _tokenizer(str(path)) if any((path / file).is_file() for file in _TOKENIZER_FILES) else None
    return how.see(hf_model, name=name, tokenizer=tokenizer)


def _hooked(name: str, how: _How) -> Model:
    from posattn.models.hooked import HookedModel

    if name.startswith("bundled:") or _looks_like_a_path(name) or os.path.exists(name):
        raise InputError(f"a HookedTransformer is loaded by TransformerLens' own name for it, not from {name}")
    try:
        kind = importlib.import_module("transformer_lens").HookedTransformer
    except Exception as error:  # transformer-lens 4 raises one of its own
        raise UnsupportedModelError(
            "this version of TransformerLens has no HookedTransformer: use the adapter bridge or plain"
        ) from error
    dtype = torch.float32 if how.dtype == "auto" else how.dtype
    try:
        with quiet():
            live = kind.from_pretrained_no_processing(name, device=str(how.device), dtype=dtype)
    except Exception as error:  # upstream raises whatever it meets
        raise UnsupportedModelError(
            f"TransformerLens cannot load {name} as a HookedTransformer ({_line(error)})"
        ) from error
    return HookedModel(live, name=name)


def _gguf(path: Path, how: _How) -> Model:
    folder = gguf_folder(path)
    try:
        hf_model = _from_pretrained(folder, str(path), how, gguf_file=path.name)
    except UnsupportedModelError as error:
        if (damage := _damage(path)) is not None:
            raise UnsupportedModelError(damage) from error
        raise
    return how.see(hf_model, name=path.name, tokenizer=_tokenizer(folder, gguf_file=path.name))


def gguf_folder(path: Path) -> str:
    """The folder of a GGUF file that could be read.

    Raises:
        InputError: no such file.
        UnsupportedModelError: it is no GGUF file, or the package that reads them is missing.
    """
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedModelError("reading a .gguf file needs the package gguf: pip install gguf")
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        what = "is empty" if not start else "does not begin with the letters GGUF, so it is no GGUF file"
        raise UnsupportedModelError(f"{path} {what}: copy or download it again")
    return str(path.parent.resolve())


def _damage(path: Path) -> str | None:
    """What is wrong with a GGUF file, None when it is whole: its list of tensors must fit into it."""
    import gguf

    try:
        with quiet():
            gguf.GGUFReader(path)
    except Exception as error:  # it trusts every number in the file, and fails in many ways
        return (
            f"{path} is truncated or damaged ({path.stat().st_size:,} bytes, {_line(error)}): copy or download it again"
        )
    return None


def _hub(name: str, how: _How) -> Model:
    known = {"local_files_only": True} if _no_network() else {}
    hf_model = _from_pretrained(name, name, how, **known)
    revision = getattr(hf_model.config, "_commit_hash", None)
    return how.see(hf_model, name=name, revision=revision, tokenizer=_tokenizer(name, **known))


def _no_network() -> bool:
    """Whether the hub's name does not even resolve. Upstream would try again for half a minute before it says so."""
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return False  # names may be resolved elsewhere
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or "huggingface.co"
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return True
    return False


def _from_pretrained(source: str, name: str, how: _How, **keywords: Any) -> Any:
    import transformers

    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(source, **keywords)
        except Exception as error:
            raise _load_error(source, name, error) from error
        _check_config(config, name)
        key = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
        spread = {} if how.device_map is None else {"device_map": how.device_map, "offload_folder": how.offload_folder}
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                source, config=config, output_loading_info=True, **{key: how.dtype}, **spread, **keywords
            )
        except Exception as error:
            raise _load_error(source, name, error) from error
    model, report = loaded
    lacking = sorted(report.get("missing_keys", ()))
    if lacking:  # transformers would fill them with random numbers
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise UnsupportedModelError(f"{name} lacks weights for {type(model).__name__}: {lacking[0]}{more}")
    if report.get("mismatched_keys"):
        raise UnsupportedModelError(f"{name} holds weights of another shape than its configuration says")
    return (model if spread else model.to(how.device)).eval()


def _load_error(source: str, name: str, error: Exception) -> PosattnError:
    text = _line(error)
    if os.path.isdir(source):
        return UnsupportedModelError(f"{name} cannot be loaded: {text}")
    kinds = {cls.__name__ for cls in type(error).__mro__} | {type(e).__name__ for e in _causes(error)}
    unreachable = kinds & {"LocalEntryNotFoundError", "ConnectionError", "ConnectError", "OfflineModeIsEnabled"}
    offline = unreachable or "connect" in text.lower() or "offline" in text.lower() or "cached files" in text.lower()
    if offline:
        return UnsupportedModelError(
            f"{name} is no file or folder here, and the hub cannot be reached: give a folder, a file or a bundled model"
        )
    if isinstance(error, OSError):
        return UnsupportedModelError(f"unknown model {name}: no such folder here and no such model on the hub ({text})")
    return UnsupportedModelError(f"{name} cannot be loaded: {text}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _tokenizer(source: str, **keywords: Any) -> Any | None:
    import transformers

    with quiet():
        try:
            return transformers.AutoTokenizer.from_pretrained(source, **keywords)
        except Exception as error:
            trouble = _line(error)
    warnings.warn(f"no tokenizer: {trouble}; token tensors only", PosattnWarning, stacklevel=3)
    return None


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or (os.sep != "/" and os.sep in name)


def placement(
    device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> tuple[torch.device, torch.dtype | str]:
    """The device and number format that these arguments of `load_model` mean here.

    Raises:
        InputError: an unknown one, or a device that is not here.
    """
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InputError(f"unknown device {str(device)!r}: say cpu, cuda, cuda:1 or mps") from error
    there = {
        "cpu": True,
        "cuda": (place.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(place.type, place.type != "meta"):
        raise InputError(f"device {place} was asked for, but PyTorch finds no such device here")
    return place, _dtype(dtype, place)


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise InputError(f"unknown dtype {dtype!r}: choose float32, bfloat16, float16, float64 or auto")
        dtype = found
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise InputError(f"a model needs a floating point dtype, not {dtype}")
    return dtype


# --------------------------------------------------------------------------------------------- what cannot be measured


def _check_config(config: Any, name: str) -> None:
    """Configuration fields that no model can have, in words (upstream fails on them deep inside, or not at all)."""
    from posattn.models._reading import text_config

    text = text_config(config)
    for field in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "num_key_value_heads"):
        value = getattr(text, field, None)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UnsupportedModelError(f"{name}: {field} is {value} in its configuration, but must be at least 1")
    heads, keys = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
        raise UnsupportedModelError(f"{name}: num_attention_heads {heads} is no multiple of num_key_value_heads {keys}")
    window = getattr(text, "sliding_window", None)
    if isinstance(window, int) and not isinstance(window, bool) and window < 1:
        raise UnsupportedModelError(f"{name}: sliding_window is {window} in its configuration, but must be at least 1")


def _refuse_what_cannot_be(hf_model: Any, name: str) -> None:
    config, kind = hf_model.config, type(hf_model).__name__
    _check_config(config, name)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} ({kind}) is an encoder-decoder: only causal decoder models can be measured"
        )
    if _is_encoder(config):
        raise UnsupportedModelError(f"{name} ({kind}) is an encoder: only causal decoder models can be measured")
    if hf_model.get_output_embeddings() is None and "lm_head" not in dict(hf_model.named_children()):
        raise UnsupportedModelError(f"{name} ({kind}) has no language-model head: load the causal language model")
    if not any("attention" in type(m).__name__.lower() for m in hf_model.modules()):
        raise UnsupportedModelError(f"{name} ({kind}) has no attention: there is nothing to measure")


def _is_encoder(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    kind = getattr(config, "model_type", "")
    if kind in MASKED and not getattr(config, "is_decoder", False):
        # models with both heads (BERT) say which one they are by `is_decoder`; the rest are encoders
        return kind not in CAUSAL or hasattr(config, "is_decoder") or "is_decoder" in getattr(config, "__dict__", {})
    return False


def _cannot_wrap(hf_model: Any, name: str, error: Exception) -> str:
    if getattr(hf_model.config, "new_decoder_architecture", False):
        return (
            f"{name}: Falcon's new decoder architecture (new_decoder_architecture=true) is not supported by this "
            f"version of TransformerLens ({_line(error)})"
        )
    return f"{name}: TransformerLens cannot wrap {type(hf_model).__name__} ({_line(error)})"


def _bridge_builder() -> Any:
    try:
        from transformer_lens.model_bridge.sources import build_bridge_from_module
    except ImportError as error:
        raise UnsupportedModelError(
            "this version of TransformerLens cannot wrap a transformers model: install transformer-lens 3 or newer, "
            'hand over a HookedTransformer, or load with adapter="plain"'
        ) from error
    return build_bridge_from_module


def _live_bridge(bridge: Any) -> Model:
    from posattn.models.bridge import BridgeModel

    kept = getattr(bridge.original_model, _KEPT, None)
    compatibility = bool(getattr(bridge, "compatibility_mode", False))
    if isinstance(kept, BridgeModel) and kept.module is bridge and not compatibility:
        return kept  # made, and where needed mended, by `wrap`
    if getattr(bridge.original_model.config, "is_encoder_decoder", False) or _is_encoder(bridge.original_model.config):
        raise UnsupportedModelError(
            f"{type(bridge.original_model).__name__} is no causal decoder: only causal decoder models can be measured"
        )
    model = BridgeModel(bridge)
    if _is_falcon_alibi(bridge.original_model) and _counts_alibi_twice(model):
        raise UnsupportedModelError(f"{model.name}: {_TWICE}. Let posattn.load_model load it, which mends this")
    return model


# ---------------------------------------------------------------------------------------------------- Falcon with ALiBi

_TWICE = (
    "this bridge adds Falcon's ALiBi bias twice (once in the attention mask, once to the scores), so it computes "
    "another function than its checkpoint does by default"
)


def _is_falcon_alibi(hf_model: Any) -> bool:
    config = hf_model.config
    return getattr(config, "model_type", "") == "falcon" and bool(getattr(config, "alibi", False))


def _counts_alibi_twice(model: Model) -> bool:
    """Whether layer 0's pattern differs from the one that q, k and a single ALiBi bias give."""
    from posattn.models.positions import attention

    found: list[float] = []

    def compare(layer: int, points: Mapping[str, Tensor], batch: Batch) -> None:
        expected = attention(points["q"], points["k"], model.scheme(layer, batch.mask.shape[1]))
        found.append(float((points["pattern"].float() - expected).abs().sum(-1).max()))

    tokens = torch.randint(0, model.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad(), quiet(), model.observe(("q", "k", "pattern"), compare, layers=[0]):
        model(tokens)
    return found[0] > (1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2)


def _count_alibi_once(bridge: Any) -> None:
    """Leave the bias to the attention mask, where transformers has already put it."""

    def without(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return args, {**keywords, "alibi": None}

    for block in bridge.blocks:
        block.attn.register_forward_pre_hook(without, with_kwargs=True)


# ------------------------------------------------------------------------------------------------------------- helpers


def _probe_tokens(config: Any, length: int = 8) -> Tensor:
    from posattn.models._reading import text_config

    vocabulary = int(text_config(config).vocab_size)
    return torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


def _logits(hf_model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return hf_model(input_ids=tokens.to(next(hf_model.parameters()).device)).logits.float()


def _line(error: BaseException) -> str:
    """The first sentence of an upstream message, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "…"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence upstream's warnings, log messages, progress bars and prints; our own are issued outside of it."""
    from transformers.utils import logging as hf_logging

    loggers = [logging.getLogger(name) for name in ("transformer_lens", "transformers", "huggingface_hub", "root", "")]
    levels = [logger.level for logger in loggers]
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            hf_logging.set_verbosity(verbosity)
            if bars:
                hf_logging.enable_progress_bar()
