"""Config files of torchtitan: one error message names the counterpart of each key."""

from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

from torchtrain.config.parse import FROM_TORCHTITAN, from_file
from torchtrain.config.schema import section_types, to_dict
from torchtrain.errors import ConfigError
from torchtrain.plugins.from_torchtitan.conversion import VALUES

# The keys of torchtitan's train_configs and job configs, by section.
KEYS_0_1 = {
    "job": "dump_folder description use_for_integration_test print_args",
    "profiling": "enable_profiling save_traces_folder profile_freq enable_memory_snapshot save_memory_snapshot_folder",
    "metrics": "log_freq enable_color_printing disable_color_printing enable_tensorboard save_tb_folder rank_0_only "
    "save_for_all_ranks enable_wandb",
    "model": "name flavor norm_type tokenizer_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay fused implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps decay_ratio decay_type lr_min",
    "training": "dataset dataset_path batch_size local_batch_size global_batch_size seq_len warmup_steps max_norm "
    "steps data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree enable_loss_parallel "
    "enable_cpu_offload mixed_precision_param mixed_precision_reduce compile gc_freq gc_debug seed deterministic",
    "experimental": "enable_async_tensor_parallel pipeline_parallel_degree pipeline_parallel_split_points "
    "pipeline_parallel_schedule pipeline_parallel_microbatches enable_compiled_autograd context_parallel_degree "
    "context_parallel_rotate_method custom_import custom_args_module custom_model_path",
    "parallelism": "data_parallel_replicate_degree enable_compiled_autograd data_parallel_shard_degree "
    "fsdp_reshard_after_forward tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel "
    "pipeline_parallel_degree pipeline_parallel_split_points pipeline_parallel_layers_per_stage "
    "pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size "
    "context_parallel_degree context_parallel_rotate_method expert_parallel_degree",
    "checkpoint": "enable_checkpoint folder interval_type interval initial_load_path initial_load_model_only "
    "model_weights_only last_save_model_only export_dtype create_seed_checkpoint async_mode keep_latest_k load_step "
    "exclude_from_loading enable_first_step_checkpoint last_save_in_hf",
    "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns",
    "float8": "enable_float8_linear enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp "
    "force_recompute_fp8_weight_in_bwd recipe_name filter_fqns emulate moe_fqns_prototype scaling_type_input "
    "scaling_type_weight scaling_type_grad_output",
    "mx": "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder",
    "memory_estimation": "enabled disable_fake_mode",
    "fault_tolerance": "enable process_group process_group_timeout_ms replica_id group_size min_replica_size "
    "semi_sync_method sync_steps should_quantize fragment_sync_delay fragment_update_alpha",
    "validation": "enabled dataset dataset_path local_batch_size seq_len freq steps",
}
KEYS_0_2 = {
    "job": "dump_folder description print_config save_config_file custom_config_module",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
    "enable_memory_snapshot save_memory_snapshot_folder",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
    "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload "
    "dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug seed deterministic "
    "debug_moe_force_load_balance",
    "training.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree "
    "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
    "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap context_parallel_degree "
    "context_parallel_load_balancer context_parallel_rotate_method expert_parallel_degree "
    "expert_tensor_parallel_degree expert_parallel_comm_backend",
    "checkpoint": "enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only "
    "initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode "
    "keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only",
    "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
    "memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    "compile": "enable components backend",
    "quantize.linear.float8": "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name "
    "filter_fqns emulate",
    "quantize.linear.mx": "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns",
    "quantize.grouped_mm.float8": "fqns",
    "quantize.grouped_mm.mx": "recipe_name fqns",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode",
    "memory_estimation": "enable disable_fake_mode",
    "fault_tolerance": "enable process_group process_group_timeout_ms replica_id group_size min_replica_size "
    "semi_sync_method",
    "experimental": "custom_import custom_args_module",
    "validation": "enable dataset dataset_path local_batch_size seq_len freq steps",
    "validation.dataloader": "num_workers",
    "debug": "seed deterministic deterministic_warn_only moe_force_load_balance",
}
SECTIONS = {name: to_dict(section()) for name, section in section_types().items()}
OPTIONS = {f"{section}.{key}": value for section, keys in SECTIONS.items() for key, value in keys.items()}
UNSET = ["lr_scheduler.total_steps", "lr_scheduler.decay_ratio"]  # by default

# The keys that the debug_model.toml of torchtitan 0.2 sets.
DEBUG_FILE: dict[str, dict[str, Any]] = {
    "job": {"dump_folder": "./outputs", "description": "debug", "print_args": False},
    "profiling": {"enable_profiling": False, "save_traces_folder": "profile_trace", "profile_freq": 10},
    "metrics": {"log_freq": 1, "disable_color_printing": False, "save_tb_folder": "tb", "enable_wandb": False},
    "model": {"name": "llama3", "flavor": "debugmodel", "hf_assets_path": "./tests/assets/tokenizer"},
    "optimizer": {"name": "AdamW", "lr": 8e-4, "eps": 1e-8},
    "lr_scheduler": {"warmup_steps": 2, "decay_ratio": 0.8, "decay_type": "linear", "min_lr_factor": 0.0},
    "training": {"local_batch_size": 8, "seq_len": 2048, "max_norm": 1.0, "steps": 10, "dataset": "c4_test"},
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 1,
        "fsdp_reshard_after_forward": "default",
        "enable_async_tensor_parallel": False,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
    },
    "checkpoint": {
        "enable_checkpoint": False,
        "folder": "checkpoint",
        "interval": 10,
        "last_save_model_only": False,
        "export_dtype": "float32",
        "async_mode": "disabled",
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "compile": {"enable": False, "components": ["model", "loss"]},
    "quantize": {"linear": {"float8": {"precompute_float8_dynamic_scale_for_fsdp": False, "filter_fqns": ["output"]}}},
    "validation": {"enabled": False, "dataset": "c4_validation", "freq": 5, "steps": 10},
}
# Keys to remove from it, and their replacements; for the optimizer's name, the new value.
EDITS = {
    "job.print_args": None,
    "profiling.save_traces_folder": None,
    "metrics.disable_color_printing": None,
    "metrics.save_tb_folder": None,
    "metrics.enable_wandb": "metrics.writers",
    "model.hf_assets_path": "model.tokenizer_path",
    "optimizer.name": "adamw",
    "training.dataset": "data.name",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.last_save_model_only": None,
    "checkpoint.export_dtype": "huggingface.export_dtype",
    "activation_checkpoint.selective_ac_option": "activation_checkpoint.selective_option",
    "compile.components": None,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": None,
    "quantize.linear.float8.filter_fqns": None,
    "validation.enabled": "validation.enable",
    "validation.dataset": "validation.name",
    "validation.freq": "validation.interval",
}


def test_table_lists_every_key_of_torchtitan() -> None:
    stars = tuple(key[:-1] for key in FROM_TORCHTITAN if key.endswith("*"))
    for keys in (KEYS_0_1, KEYS_0_2):
        for section, names in keys.items():
            for key in names.split():
                name = f"{section}.{key}"
                assert name in FROM_TORCHTITAN or name.startswith(stars), name


def test_counterparts_in_the_table_exist() -> None:
    for name, (here, default, _) in FROM_TORCHTITAN.items():
        assert not here or here in OPTIONS or here in UNSET, here
        if name in OPTIONS:
            assert here == name  # otherwise the key would be accepted without a message
        if default:
            tomli.loads(f"x = {default}")


def test_one_message_lists_all_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "debug_model.toml"
    file.write_text(tomli_w.dumps(DEBUG_FILE))
    with pytest.raises(ConfigError) as error:
        from_file(str(file))
    head, *lines = str(error.value).splitlines()
    assert head == f"{file}:"
    assert [line.split()[0] for line in lines] == list(EDITS)
    for line, here in zip(lines, EDITS.values(), strict=True):
        if here == "adamw":
            assert line.endswith(
                "must be one of 'adamw', 'muon', or one that a plugin or a module in job.import registers; did you "
                "mean 'adamw'?"
            )
        else:
            assert (f"it is named {here} in torchtrain" if here else "it has no counterpart in torchtrain") in line
    table: dict[str, Any] = {section: dict(keys) for section, keys in DEBUG_FILE.items() if section != "quantize"}
    for name, here in EDITS.items():
        section, _, key = name.partition(".")
        value = table.get(section, {}).pop(key, None)
        if here == "adamw":
            table[section][key] = here
        elif here:
            table.setdefault(here.split(".")[0], {})[here.split(".")[1]] = VALUES.get(here, {}).get(value, value)
    file.write_text(tomli_w.dumps(table))
    assert from_file(str(file)).validation.interval == 5


def test_message_with_torchtitan_keys_misspellings_and_wrong_types(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[float8]\nenable_float8_linear = true\n[trainnig]\nstesp = 1\n[training]\nsteps = 'x'\nstesp = 2\n"
    )
    with pytest.raises(ConfigError) as error:
        from_file(str(file))
    assert str(error.value).splitlines() == [
        f"{file}:",
        "  float8.enable_float8_linear is not a known key: it is named float8.recipe in torchtrain "
        '(true corresponds to recipe = "tensorwise")',
        "  trainnig is not a known section; did you mean 'training'?",
        "  training.steps = 'x' must be an integer",
        "  training.stesp is not a known key; did you mean 'training.steps'?",
    ]
    file.write_text("[training]\nstesp = 2\n")
    with pytest.raises(
        ConfigError, match=r"run.toml: training.stesp is not a known key; did you mean 'training.steps'\?$"
    ):
        from_file(str(file))


def test_differing_defaults_are_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/from-torchtitan.md").read_text()
    for row in (
        '| `lr_scheduler.decay_type` |  | **`"linear"`** | **`"cosine"`** |',
        "| `optimizer.lr` |  | **`0.0008`** | **`0.0003`** |",
        '| `checkpoint.async_mode` |  | **`"disabled"`** | **`"async"`** |',
        '| `activation_checkpoint.mode` |  | **`"selective"`** | **`"none"`** |',
    ):
        assert row in page
