"""What answers a turn. First those that run here, then those in processes of their own.

base         the interface
answer       what it said, checked, or the end of its trajectory
registry     by name
scripted     answers of the submit
remote       answers of the trainer
deadline     a limit of time that can be stopped
guard        what a trajectory asks of one
bounded      each call with its deadline and check
checks       what came back
snapshot     its state, copied
calls        one call of foreign code
errors       what it raised, as text
pool         processes, and who gets one
stock        those that there are: started, ended, replaced when they die
line         who gets the next one
nursery      where they are forked
processes    one of them, from outside
warden       one of them, the part that cleans up
host         one of them, the part that runs foreign code
frames       what is sent to it
output       what it prints
isolated     an environment over there
adapters     other people's environments
"""
