"""Trajectories, environments, the worker, its client. Where to look, in the order of events:

start               cli, parser, options, config, config_file; start, load, advice, gpu, descriptors; summary,
                    versions, logs; doctor, checksum, local
the wire            channel, curve, sessions, outbox, sender; service, handlers, checks, wind_down
what was submitted  batches, submitted, partials; runs, pace; admission, record_size, kv_budget
one trajectory      rollout, spec, trajectory, tokens, sampling; kv_gate, async_engine, failures; mailbox, deadline,
                    stopwatch
its environment     environments, tools, chat, tokenizer
beside them         weights, score; observer, metrics
the other end       client, integrations
"""
