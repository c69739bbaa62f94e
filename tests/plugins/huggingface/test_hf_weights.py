"""The weights read from a Hugging Face folder are those that transformers reads; otherwise an error is raised."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from torchtrain.checkpoint.weights import load_weights
from torchtrain.convert import main as convert
from torchtrain.errors import CheckpointError
from torchtrain.logging import logger
from torchtrain.models.llama import Transformer
from torchtrain.plugins.huggingface.config import read_hf_config

VOCAB = 4500  # more rows than are compared at a time
TOKENS = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(0))
MAIN, INDEX, LM_HEAD = "model.safetensors", "model.safetensors.index.json", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
Tensors = dict[str, Tensor]


pytestmark = pytest.mark.usefixtures("process_group")


def save_model(folder: Path, tied: bool, shard: str = "1GB", seed: int = 1, cls: str = "LlamaForCausalLM") -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        rms_norm_eps=0.02,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    (model.model if cls == "LlamaModel" else model).save_pretrained(folder, max_shard_size=shard)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors], into: str = MAIN) -> None:
    tensors = load_file(folder / MAIN)
    save_file({name: tensor.clone() for name, tensor in change(tensors).items()}, folder / into, {"format": "pt"})


def zeros(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def plain(folder: Path) -> None:
    save_model(folder, tied=False)


def index_without_its_shards(folder: Path) -> None:
    """As transformers leaves it when it saves a single file into a folder with shards."""
    save_model(folder, tied=False, shard="100KB", seed=2)
    save_model(folder, tied=False)
    assert not (folder / "model-00001-of-00007.safetensors").exists()
    assert (folder / INDEX).exists()


def index_with_shards_of_other_values(folder: Path) -> None:
    save_model(folder, tied=False)
    old = (folder / MAIN).read_bytes()
    save_model(folder, tied=False, shard="100KB", seed=2)
    (folder / MAIN).write_bytes(old)


def shards_beside_consolidated(folder: Path) -> None:
    save_model(folder, tied=False)
    rewrite(folder, zeros, "consolidated.safetensors")
    (folder / MAIN).unlink()
    save_model(folder, tied=False, shard="100KB")


def consolidated(folder: Path) -> None:
    """As published by Mistral."""
    save_model(folder, tied=False)
    rewrite(
        folder, lambda t: {name.removeprefix("model."): x for name, x in zeros(t).items()}, "consolidated.safetensors"
    )
    (folder / "params.json").write_text("{}")


def pickled(folder: Path) -> None:
    save_model(folder, tied=False)
    torch.save(zeros(load_file(folder / MAIN)), folder / "pytorch_model.bin")


def original_meta_files(folder: Path) -> None:
    save_model(folder, tied=False)
    (folder / "original").mkdir()
    torch.save(zeros(load_file(folder / MAIN)), folder / "original/consolidated.00.pth")
    (folder / "original/params.json").write_text("{}")


def file_of_a_variant(folder: Path) -> None:
    save_model(folder, tied=False)
    rewrite(folder, zeros, "model.fp16.safetensors")


def base_model(folder: Path) -> None:
    save_model(folder, tied=True, cls="LlamaModel")
    assert "embed_tokens.weight" in load_file(folder / MAIN)


def base_names_and_output(folder: Path) -> None:
    save_model(folder, tied=False)
    rewrite(folder, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})


def some_base_names(folder: Path) -> None:
    save_model(folder, tied=False)
    rewrite(folder, lambda t: {name.replace("model.layers.1.", "layers.1."): tensor for name, tensor in t.items()})


def tied_and_stored_once(folder: Path) -> None:
    save_model(folder, tied=True)
    assert LM_HEAD not in load_file(folder / MAIN)


def tied_and_stored_as_output(folder: Path) -> None:
    save_model(folder, tied=True)
    rewrite(folder, lambda t: {LM_HEAD if name == EMBEDDING else name: tensor for name, tensor in t.items()})


def tied_and_stored_twice(folder: Path) -> None:
    save_model(folder, tied=True)
    rewrite(folder, lambda tensors: {**tensors, LM_HEAD: tensors[EMBEDDING]})


def old_buffers(folder: Path) -> None:
    save_model(folder, tied=False)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: {**tensors, **{name.format(i): torch.ones(4) for i in range(2)}})


def several_dtypes(folder: Path) -> None:
    save_model(folder, tied=False)
    dtypes = {"mlp": torch.bfloat16, "self_attn": torch.float16}

    def cast(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(next((dtype for part, dtype in dtypes.items() if part in name), torch.float32))

    rewrite(folder, lambda tensors: {name: cast(name, tensor) for name, tensor in tensors.items()})


FOLDERS = [
    plain,
    index_without_its_shards,
    index_with_shards_of_other_values,
    shards_beside_consolidated,
    consolidated,
    pickled,
    original_meta_files,
    file_of_a_variant,
    base_model,
    base_names_and_output,
    some_base_names,
    tied_and_stored_once,
    tied_and_stored_as_output,
    tied_and_stored_twice,
    old_buffers,
    several_dtypes,
]


@pytest.mark.parametrize("make", FOLDERS)
def test_weights_are_those_that_transformers_reads(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    make(tmp_path)
    shape = read_hf_config(tmp_path)
    model = Transformer(shape)
    load_weights([model], tmp_path, shape)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    warned = f"{tmp_path / MAIN} is read, and not the files that {INDEX} names"
    assert (warned in caplog.text) == make.__name__.startswith("index")


def different_output(row: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        save_model(folder, tied=True)
        output = load_file(folder / MAIN)[EMBEDDING].clone()
        output[row, 5] += 0.5
        rewrite(folder, lambda tensors: {**tensors, LM_HEAD: output})

    return make


def output_of_different_size(folder: Path) -> None:
    save_model(folder, tied=True)
    rewrite(folder, lambda tensors: {**tensors, LM_HEAD: tensors[EMBEDDING][:-1]})


def untied_without_output(folder: Path) -> None:
    save_model(folder, tied=False, cls="LlamaModel")


def shards_missing(folder: Path) -> None:
    save_model(folder, tied=False, shard="100KB")
    sorted(folder.glob("model-*.safetensors"))[2].unlink()


def both_names(folder: Path) -> None:
    save_model(folder, tied=False)
    rewrite(folder, lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"]})


def named_by_the_config(folder: Path) -> None:
    save_model(folder, tied=False)
    rewrite(folder, zeros, "other.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))


DIFFERS = f"{LM_HEAD} in .*{MAIN} differs from {EMBEDDING}, and config.json has tie_word_embeddings = true"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (different_output(3), DIFFERS),
        (different_output(VOCAB - 1), DIFFERS),
        (output_of_different_size, DIFFERS),
        (untied_without_output, f"lacks {LM_HEAD}"),
        (shards_missing, f"-of-.*safetensors is missing, and {INDEX} names it"),
        (both_names, "contains tensors that the model in config.json does not have: norm.weight"),
        (named_by_the_config, "transformers_weights = 'other.safetensors'"),
    ],
)
def test_inconsistent_weights_are_rejected(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_weights([], tmp_path, read_hf_config(tmp_path))


def test_convert_writes_nothing_for_a_tied_model_with_a_different_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    different_output(17)(tmp_path / "in")
    dist.destroy_process_group()  # convert initializes its own
    assert convert([str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "set it to false there to use both, as transformers does" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
