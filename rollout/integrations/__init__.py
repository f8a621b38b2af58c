"""Seams of other people's trainers, filled by the client. Nothing here imports those trainers."""
