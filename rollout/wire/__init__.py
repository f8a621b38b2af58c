"""Sockets, sessions, and records on their way.

channel      the ROUTER, and its peers
curve        who may speak
keys         what a key looks like
sessions     who speaks
outbox       what is not acknowledged yet
multipart    messages of several frames
sender       large records in bursts, small replies between them
"""
