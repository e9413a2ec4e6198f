"""
How many drafted tokens are worth verifying, on this machine and at this load (paper sections 4 and
5).
"""
