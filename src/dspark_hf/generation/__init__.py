"""
Speculative decoding inside the host's `generate`: hook, loop, taps, verification, fields,
statistics.
"""
