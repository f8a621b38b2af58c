"""Turns asked of the engine.

kv_gate      who may ask now, that all can end
async_engine awaited completions
failures     the engine's, as errors of the wire
"""
