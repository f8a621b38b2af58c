"""The decoder as plain functions.

config       the shape, from a checkpoint's config.json
rope         tables of the rotary embedding
ops          one function for each kernel; here in torch
model        Qwen3, and Qwen2 and Llama by flags
"""
