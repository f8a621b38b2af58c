"""Tokens in, tokens and logprobs out. Where to look, in the order of events:

how it is asked           handle; thread; process, child, pipe, log_line; loop
what is asked             request, check, errors, config
a step, on the host       engine, scheduler, sequence, slots, block_pool, kv_holds, scheduled, results, stop, phases
across the seam           step
a step, on the device     runner, step_input, model, ops, attention, rope, sampler, law, penalties, noise,
                          prompt_scores, result_buffer, ring
the same on a GPU         cuda_runner, cuda_input, cuda_ops, graphs, kernels
weights                   model_config, checkpoint, safetensors_file, arena, update, reload
memory                    memory, pinned, free_memory, kv_size
start                     recipe, build, warm_up, progress, collector
"""
