"""`omniserve doctor`: what this machine has, what is wrong with it, and how to mend it.

`probes` looks at the machine, the other modules judge what it saw without looking at anything themselves.
"""
