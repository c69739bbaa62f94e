"""README and docs/ match the code: generated pages, links, options, and commands, each of which is run or listed."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tomli
from docs_checks import blocks, check_commands, check_toml, options_of_run, run_checks

from torchtrain.config.schema import section_types
from torchtrain.config.section import key_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Run in this order by test_commands_of_the_docs_run_in_a_fresh_clone.
COMMANDS = [
    "./run_llama_train.sh",
    "./run_llama_train.sh --training.steps 120",
    "python -m torchtrain.train --help",
    "python -m torchtrain.train --help training",
    'python -m torchtrain.generate outputs/debug_model --prompt "def main("',
    'python -m torchtrain.generate outputs/debug_model --prompt "def main(" --temperature 0.8 --top_p 0.95 --seed 1',
    "python -m torchtrain.generate outputs/debug_model --prompts_file prompts.jsonl --output_file answers.jsonl "
    "--batch_size 32",
    'torchrun --standalone --nproc-per-node 2 -m torchtrain.generate outputs/debug_model --prompt "import"',
    "python -m torchtrain.perplexity outputs/debug_model my_texts.jsonl",
    "python -m torchtrain.convert outputs/debug_model debug_model_hf",
    "python -m torchtrain.convert outputs/debug_model my_model_hf --dtype bfloat16",
    "NGPU=2 ./run_llama_train.sh --training.local_batch_size 4 --job.dump_folder outputs/two_ranks",
    "python scripts/plot.py outputs/debug_model outputs/two_ranks -o curves.png",
    "./run_llama_train.sh --data.path my_texts.jsonl --data.text_column text --job.dump_folder outputs/my_texts",
    "python -m torchtrain.prepare --data.path my_texts.jsonl --prepare.output tokens",
    "./run_llama_train.sh --data.path tokens --job.dump_folder outputs/tokens",
    "python -m torchtrain.prepare --prepare.output tokens --prepare.verify",
    "python scripts/docs/document_config.py",
    "python -m torchtrain.check 32 --job.config_file train_configs/debug_model.toml --training.seed 1",
    "python -m torchtrain",
]
PLANNED = "takes half a minute; test_estimate.py runs a similar command"
AVERAGED = "needs a longer run; tests/test_learning.py has a similar one"
FROM_HF = "needs published weights; test_hf_to_hf.py runs it on small ones"
ON_KUBERNETES = "tests/plugins/test_kubernetes.py runs it, or does what it does, with a local bucket"
OWN_MODEL = "tests/test_own_model.py runs it"
VERIFIED = "takes minutes; tests/plugins/verify_layouts verifies some of the layouts"
OF_PARALLEL_BLOCK = "--job.import parallel_block --model.name parallel_block"
REPLICA = (
    "./run_llama_train.sh --job.dump_folder outputs/replicas --training.sums exact --training.global_batch_size 16 "
    "--replicas.lighthouse http://127.0.0.1:29510 --replicas.host 127.0.0.1 --replicas.id"
)
ON_A_LAPTOP = "tests/plugins/replicas/test_replicas.py runs it"
# Commands that are not run, and the reason.
LISTED = {
    "python -m torchtrain": "test_terminal.py",
    "python -m torchtrain.cache": "test_token_cache.py",
    "python -m torchtrain.cache --clear": "test_token_cache.py",
    "pip install -e scripts/families -e scripts/moe": "tests/plugins/test_moe.py lays out the files of an installation",
    "./run_llama_train.sh --job.config_file scripts/moe/debug_moe.toml --job.dump_folder outputs/debug_moe": (
        "takes minutes; tests/plugins/test_moe.py trains fewer steps"
    ),
    "python -m torchtrain.verify_layouts --job.config_file scripts/moe/debug_moe.toml --layouts shard=4 "
    "shard=4,moe.expert_parallel_degree=2 shard=4,moe.expert_parallel_degree=4": VERIFIED,
    "pip install -e scripts/families": "tests/plugins/test_example_families.py lays out the files of an installation",
    "./run_llama_train.sh --model.name olmo2 --job.dump_folder outputs/olmo2": "test_example_families.py: shorter",
    "python -m torchtrain.convert outputs/olmo2 olmo2_hf": "slow tests of test_example_families.py export such runs",
    "pytest -m slow -k example_families": "takes minutes",
    "torchft_lighthouse --min_replicas 1 --bind 127.0.0.1:29510": ON_A_LAPTOP,
    f"{REPLICA} 0": ON_A_LAPTOP,
    f"{REPLICA} 1": ON_A_LAPTOP,
    "kubectl apply -f scripts/kubernetes/replicas/replicas.yaml": "tests/plugins/test_kubernetes.py checks the file",
    "python -m torchtrain.verify_layouts --job.config_file train_configs/debug_model.toml": VERIFIED,
    "python -m torchtrain.verify_layouts --job.config_file train_configs/debug_model.toml --bits": VERIFIED,
    "python -m torchtrain.verify_layouts --job.config_file FILE": VERIFIED,
    "python -m torchtrain.verify_layouts --job.import sandwich --model.name sandwich": VERIFIED,
    f"PYTHONPATH=. python -m torchtrain.verify_layouts {OF_PARALLEL_BLOCK}": VERIFIED,
    "PYTHONPATH=. python -m torchtrain.verify_layouts --job.import verify_mine --model.name mine": VERIFIED,
    "./run_llama_train.sh --job.config_file train_configs/debug_stages.toml --job.dump_folder outputs/debug_stages": (
        "takes minutes; tests/plugins/stages/test_stages.py"
    ),
    "python scripts/plot.py outputs/debug_stages -o stages.png": "needs the run of the line above",
    "tensorboard --logdir s3://my-bucket/my-run/checkpoint/outputs/tensorboard": (
        "needs a bucket; test_output_copies.py reads one as TensorBoard does"
    ),
    "./run_llama_train.sh --job.config_file s3://my-bucket/run.toml --model.tokenizer_path s3://my-bucket/tokenizer": (
        "needs a bucket; test_urls.py trains with one"
    ),
    "aws s3 sync s3://my-bucket/my-run/checkpoint/outputs outputs/my-run": "needs a bucket",
    "pip install -e .": "needs a package index; run by .ci/run",
    "CONFIG_FILE=run.toml sbatch --array=0-3 --nodes 2 --time 24:00:00 scripts/replicas.slurm": (
        "run with fewer nodes by test_replicas_slurm.py"
    ),
    "pip install --target site .": "needs a package index; test_core.py installs a wheel",
    "pip install -e '.[wandb]' -c constraints.txt": "needs a package index; run by .ci/run",
    "pip install -e '.[mlflow]'": "needs a package index",
    "pip install -e '.[trackio]'": "needs a package index",
    "python -m torchtrain.convert_config torchtitan_config.toml --output my_config.toml": (
        "needs a config of torchtitan; test_convert_config.py runs a similar command"
    ),
    "pip install -e '.[eval]' -c constraints.txt": "needs a package index; run by .ci/run",
    "pip install -e '.[dev]' -c constraints.txt": "needs a package index; run by .ci/run",
    "python -m venv /tmp/newest && . /tmp/newest/bin/activate && pip install -e '.[dev]'": "needs a package index",
    "{ head -1 constraints.txt; pip freeze --exclude-editable | sed 's/+cpu$//'; } > new.txt && mv new.txt "
    "constraints.txt": "follows the line above",
    "pip install -e . -c constraints.txt && ./run_llama_train.sh": "needs a package index; the second half is run",
    "pip install -e '.[dev]' -c constraints.txt && pytest -n 3 --dist loadfile tests/test_*.py "
    "tests/plugins/exact_sums": "part of .ci/run",
    "pytest -n 3 --dist loadfile": "run by .ci/run",
    "ruff check . && ruff format --check . && mypy && pytest -n 3 --dist loadfile": "run by .ci/run",
    "pytest -m slow": "takes minutes; run by hand",
    "pytest -n 3 --dist loadfile --write_durations": "the default suite; run by hand",
    "pytest -m gpu": "needs a GPU",
    "scripts/make_wheels.sh": ("needs a package index"),
    "python scripts/benchmarks/measure_kernels.py": "needs a GPU; part of the dry run of first_hour.sh",
    "scripts/first_hour.sh": ("needs a GPU; tests/plugins/test_first_hour.py has its dry run"),
    "scripts/eight_gpus.sh": "needs eight GPUs; tests/plugins/test_eight_gpus.py has its dry run",
    "python scripts/benchmarks/benchmark_sums.py --layers 2 --turns 5": "takes five minutes; run by hand",
    "python scripts/benchmarks/benchmark_muon.py": "takes minutes; run by hand",
    'pytest tests/test_parallelism.py -k "S2 and T2"': "part of .ci/run",
    "pip install -e '.[bench]'": "needs a package index",
    "pytest -n 3 --dist loadfile tests/plugins/muon": "part of .ci/run",
    "pip install -e '.[s3]' -c constraints.txt": "needs a package index; run by .ci/run",
    "./run_llama_train.sh --checkpoint.folder s3://my-bucket/my-run/checkpoint": "test_s3_checkpoints.py, with moto",
    "pip install -e '.[float8]' -c constraints.txt": "needs a package index; run by .ci/run",
    "python scripts/benchmarks/benchmark.py # small sizes on a CPU": "takes minutes",
    "python scripts/benchmarks/benchmark.py --gpu # 1B and 3B on one GPU": "needs a GPU",
    "python scripts/benchmarks/benchmark.py --only vocabulary": "takes minutes",
    "python scripts/benchmarks/benchmark_metrics.py --steps 150": "takes minutes",
    "python scripts/benchmarks/family_parity.py": "takes a minute; slow tests of test_family_parity.py",
    "python -m torchtrain.estimate --job.config_file train_configs/llama3_8b.toml --estimate.world_size 8": PLANNED,
    "python -m torchtrain.estimate --job.config_file train_configs/llama3_8b.toml --estimate.world_size 8 "
    "--training.global_batch_size 16": PLANNED,
    "python -m torchtrain.estimate --job.config_file train_configs/llama3_70b.toml --estimate.world_size 256 "
    "--estimate.gpu h100-80": PLANNED,
    "python -m torchtrain.estimate --job.config_file train_configs/llama3_8b.toml --estimate.world_size 8 "
    "--estimate.search --estimate.output layout.toml": PLANNED,
    "python -m torchtrain.estimate": PLANNED,
    "python -m torchtrain.estimate --job.config_file FILE --estimate.world_size GPUS": PLANNED,
    "python -m torchtrain.explain RUN --step N": "RUN and N stand for a run and a step",
    "python -m torchtrain.compare RUN --against FOLDER": "RUN and FOLDER stand for a run and an export",
    "python -m torchtrain.compare outputs/debug_model outputs/two_ranks": "exits with 1 if bfloat16 drifts too far; "
    "test_compare.py runs a similar command",
    "python -m torchtrain.compare outputs/debug_model --against debug_model_hf": "needs transformers; "
    "test_compare.py runs a similar command",
    "python -m torchtrain.explain outputs/my_texts --step 24 --top 1 --exclude_to list.jsonl": (
        "needs a run of other options; tests/plugins/explain/test_explain.py runs its like"
    ),
    "./run_llama_train.sh --data.path my_texts.jsonl --data.exclude list.jsonl --job.dump_folder outputs/without": (
        "the same"
    ),
    "python -m torchtrain.explain outputs/my_texts --step 24 --top 3": "needs a run of other options; "
    "test_explain.py runs a similar command",
    "./run_llama_train.sh --comparison.fingerprint_steps 1 2 --job.dump_folder outputs/recorded": (
        "run with more options by test_compare.py"
    ),
    "python scripts/benchmarks/validate_estimate.py": "takes five minutes; run by hand",
    "python scripts/benchmarks/validate_estimate.py --fit": "takes ten minutes; run by hand",
    "python scripts/benchmarks/validate_estimate.py --only context": "takes a minute; run by hand",
    "python scripts/benchmarks/validate_estimate.py --others": "minutes; test_estimate.py runs it with small models",
    "python scripts/benchmarks/interpret_kernels.py": "minutes; tests/plugins/test_lowered_numerics.py",
    "python scripts/benchmarks/fit_attention.py": "test_estimate.py fits the same",
    "python scripts/benchmarks/lower.py --bytes": "takes minutes; tests/plugins/test_lowering.py checks the same bytes",
    "python scripts/benchmarks/lower.py": "takes minutes; tests/plugins/test_lowering.py compiles the same configs",
    "python scripts/benchmarks/lower.py --matrix --match selective-documents": (
        "slow tests of tests/plugins/test_lowering.py"
    ),
    "tensorboard --logdir outputs": "serves until it is stopped",
    "apt-get install slurmctld slurmd slurm-client": "needs a package index; run by .ci/run",
    "./run_llama_train.sh --data.path my_texts.jsonl --job.dump_folder outputs/my_texts": "run with more options",
    "./run_llama_train.sh --optimizer.name muon --job.dump_folder outputs/muon": "test_muon.py",
    "./run_llama_train.sh --data.name allenai/c4 --data.subset en --job.dump_folder outputs/c4": "needs the network",
    "python -m torchtrain.evaluate --model torchtrain --model_args checkpoint=outputs/debug_model --tasks hellaswag "
    "--limit 100": "needs the network; test_evaluate.py runs it on a local task",
    "CONFIG_FILE=train_configs/continue_hf.toml NGPU=2 ./run_llama_train.sh --model.hf_folder Qwen3-0.6B "
    "--checkpoint.initial_load_path Qwen3-0.6B --data.path my_texts.jsonl --job.dump_folder outputs/qwen3": FROM_HF,
    "python -m torchtrain.convert outputs/qwen3 my_qwen3": FROM_HF,
    "python -m torchtrain.evaluate --model torchtrain --model_args checkpoint=my_qwen3 --tasks hellaswag --limit 100": (
        FROM_HF
    ),
    'python -m torchtrain.generate my_qwen3 --prompt "def main("': FROM_HF,
    "torchrun --nproc-per-node 2 -m torchtrain.train --job.config_file F": "F stands for a file",
    "NGPU=4 ./run_llama_train.sh --recheck.interval 10 --training.deterministic --job.dump_folder outputs/checked": (
        "test_recheck.py has smaller models"
    ),
    "python scripts/faults/poisoned_documents.py": "takes minutes; test_poisoned_document.py makes some of the runs",
    "python scripts/benchmarks/benchmark_explain.py --gradients": "takes minutes",
    "python scripts/faults/recheck_faults.py --steps 20": "takes ten minutes; test_recheck.py has a short version",
    'python scripts/faults/recheck_faults.py --clean 1000 --layouts "3 ranks" "HSDP 2 x 2"': "takes minutes",
    "python scripts/faults/recheck_faults.py --cost 20": "takes minutes",
    "python scripts/faults/gpu_faults.py": (
        "takes twenty minutes; tests/plugins/test_gpu_faults.py plants the same faults"
    ),
    "python scripts/faults/crash_test.py --kills 12 --faults 50": "tests/test_faults.py has a short version",
    "python scripts/faults/crash_test.py --storage s3 --kills 50 --faults 50": "test_s3_checkpoints.py",
    "python scripts/faults/crash_test.py --composed 20": "takes long; tests/test_faults.py has a short version",
    "python scripts/faults/crash_test.py --storage s3 --composed 20": "takes long; test_object_store.py",
    "python scripts/faults/crash_test.py --kills 30": "takes long; tests/test_faults.py has a short version",
    "python -m torchtrain.convert outputs/my_run my_run_hf --weights ema": AVERAGED,
    'python -m torchtrain.generate outputs/my_run --weights ema --prompt "def "': AVERAGED,
    "python -m torchtrain.convert outputs/my_run my_run_mean --average 5": AVERAGED,
    "mkdir -p outputs/cooldown/checkpoint && cp -r outputs/stable/checkpoint/step-8000 outputs/cooldown/checkpoint/ && "
    "./run_llama_train.sh --job.dump_folder outputs/cooldown --training.steps 10000 --lr_scheduler.total_steps 10000 "
    "--lr_scheduler.decay_type linear --lr_scheduler.decay_ratio 0.2 "
    "--checkpoint.allow_changes lr_scheduler.total_steps lr_scheduler.decay_type lr_scheduler.decay_ratio": AVERAGED,
    "pytest tests/test_learning.py -k mup": "part of .ci/run",
    "python scripts/recipes.py --output outputs/recipes --tokens 300000 --threads 1": ("takes an hour; run by hand"),
    "python scripts/recipes.py --output outputs/recipes --tokens 300000 --report --picture recipes.png": (
        "needs the runs of the line above"
    ),
    "pip install -e '.[ladder]' -c constraints.txt": "needs a package index",
    "python scripts/ladder.py --output outputs/ladder --sizes 32x2 48x2 64x2 96x2 --next 128x2 --mup "
    "--rates 4e-3 1e-2 2.5e-2 --job.config_file train_configs/debug_model.toml --dry-run": (
        "tests/plugins/test_ladder.py runs a similar command"
    ),
    "python scripts/ladder.py --output outputs/ladder --sizes 32x2 32x3 48x2 64x2 --next 96x2 --multiples 4 8 "
    "--sweep 4 --rates 4e-3 1e-2 2.5e-2 --mup --job.config_file train_configs/debug_model.toml "
    "--model.shape.head_dim 16 --model.shape.n_kv_heads 8 --training.local_batch_size 4 "
    "--training.mixed_precision_param float32 "
    "--lr_scheduler.min_lr_factor 0 --data.held_out 0.05 --validation.steps 160": ("takes minutes; run by hand"),
    "python -m torchtrain.launch": "run with its options by run_llama_train.sh",
    "CONFIG_FILE=train_configs/llama3_8b.toml ./run_llama_train.sh": "needs GPUs",
    **dict.fromkeys(
        [
            "CONFIG_FILE=train_configs/open_1b.toml NGPU=1 ./run_llama_train.sh",
            "CONFIG_FILE=train_configs/open_1b.toml ./run_llama_train.sh",
        ],
        "needs a GPU and the network; test_hub.py checks it with stand-ins",
    ),
    "python -m torchtrain.check 32 --job.config_file train_configs/llama3_8b.toml": "needs data and a tokenizer",
    "./run_llama_train.sh --job.config_file train_configs/debug_english.toml": "takes minutes; test_datasets.py reads "
    "its data",
    "python -m torchtrain.generate outputs/debug_english --prompt "
    '"This module provides" --temperature 0.5 --seed 1': "needs the run of the line above",
    "CONFIG_FILE=train_configs/llama3_1b.toml NGPU=1 ./run_llama_train.sh --model.tokenizer_path "
    "tokenizer.model": "needs a GPU",
    "NGPU=8 ./run_llama_train.sh --parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2 "
    "--job.dump_folder outputs/eight_ranks": ("needs 8 GPUs; tests/test_parallelism.py has the layouts"),
    "./run_llama_train.sh --data.path s3://my-bucket/tokens --job.dump_folder outputs/s3": "needs a bucket; "
    "test_object_store_data.py reads such data from a local server",
    "./run_llama_train.sh --data.path s3://my-bucket/texts --remote_data.cache_folder /local/cache "
    "--remote_data.cache_gib 500": "needs a bucket; test_range_cache.py reads by URL with a cache",
    'sbatch --array 0-63 --cpus-per-task 32 --wrap "python -m torchtrain.prepare --data.path /data/texts '
    '--prepare.output /data/tokens"': "needs a cluster; test_prepare.py divides the work in the same way",
    "python scripts/prepare_ray.py --tasks 64 --cpus 8 -- --data.path s3://my-bucket/texts "
    "--prepare.output s3://my-bucket/tokens": "needs Ray and a bucket; test_prepare_ray.py runs it locally",
    "pip install -e '.[ray]' -c constraints.txt": "needs a package index",
    "CONFIG_FILE=train_configs/llama3_8b.toml sbatch --nodes 4 --gpus-per-node 8 scripts/train.slurm": (
        "needs a cluster; tests/test_slurm.py starts a small one"
    ),
    "sbatch --nodes 4 --gpus-per-node 8 --time 24:00:00 scripts/train.slurm --training.seed 1": "needs a cluster",
    "docker build --file scripts/kubernetes/Dockerfile --tag registry.example.com/torchtrain .": ON_KUBERNETES,
    "docker push registry.example.com/torchtrain": ON_KUBERNETES,
    "kubectl create secret generic torchtrain-bucket --from-env-file bucket.env": ON_KUBERNETES,
    "kubectl apply --filename scripts/kubernetes/base/job.yaml": ON_KUBERNETES,
    "kubectl logs --follow --selector batch.kubernetes.io/job-completion-index=0,job-name=torchtrain": ON_KUBERNETES,
    """kubectl patch job torchtrain --patch '{"spec": {"suspend": true}}'""": ON_KUBERNETES,
    """kubectl patch job torchtrain --patch '{"spec": {"suspend": false}}'""": ON_KUBERNETES,
    'python -m torchtrain.generate s3://my-bucket/my-run --prompt "def "': ON_KUBERNETES,
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head-node:29500 --rdzv-id my-run "
    "-m torchtrain.train --job.config_file train_configs/llama3_8b.toml": (
        "needs two machines; tests/test_multinode.py has two agents on one"
    ),
}
OF_TORCHTITAN = [command for command in LISTED if "torchtitan_config.toml" in command]
OF_OTHERS = ("model", "model_args", "tasks", "limit", "nnodes", "nproc-per-node")  # of lm_eval and torchrun
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\./run_llama|python |torchrun |sbatch |pip |pytest|tensorboard |ruff |apt-get )"
)


def commands(page: Path) -> list[str]:
    """The command lines in the bash blocks of a page, and the code spans in its text that begin like a command."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        found += [line for line in block.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for code in re.findall(r"`([^`]+)`", prose):
        if COMMAND.match(code) and " " in code:
            found.append(code)
    return [" ".join(command.split()) for command in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_run_or_listed(page: Path) -> None:
    for command in commands(page):
        assert command in COMMANDS or command in LISTED, f"{page.name}: {command!r} is neither run by a test nor listed"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.name)
def test_toml_blocks_are_configs_that_a_run_accepts(page: Path, tmp_path: Path) -> None:
    assert run_checks(check_toml, tmp_path, page) == ""


def test_toml_block_with_a_section_that_moved_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```toml\n[validation]\nprompts = ['a']\n```\n")
    assert "did you mean 'evaluation.prompts'?" in run_checks(check_toml, tmp_path, page)


def test_options_of_listed_commands_are_valid(tmp_path: Path) -> None:
    """Of those that train, estimate or prepare. test_names_in_listed_commands_exist is about the others."""
    found = [command for command in LISTED if options_of_run(command) is not None and command not in OF_TORCHTITAN]
    assert len(found) > 30
    assert run_checks(check_commands, tmp_path, found) == ""
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    with_error = ["./run_llama_train.sh --validation.path a.jsonl --evaluation.prompt a"]
    assert "evaluation.prompt" in run_checks(check_commands, wrong, with_error)


def test_names_in_listed_commands_exist() -> None:
    """Files, modules, markers, extras and the options of scripts and of commands without a config."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = {marker.partition(":")[0] for marker in project["tool"]["pytest"]["ini_options"]["markers"]}
    extras = project["project"]["optional-dependencies"]
    for command in LISTED:
        words = shlex.split(command, comments=True)
        for number, word in enumerate(words):
            if word.startswith(("scripts/", "tests/", "train_configs/")):
                assert any(ROOT.glob(word)), command
            if word == "-m" and words[number - 1].startswith("pytest"):
                assert words[number + 1] in markers, command
            assert [extra for extra in re.findall(r"^\.\[(\w+)\]$", word) if extra not in extras] == [], command
            if word == "-m" and words[number + 1].startswith("torchtrain."):
                assert (ROOT / f"{words[number + 1].replace('.', '/')}.py").is_file(), command
        script = next((word for word in words if word.startswith("scripts/") and word.endswith(".py")), None)
        module = next((word for word in words if word.startswith("torchtrain.")), "")
        if options_of_run(command) is None and (script or module):
            text = source_of_command(script or f"{module.replace('.', '/')}.py")
            for option in re.findall(r"(?<=\s)--([a-z][\w-]*)(?![\w.-])", command):
                names = (f'"--{option}"', f"{option.replace('-', '_')}:", f'"{option}"')
                assert any(name in text for name in names) or option in OF_OTHERS, f"{command}: no option --{option}"


def source_of_command(name: str) -> str:
    """The source of a script, or of a command with the modules of its plugin."""
    text = (ROOT / name).read_text(encoding="utf-8")
    plugin = re.search(r"torchtrain\.plugins\.\w+", text)
    files = sorted((ROOT / plugin[0].replace(".", "/")).glob("*.py")) if plugin else []
    return text + "".join(file.read_text(encoding="utf-8") for file in files)


def test_listed_commands_are_on_a_page() -> None:
    written = {command for page in PAGES for command in commands(page)}
    assert written >= set(COMMANDS) | set(LISTED)


def test_no_message_and_no_page_installs_the_torchtrain_of_pypi() -> None:
    """It is a package of somebody else. What an extra needs is named by ``optional_packages.install_command``."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    wrong = re.compile(r"""pip install (?:\S+ )*?['"]?torchtrain(?![\w/.-])|['"]torchtrain\[""")
    assert wrong.search("pip install 'torchtrain[s3]'")
    assert wrong.search("uv pip install --upgrade torchtrain")
    assert not wrong.search("pip install torchtrain-llama")
    for name in files:
        if Path(name).name in ("CHANGELOG.md", "test_docs.py") or not (ROOT / name).is_file():
            continue
        with contextlib.suppress(UnicodeDecodeError):
            text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
            for command in re.findall(r"pip install.{,60}|.torchtrain\[.{,60}", text):
                assert not wrong.search(command), f"{name}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_options_exist(page: Path) -> None:
    text = re.sub(r"```python\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not link.startswith("http"):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not heading or heading in anchors(target), f"{page.name} links to {link}#{heading}"
    if page.name == "from-torchtitan.md":  # its first column has torchtitan's options
        text = "\n".join(line.split("|", 2)[2] if line.startswith("|") else line for line in text.splitlines())
    sections = section_types()
    for section, key in re.findall(r"(?:--|`)([a-z_]+)\.([a-z_-]+)\b(?!\()", text):
        if section in sections and f"{section}.{key}" not in ("data.sources", "validation.sources", "train.slurm"):
            known = {key_of(field.name) for field in fields(sections[section])}
            name = key.removeprefix("no-")
            assert name in known or key in ("py", "jsonl", "safetensors", "yaml", "md"), (
                f"{page.name}: {section}.{key} is no option"
            )


def test_index_lists_every_page() -> None:
    index = ROOT / "docs/README.md"
    links = re.findall(r"\]\(([\w/-]+\.md)\)", index.read_text(encoding="utf-8"))
    pages = {page.relative_to(index.parent).as_posix() for page in index.parent.rglob("*.md") if page != index}
    assert set(links) == pages
    assert len(links) == len(pages), "a page is listed once"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_code_in_the_readme_of_the_tests_is_quoted_from_them() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    quotes = re.findall(r"From\s+`(test_\w+\.py)`[^`]*(?:`[^`]+`[^`]*)*?:\n\n```python\n(.*?)```", text, re.DOTALL)
    assert len(quotes) == text.count("```python")
    for name, code in quotes:
        (path,) = (ROOT / "tests").rglob(name)
        lines = {line.partition("  #")[0].strip() for line in path.read_text("utf-8").splitlines()}
        missing = [line for line in code.splitlines() if line.partition("  #")[0].strip() not in lines]
        assert missing == [], name


def test_generated_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("document_config", ROOT / "scripts/docs/document_config.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, render in script.PAGES.items():
        assert (script.ROOT / name).read_text(encoding="utf-8") == render(), (
            "run python scripts/docs/document_config.py"
        )


def test_reading_list_and_architecture_name_all_files_of_the_core_folders() -> None:
    page = (ROOT / "docs/reading.md").read_text(encoding="utf-8")
    core = re.findall(r"^\| \[([^]]+\.py)\]\(\.\./torchtrain/\1\) \|", page, re.MULTILINE)
    assert [name for name in core if not (ROOT / "torchtrain" / name).is_file()] == []
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    others = re.findall(r"`([^`]+)`", architecture.split("## Files for options")[1])
    for folder in ("distributed", "models/llama", "models/loss", "optimizers", "parallelisms"):
        for path in sorted((ROOT / "torchtrain" / folder).rglob("*.py")):
            name = path.relative_to(ROOT / "torchtrain").as_posix()
            known = name in core or name in others or path.name in ("__init__.py", "options.py")
            assert known, f"{name} is neither in docs/reading.md nor in the table of docs/architecture.md"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_of_the_docs_run_in_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in files.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():  # not a file that was deleted without a commit
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    texts = [{"text": f"def f{i}(x):\n    return x + {i}\n" * 40, "prompt": f"def f{i}"} for i in range(60)]
    for name in ("my_texts.jsonl", "prompts.jsonl"):
        (clone / name).write_text("".join(json.dumps(line) + "\n" for line in texts[: 60 if name[0] == "m" else 3]))
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(clone)}
    outputs = {}
    for command in COMMANDS:
        result = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=400
        )
        assert result.returncode == 0, f"{command}\n{result.stderr}"
        assert "Traceback" not in result.stderr, f"{command}\n{result.stderr}"
        outputs[command] = result
    first, resumed = outputs[COMMANDS[0]].stderr, outputs[COMMANDS[1]].stderr
    assert "step 100/100" in first
    assert "resumed from outputs/debug_model/checkpoint/step-100" in resumed
    assert "done: step 120 of 120" in resumed
    assert outputs[COMMANDS[4]].stdout.startswith("def main(")
    assert len((clone / "answers.jsonl").read_text().splitlines()) == 3
    assert (clone / "curves.png").stat().st_size > 10_000
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(clone / "debug_model_hf")
    assert model.num_parameters() == 6_819_072
