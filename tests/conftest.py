"""Tiny random models written by transformers, and the real ones where they are on the machine.

Without PyTorch (``make test-core``) NumPy writes the models (tests/written.py), and tests that use PyTorch or
transformers are skipped (tests/absent.py).
"""

import gc
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the processors: one thread each. PyTorch and our native threads read these when they are loaded.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SPECBEAM_THREADS", "1")

if not any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU, its kernels run in Triton's interpreter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import specbeam
from specbeam import Engine, SpecbeamError
from specbeam.backends.cpu import CpuBackend
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.sources import registry
from specbeam.engine import CostTable
from tests.absent import Absent, let_tests_import_what_is_absent, needs
from tests.written import WrittenModel, WrittenTokenizer

# A shell makes its background jobs ignore Ctrl-C, and their children inherit that. Tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("quick", max_examples=10, deadline=None)
settings.register_profile("thorough", max_examples=300, deadline=None)
settings.load_profile("quick")  # pytest --hypothesis-profile=thorough, or make test-thorough, loads the other

BOS, EOS, UNUSED = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<bos>{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}

ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
"""Hunyuan's, whose frequencies are the same at all lengths."""
GROWING = YARN | {"factor": 16.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0, 2.5],
    "long_factor": [2.0, 4.0],
}

try:
    import torch
    import transformers
except ImportError:  # an environment for make test-core
    torch = transformers = None
    let_tests_import_what_is_absent()

# Keys of config.json that a tiny model of an architecture needs beside the sizes of all.
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {},
    "ministral3": {"head_dim": 8, "rope_parameters": GROWING, "pad_token_id": EOS},
    "gemma2": {"head_dim": 8},
    "gemma3": {"head_dim": 8, "model_type": "gemma3_text"},
    "phi3": {"pad_token_id": EOS},
    "smollm3": {"pad_token_id": EOS},
    "stablelm": {},
    "gpt2": {},
    "gpt_neox": {},
    "olmo2": {"pad_token_id": EOS},
    "olmo3": {"pad_token_id": EOS},
    "gemma4": {
        **{"head_dim": 8, "global_head_dim": 16, "model_type": "gemma4_text", "hidden_size_per_layer_input": 32},
        "pad_token_id": EOS,
    },
    "gemma4_unified": {
        **{"head_dim": 8, "global_head_dim": 16, "model_type": "gemma4_unified_text", "pad_token_id": EOS},
    },
    "hunyuan_v1_dense": {"head_dim": 8, "pad_token_id": EOS},
    "granite": {
        **{"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2},
        **{"pad_token_id": EOS},
    },
    "granitemoe": {
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2},
        **{"num_local_experts": 8, "num_experts_per_tok": 3, "pad_token_id": EOS},
    },
    "granitemoeshared": {
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2},
        **{"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 20, "pad_token_id": EOS},
    },
    "granitemoehybrid": {
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2},
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48, "pad_token_id": EOS},
        **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2},
    },
    "falcon_h1": {
        **{"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2},
        **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "pad_token_id": EOS},
        **{"attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3, "mlp_multipliers": [0.7, 1.4]},
        **{"ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.9, "ssm_multipliers": [0.6, 1.2, 0.7, 1.3, 0.9]},
    },
    "nemotron_h": {
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "head_dim": 8},
        **{"time_step_min": 1e-6, "time_step_floor": 0.01, "time_step_max": 1.0},  # below it transformers differs
        "pad_token_id": EOS,
    },
    "glm": {"head_dim": 8, "pad_token_id": EOS},
    "glm4": {"head_dim": 8, "pad_token_id": EOS},
    "exaone4": {"pad_token_id": EOS},
    "ernie4_5": {"head_dim": 8, "pad_token_id": EOS},
    "seed_oss": {"head_dim": 8, "pad_token_id": EOS},
    "starcoder2": {"pad_token_id": EOS},
    "cohere2": {"logit_scale": 0.5, "pad_token_id": EOS},
    "lfm2": {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [0, 2], "pad_token_id": EOS},
    "qwen3_5": {
        **{"model_type": "qwen3_5_text", "head_dim": 32, "full_attention_interval": 2, "pad_token_id": EOS},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    },
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "qwen2_moe": {
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        "shared_expert_intermediate_size": 20,
    },
    "glm4_moe": {
        **{"head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        **{"routed_scaling_factor": 1.5, "n_shared_experts": 2, "use_qk_norm": True, "pad_token_id": EOS},
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": EOS},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {
        **{"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 5},
        "rope_parameters": YARN | {"truncate": False},
    },
    "lfm2_moe": {
        **{"num_dense_layers": 1, "pad_token_id": EOS},
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
    },
}

# By its model_type, the text model of a model that also reads images, and its encoder of images.
COMPOSITES = {
    "gemma3": ("gemma3", "siglip_vision_model"),
    "gemma4": ("gemma4", "gemma4_vision"),
    "mistral3": ("mistral", "pixtral"),
    "lfm2_vl": ("lfm2", "siglip2_vision_model"),
    "qwen3_5": ("qwen3_5", "qwen3_5_vision"),
}
VISION = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    **{"head_dim": 8, "image_size": 16, "patch_size": 8, "num_patches": 4, "position_embedding_size": 4},
}


FIRST = {f"tests.{name}" for name in ("server.test_replicas", "server.test_real_clients", "test_reference_models")}


needs_torch = pytest.mark.skipif(torch is None, reason="needs PyTorch")

if torch is None:

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call():
        """Skip a test that fails because specbeam refused what needs PyTorch."""
        try:
            return (yield)
        except Exception as error:
            reason = error
            while reason is not None and not isinstance(reason, SpecbeamError):
                reason = reason.__context__
            if "pip install 'specbeam[torch]'" in str(reason):
                needs(reason)
            raise

    pytest_runtest_setup = pytest_runtest_call


def pytest_collection_modifyitems(items):
    """Modules that start or load much come first: a worker that takes over a part of one would do it again."""
    items.sort(key=lambda item: item.module.__name__ not in FIRST)
    for item in items:
        if hasattr(item, "callspec") and any(isinstance(value, Absent) for value in item.callspec.params.values()):
            item.add_marker(needs_torch)


def pytest_collection_finish(session):
    """Full collections of garbage need not look at modules again. With them, each takes half a second."""
    gc.collect()
    gc.freeze()


def examples(share=1.0):
    """A share of the profile's number of random examples, for tests whose single example is slow."""
    return max(2, round(settings().max_examples * share))


def in_thorough_mode():
    return settings.get_current_profile_name() == "thorough"


def byte_tokenizer(chat_template=None, vocab_size=259):
    """The first ``vocab_size`` tokens of this list: bytes 0 to 255, <bos>, <eos>, <unused>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    special = ("<bos>", "<eos>", "<unused>")[: max(0, vocab_size - 256)]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    named = dict(zip(("bos_token", "eos_token"), special, strict=False))
    return fast_tokenizer(tokenizer, chat_template, **named)


def fast_tokenizer(tokenizer, chat_template=None, **named):
    """A tokenizer of the library ``tokenizers`` as transformers has it, with the names of its special tokens."""
    if transformers is None:
        return WrittenTokenizer(tokenizer, {name: token for name, token in named.items() if token}, chat_template)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **named)


def of_transformers(tokenizer):
    """transformers' tokenizer with the backend, the special tokens and the template of one of specbeam."""
    pytest.importorskip("transformers")
    assert isinstance(tokenizer, specbeam.Tokenizer)
    return fast_tokenizer(tokenizer.backend_tokenizer, tokenizer.chat_template, **tokenizer.special_tokens_map)


def random_model(architecture, seed=0, attention="sdpa", **changes):
    """A tiny model with random weights, wide enough that its likeliest tokens are no near-ties.

    ``"gemma3 with images"`` is the model of :data:`COMPOSITES` whose text model has the changes.
    """
    composite = architecture.removesuffix(" with images") if architecture.endswith(" with images") else None
    if composite is not None:
        architecture, images = COMPOSITES[composite]
        architecture = changes.pop("text", architecture)
        if torch is None:
            needs("transformers: models of several parts")
    sizes = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "tie_word_embeddings": False,
    }
    if architecture == "lfm2_moe":  # it has no other key for its kinds of layers
        layers = changes.get("num_hidden_layers", sizes["num_hidden_layers"])
        sizes["layer_types"] = (["full_attention", "conv"] * layers)[:layers]
    if architecture == "granitemoehybrid":
        layers = changes.get("num_hidden_layers", sizes["num_hidden_layers"])
        sizes["layer_types"] = (["linear_attention", "full_attention"] * layers)[:layers]
    if architecture == "nemotron_h":  # its layers are single parts
        kinds = ["linear_attention", "full_attention", "mlp"] * sizes.pop("num_hidden_layers")
        sizes["layers_block_type"] = kinds[: changes.pop("num_hidden_layers", 5)]
    given = {"model_type": architecture} | sizes | ARCHITECTURES[architecture] | changes
    if architecture == "gemma4":
        given["vocab_size_per_layer_input"] = given["vocab_size"]
    if torch is None:
        return WrittenModel(given, seed)
    if architecture in ("gemma2", "gpt_oss"):
        attention = "eager"  # nothing else has the softcap, or the sinks
    torch.manual_seed(seed)
    config, kind = transformers.AutoConfig.for_model(**given), transformers.AutoModelForCausalLM
    if composite is not None:
        of_all = {name: getattr(config, name) for name in ("tie_word_embeddings", "initializer_range")}
        of_all |= {"projector_hidden_size": 8} if composite == "lfm2_vl" else {}
        parts = {"text_config": config.to_dict(), "vision_config": VISION | {"model_type": images}}
        config = transformers.AutoConfig.for_model(composite, **of_all, **parts)
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():  # norms and biases start as ones and zeros, which hide mistakes
        if "norm" in name or name.endswith(("bias", "router.scale", "per_expert_scale")):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        if name.endswith((".mamba.D", ".mixer.D")):
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        if name.endswith((".mamba.A_log", ".mixer.A_log")):  # else a state is forgotten within a few tokens
            parameter.data.sub_(3)
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "expert_bias", "e_score_correction_bias")):
            buffer.add_(torch.randn_like(buffer) * 0.2)
    model.generation_config.pad_token_id = EOS
    return model


def vocab_size_of(model):
    return getattr(model.config, "text_config", model.config).vocab_size


def head_of(model):
    """The rows of the head, float32 [vocab, hidden]: a test may change them."""
    if torch is not None:
        return model.get_output_embeddings().weight.detach().numpy()
    return next(tensor for name, tensor in model.state_dict().items() if name in ("lm_head.weight", "embed_out.weight"))


class StepByStep(CpuBackend):
    """The ``cpu`` backend, without its passes ahead."""

    forward_ahead = property()


def never_ahead(folder):
    """A model on a backend that never goes ahead, so that a test may count passes: PyTorch's, where it is."""
    if torch is not None:
        return specbeam.load(folder, backend="torch", device="cpu", dtype="float32")
    lm = specbeam.load(folder, backend="cpu", dtype="float32")
    return replace(lm, backend=StepByStep(open_checkpoint(Path(folder)), "float32"))


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """The folder of packed weights. Even the smallest weights get a file."""
    monkeypatch.setattr("specbeam.backends.cpu.weights.MIN_FILE_BYTES", 0)
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "packed"


@pytest.fixture(scope="session")
def confident(save):
    """A model that repeats itself and is sure of it. So few of its beams can matter."""
    model = random_model("llama", initializer_range=0.1)
    head_of(model)[:] *= 40
    return never_ahead(save(model))


@pytest.fixture(scope="session")
def save(tmp_path_factory):
    """Write a model and a byte tokenizer as transformers does; returns the folder."""

    def save(model, tokenizer=None, **how):
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder, **how)
        (tokenizer or byte_tokenizer(vocab_size=vocab_size_of(model))).save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def no_plots(monkeypatch):
    """Studies draw no plots, which takes most of their time here. tests/study/test_report.py draws them."""
    monkeypatch.setattr("specbeam.study.plots.draw_all", lambda *_: [])


@pytest.fixture(scope="session")
def _llama(save):
    return save(random_model("llama"))


@pytest.fixture
def folder(_llama, tmp_path):
    """The folder of a tiny model, for a test that changes it."""
    return shutil.copytree(_llama, tmp_path / "llama")


def rewrite(folder, name, **changes):
    """Change keys of a file of JSON. The value ``...`` removes a key."""
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not ...}))


def indexed(names):
    """Changes a folder: its weights get another name, and an index with a ``weight_map`` is there."""

    def change(folder):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        rewrite(folder, "model.safetensors.index.json", weight_map=names)

    return change


@pytest.fixture(scope="session")
def tiny(save):
    """The same tiny model twice: as transformers runs it and as we do. Cached by its description."""
    made = {}

    def tiny(architecture="llama", chat=False, backend="auto", **changes):
        key = (architecture, chat, backend, repr(sorted(changes.items())))
        if key not in made:
            model = random_model(architecture, **changes)
            folder = save(model, byte_tokenizer(CHAT_TEMPLATE if chat else None, vocab_size_of(model)))
            made[key] = model, specbeam.load(folder, backend=backend, device="cpu", dtype="float32")
        return made[key]

    return tiny


@pytest.fixture(scope="session")
def lm(tiny):
    """A tiny model without a chat template."""
    return tiny("llama")[1]


def run_alone(lm, prompt, options, draft=None, **limits):
    """The result of a request on an engine of its own."""
    engine = Engine(lm, **limits)
    request = engine.submit(prompt, options, draft=draft)
    engine.run()
    return request.result()


def beams_of_transformers(model, prompt, **options):
    """The new tokens of the beams transformers returns, padded, and their scores."""
    if torch is None:
        pytest.skip("needs transformers")
    ids = torch.tensor([prompt])
    how = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **how, **options)
    first = 1 if model.config.is_encoder_decoder else len(prompt)
    return out.sequences[:, first:].tolist(), out["sequences_scores"].tolist() if "sequences_scores" in out else None


def assert_are_beams_of_transformers(sequences, expected, scores):
    """Compare sequences with the beams that :func:`beams_of_transformers` found."""
    real = [score > -1e6 for score in scores]  # transformers fills empty beams with hypotheses of this score
    assert len(sequences) == sum(real)
    for got, tokens, score in zip(sequences, expected, scores, strict=False):
        if got.token_ids == tokens[: len(got.token_ids)]:
            assert set(tokens[len(got.token_ids) :]) <= {EOS}  # padding
            assert got.score == pytest.approx(score, abs=1e-4, rel=1e-5)  # float32 has 7 digits
        else:
            assert got.score == pytest.approx(score, rel=2e-7)  # a tie, which topk may resolve in another order


def prompt_and_beam_options(data, vocab_size, early_stopping=(False, True, "never"), least_new_tokens=1):
    """A prompt, and options of beam search.

    Args:
        early_stopping: the values to draw from.
        least_new_tokens: the lowest max_new_tokens.
    """
    token = st.integers(0, vocab_size - 1)
    prompt = data.draw(st.lists(token, min_size=1, max_size=12), "prompt")
    drawn = {
        "num_beams": st.integers(2, 9),
        "max_new_tokens": st.integers(least_new_tokens, 14),
        "length_penalty": st.sampled_from([1.0, 0.0, 2.0, -1.0, 0.6]),
        "early_stopping": st.sampled_from(early_stopping),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.4]),
        "eos_token_id": st.sets(token, min_size=1, max_size=min(6, vocab_size - 2)).map(sorted),
    }
    options = data.draw(st.fixed_dictionaries(drawn), "options")
    options["num_return_sequences"] = data.draw(st.integers(1, options["num_beams"]), "num_return_sequences")
    options["min_new_tokens"] = data.draw(st.integers(0, options["max_new_tokens"]), "min_new_tokens")
    return prompt, options


def biases_and_bans(data, vocab_size, prompt_length):
    """Options of ours, or none, and the options with which transformers does the same.

    It lacks OpenAI's penalties, so their formula is a function here.
    """
    token = st.integers(0, vocab_size - 1)
    name = data.draw(st.sampled_from([None, None, "ngrams", "words", "bias", "counts"]))
    if name == "ngrams":
        ours = theirs = {"no_repeat_ngram_size": data.draw(st.integers(2, 4))}
    elif name == "words":
        words = st.lists(st.lists(token, min_size=1, max_size=3), min_size=1, max_size=6)
        ours = theirs = {"bad_words_ids": data.draw(words)}
    elif name == "bias":
        bias = data.draw(st.dictionaries(token, st.floats(-3, 3), min_size=1, max_size=6))
        ours, theirs = {"logit_bias": bias}, {"sequence_bias": [[[i], value] for i, value in bias.items()]}
    elif name == "counts":
        frequency, presence = data.draw(st.floats(-2, 2)), data.draw(st.floats(-2, 2))

        def penalize(input_ids, scores):
            counts = torch.stack([row.bincount(minlength=vocab_size) for row in input_ids[:, prompt_length:]])
            return scores - frequency * counts - presence * (counts > 0)

        ours = {"frequency_penalty": frequency, "presence_penalty": presence}
        theirs = {"logits_processor": [penalize]}
    else:
        ours = theirs = {}
    return ours, theirs


def reference_model(name):
    """The file of a real model, or a skip that says how to get it."""
    folder = Path(os.environ.get("SPECBEAM_REFERENCE_MODELS", Path.home() / ".cache/specbeam-reference-models"))
    for path in (folder / f"{name}.gguf", registry.find(name) if name in registry.ALIASES else None):
        if path is not None and path.is_file():
            return path
    pytest.skip(f"{name} is not on this machine: fetch the reference models")


def reference_folder(name):
    """The folder of a real model, or a skip that says how to get it."""
    folder = Path(os.environ.get("SPECBEAM_REFERENCE_MODELS", Path.home() / ".cache/specbeam-reference-models")) / name
    return folder if folder.is_dir() else pytest.skip(f"{name} is not on this machine: fetch the reference models")


@pytest.fixture(scope="module")
def browser():
    """Chromium, for the tests of pages."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome")
        found = next((path for name in names if (path := shutil.which(name))), None)
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


def table_of_costs(seconds):
    """For ``Engine(costs=...)``: a pass over some nodes takes ``seconds(nodes)``."""
    return lambda backend, ahead=False: CostTable(seconds)


@pytest.fixture
def give_costs(monkeypatch):
    """Give costs to all engines that are made without, in this test: ``give_costs(seconds)``."""
    return lambda seconds: monkeypatch.setattr("specbeam.engine.engine.pass_times", table_of_costs(seconds))
