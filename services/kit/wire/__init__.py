"""gRPC's server end, on HTTP/2 as bytes: what services answer by.

gRPC's own asyncio server spends more on each call than most of the mesh's handlers do. This one answers the same calls
for a fraction of that (services/README.md has the numbers); callers cannot tell the two apart.
"""
