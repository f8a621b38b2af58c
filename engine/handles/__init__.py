"""An engine behind the seam of `engine.handle`.

loop         the engine's own thread of events: commands in, reports out
thread       in a thread of this process
process      in a process of its own: this end
child        that process
pipe         what the two send each other
log_line     what that process writes, as log records of this one
"""
