"""vLLM engine arguments without a meaning in this engine, and the values that are accepted for them."""

from jax_paged.arguments.ignored import ANY, Ignored

# vLLM settings of single requests that LLM.chat and the server do not support. They would change the output,
# so only empty values are accepted.
UNSUPPORTED_BY_REQUESTS: Ignored = {
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),  # EngineArgs.mm_processor_kwargs applies to all images
}

# Arguments that only affect speed or logging. Any value is accepted.
_HARMLESS = """
    compilation_config cuda_graph_sizes disable_async_output_proc
    disable_custom_all_reduce disable_frontend_multiprocessing disable_hybrid_kv_cache_manager
    disable_log_requests disable_log_stats enable_log_requests enforce_eager guided_decoding_backend
    long_prefill_token_threshold max_log_len max_long_partial_prefills
    max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture
    multi_step_stream_outputs num_lookahead_slots optimization_level
    prefix_caching_hash_algo ray_workers_use_nsight served_model_name show_hidden_metrics_for_version
    stream_interval structured_outputs_config tokenizer_pool_size tokenizer_pool_type use_tqdm_on_load
    use_v2_block_manager
"""
# Arguments that affect results. Only the values that match this engine's behavior are accepted.
IGNORED: Ignored = dict.fromkeys(_HARMLESS.split(), ANY) | {
    "allowed_local_media_path": ("", None),
    "code_revision": (None,),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none", "embed", "classify"),
    "cpu_offload_gb": (0, 0.0),
    "device": ("auto",),
    "disable_sliding_window": (False,),
    "download_dir": (None,),
    "enable_prompt_adapter": (False,),
    "enable_sleep_mode": (False, True),
    "generation_config": ("auto",),
    "hf_config_path": (None,),
    "hf_token": (None, True),
    "kv_transfer_config": (None,),
    "load_format": ("auto", "safetensors"),
    "logits_processors": (None, []),
    "model_impl": ("auto",),
    "num_speculative_tokens": (None,),
    "override_generation_config": (None, {}),
    "override_pooler_config": (None,),
    "revision": (None,),
    "rope_scaling": (None, {}),
    "rope_theta": (None,),
    "speculative_model": (None,),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (False,),
    "worker_cls": ("auto",),
}
