"""What a change of an option of a plugin means for a run that resumes."""

from test_resume_compatibility import check_kinds

from torchtrain.checkpoint.resume_compatibility import Kind
from torchtrain.config.registry import CONFIG_SECTIONS

FROZEN: dict[Kind, dict[str, str]] = {  # every option of a plugin, by kind and section
    Kind.HARMLESS: {
        "comparison": "fingerprint_steps",
        "diagnostics": "norms_freq enable_loss_by_source straggler_freq straggler_factor",
        "evaluation": "prompts prompt_max_new_tokens prompt_temperature tasks tasks_path tasks_limit",
        "exact_sums": "transport",
        "huggingface": "export export_weights export_dtype",
        "remote_data": "streams cache_folder cache_gib held_out_gib",
        "report": "enable",
        "recheck": "interval on_wrong_rank",
        "replicas": (
            "lighthouse id min host allow_fast_sums collective_timeout_seconds quorum_timeout_seconds "
            "lighthouse_retries max_discarded on_stop"
        ),
        "estimate": (
            "world_size gpu gpus_per_node memory_gib network_gigabits dollars_per_gpu_hour mtbf_hours "
            "node_mtbf_hours replicas replica_lost_seconds save_seconds restart_seconds all_layers search "
            "search_seconds output json picture"
        ),
    },
    Kind.CHANGES: {
        "float8": "recipe enable_fsdp_float8_all_gather filter_small_layers",
        "grains": "tensor context",
    },
}


def test_kind_of_each_option_is_the_frozen_one() -> None:
    check_kinds(FROZEN, set(CONFIG_SECTIONS) - set(CONFIG_SECTIONS._core))
