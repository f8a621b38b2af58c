"""Checkpoints and updates.

safetensors_file  one file, checked
checkpoint   all of them, under their Hugging Face names
arena        where they lie: fixed addresses
update       a new version, checked whole before the first byte is copied
reload       when it is copied
"""
