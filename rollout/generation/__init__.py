"""Turns asked of the engine.

kv_gate      who may ask now, that all can end
kv_budget    how much KV the started will need to their ends
async_engine awaited completions
pace         how many of them in one breath
failures     the engine's, as errors of the wire
"""
